"""Templates of checkpoints: programs in jinja that nobody has vouched for, run with bounds on time and on size.

Jinja's sandbox keeps a template from Python's insides; what it leaves open is here: a loop that does not end, a text that
doubles with every step. Needs the extra ``chat`` (jinja2).
"""

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from maxtext_like.data.chat.rendering import RenderError
from maxtext_like.errors import UserError

SECONDS = 5.0  # of all that one conversation needs
CHARACTERS = 2**24  # of a text on the way, of the whole
_FILE = "<template>"  # what jinja calls the code of a template that comes from no file


def compile_template(source: str, name: str) -> Callable[..., str]:
  """A function of a template's variables that renders it, once for each call; within ``bounded_time`` its time is bounded.

  Args:
    source: the template.
    name: names it in errors.

  Raises:
    UserError: jinja2 is not installed, or the template is none.
  """
  try:
    import jinja2
    from jinja2 import ext, nodes, sandbox
  except ImportError:
    raise UserError(f"{name}: a jinja template needs jinja2, which is not installed\n  fix: pip install -e '.[chat]'") from None

  class Bounded(sandbox.ImmutableSandboxedEnvironment):
    """Sizes of what operators, calls and filters give are looked at."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
      if operator == "**" or (operator == "%" and isinstance(left, str)):
        raise jinja2.exceptions.SecurityError(f"the operator {operator} is not run")
      if operator == "*":
        for many, times in ((left, right), (right, left)):
          if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > CHARACTERS:
            raise jinja2.exceptions.SecurityError("the text grows without bound")
      return _small(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **keys: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
      return _small(super().call(context, obj, *args, **keys))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
      wide = attr in ("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "replace", "to_bytes")
      return super().is_safe_attribute(obj, attr, value) and (not wide or (attr == "replace" and isinstance(obj, str)))

  class Generation(ext.Extension):
    """``{% generation %}``, with which some templates mark what the assistant says, is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **keys: Any) -> Any:
      return _small(function(*args, **keys))

    return run

  environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, Generation])
  for wide in ("center", "format", "indent", "wordwrap", "filesizeformat", "random"):
    environment.filters.pop(wide)
  environment.filters = {key: checked(function) for key, function in environment.filters.items()}
  environment.filters["tojson"] = _to_json
  environment.globals = {"range": environment.globals["range"], "namespace": environment.globals["namespace"]}
  environment.globals |= {"dict": dict, "raise_exception": _refuse, "strftime_now": _no_clock}
  try:
    tree = _plus_for_tilde(environment.parse(source), nodes)
    template = jinja2.Template.from_code(environment, environment.compile(tree), environment.make_globals(None))
  except jinja2.TemplateError as error:
    raise UserError(f"{name}: not a jinja template that can be run: {error}") from None
  except RecursionError:
    raise UserError(f"{name}: not a jinja template that can be run: nested too deeply") from None

  def render(**variables: Any) -> str:
    parts, size = [], 0
    try:
      for part in template.generate(**variables):
        parts.append(part)
        size += len(part)
        if size > CHARACTERS:
          raise RenderError(f"the chat template gives more than {CHARACTERS} characters")
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
      raise RenderError(f"the chat template refuses: {error}") from None
    except (RecursionError, MemoryError) as error:
      raise RenderError(f"the chat template fails: {type(error).__name__}") from None
    return "".join(parts)

  return render


@contextlib.contextmanager
def bounded_time() -> Iterator[None]:
  """RenderError once templates have run for SECONDS inside; works in any thread."""
  deadline = time.monotonic() + SECONDS

  def at_line(frame: FrameType, event: str, value: Any) -> Any:
    if time.monotonic() > deadline:
      raise RenderError(f"the chat template runs for more than {SECONDS:g} s")
    return at_line

  def at_call(frame: FrameType, event: str, value: Any) -> Any:
    return at_line(frame, event, value) if frame.f_code.co_filename == _FILE else None

  before = sys.gettrace()
  sys.settrace(at_call)
  try:
    yield
  finally:
    sys.settrace(before)


def _small(value: Any) -> Any:
  if isinstance(value, str | list | tuple) and len(value) > CHARACTERS:
    raise RenderError("the chat template's text grows without bound")
  return value


def _plus_for_tilde(node: Any, nodes: Any) -> Any:
  """The tree with ``a|string + b|string``, whose size is looked at, for every ``a ~ b``."""
  for field, value in node.iter_fields():
    if isinstance(value, list):
      setattr(node, field, [_plus_for_tilde(item, nodes) if isinstance(item, nodes.Node) else item for item in value])
    elif isinstance(value, nodes.Node):
      setattr(node, field, _plus_for_tilde(value, nodes))
  if not isinstance(node, nodes.Concat):
    return node
  texts = [nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes]
  return functools.reduce(lambda left, right: nodes.Add(left, right, lineno=node.lineno), texts)


def _to_json(
  value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
):
  """As Hugging Face has it: no escapes for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
  raise RenderError(f"the chat template refuses: {message}")


def _no_clock(form: str) -> None:
  raise RenderError("the chat template asks for the date: the same record would give another text every day")
