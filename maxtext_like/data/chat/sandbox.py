"""Chat templates of checkpoints: unreviewed programs in jinja, run in the worker process.

Jinja's sandbox keeps a template from Python's internals. ``worker_process.py`` bounds its time and memory, which jinja does
not: a template can double a text in every step or never end. ``compile_template`` is for the process that wants text;
``Template`` is what the worker runs. Needs the extra ``chat`` (jinja2).
"""

import importlib.util
import json
from collections.abc import Callable
from typing import Any

from maxtext_like.data.chat.rendering import RenderError
from maxtext_like.data.worker_main import RefusedError
from maxtext_like.data.worker_process import MIB, Limits, Program
from maxtext_like.errors import UserError

CHARACTERS = 2**24  # of a rendered conversation
LIMITS = Limits(
  open_seconds=5.0, spare_seconds=5.0, call_seconds=0.05, call_seconds_per_character=1e-6, open_bytes=256 * MIB,
  call_bytes=256 * MIB, call_bytes_per_character=32,
)  # fmt: skip
"""Published templates render a small conversation in 0.0002 s and a million characters in 0.1 s, within 20 MiB."""


def compile_template(source: str, name: str) -> Callable[..., str]:
  """A function that renders a template with the variables that it is called with.

  It raises RenderError where the template refuses a conversation, and LimitError, which refuses the template, where it takes
  more time or memory than a template should.

  Args:
    source: the template.
    name: of its file, for errors.

  Raises:
    UserError: jinja2 is not installed, or ``source`` is not a template that can be run.
  """
  if importlib.util.find_spec("jinja2") is None:
    raise UserError(f"{name}: a jinja template needs jinja2, which is not installed\n  fix: pip install -e '.[chat]'")
  fix = "chat_template=FILE with another template, or the chat template that was published with the model"
  try:
    program = Program("template", f"{name}: the chat template", lambda: (source,), LIMITS, fix)
  except RefusedError as error:
    raise UserError(f"{name}: not a jinja template that can be run: {error}") from None

  def render(**variables: Any) -> str:
    try:
      return program.call("render", variables, size=_characters(variables))
    except RefusedError as error:
      raise RenderError(f"the chat template {error}") from None

  return render


def _characters(value: Any) -> int:
  """The characters of all texts in JSON, and one for each value."""
  if isinstance(value, str):
    return 1 + len(value)
  if isinstance(value, dict):
    return 1 + sum(len(key) + _characters(item) for key, item in value.items())
  return 1 + sum(map(_characters, value)) if isinstance(value, list | tuple) else 1


class Template:
  """A template, compiled. In the worker process alone."""

  def __init__(self, source: str):
    """Raises RefusedError: it does not compile."""
    import jinja2
    from jinja2 import ext, sandbox

    class Generation(ext.Extension):
      """``{% generation %}``, with which some templates mark what the assistant says, is its body."""

      tags = {"generation"}  # noqa: RUF012

      def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, Generation]
    )
    environment.filters.pop("random")  # the same record would give another text every time
    environment.filters["tojson"] = _to_json
    environment.globals = {"range": environment.globals["range"], "namespace": environment.globals["namespace"]}
    environment.globals |= {"dict": dict, "raise_exception": _refuse, "strftime_now": _no_clock}
    try:
      self._template = environment.from_string(source)
    except (jinja2.TemplateError, ArithmeticError, ValueError, TypeError) as error:  # constants are computed as it compiles
      raise RefusedError(str(error)) from None
    except RecursionError:
      raise RefusedError("nested too deeply") from None

  def facts(self) -> dict[str, Any]:
    """Nothing is to be known of it."""
    return {}

  def render(self, variables: dict[str, Any]) -> str:
    """The text of a conversation. Raises RefusedError: the template fails, or gives too much."""
    from jinja2 import TemplateError

    parts, size = [], 0
    try:
      for part in self._template.generate(**variables):
        parts.append(part)
        size += len(part)
        if size > CHARACTERS:
          raise RefusedError(f"gives more than {CHARACTERS} characters")
    except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
      raise RefusedError(f"refuses: {error}") from None
    except RecursionError:
      raise RefusedError("fails: RecursionError") from None
    return "".join(parts)


def _to_json(
  value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
):
  """As Hugging Face has it: no escapes for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
  raise RefusedError(f"refuses: {message}")


def _no_clock(form: str) -> None:
  raise RefusedError("asks for the date: the same record would give another text every day")
