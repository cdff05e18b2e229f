"""Chat templates of checkpoints: unreviewed jinja programs that run in the worker process.

Jinja's sandbox keeps a template away from Python's internals. It does not limit time and memory: a template can double a text
in every step or never end. ``worker_process.py`` sets these limits. ``compile_template`` is the interface for the process that
wants a text; ``Template`` runs in the worker. Needs the extra ``chat`` (jinja2).
"""

import importlib.util
import json
from collections.abc import Callable
from typing import Any

from maxtext_like.data.chat.rendering import RenderError
from maxtext_like.data.worker_main import RefusedError
from maxtext_like.data.worker_process import MIB, Limits, Program
from maxtext_like.errors import UserError
from maxtext_like.extras import install

CHARACTERS = 2**24  # longest rendered conversation
LIMITS = Limits(
  open_seconds=5.0, spare_seconds=5.0, call_seconds=0.05, call_seconds_per_character=1e-6, open_bytes=256 * MIB,
  call_bytes=256 * MIB, call_bytes_per_character=32,
)  # fmt: skip
"""Published templates render a small conversation in 0.0002 s and a million characters in 0.1 s, with less than 20 MiB."""


def compile_template(source: str, name: str) -> Callable[..., str]:
  """Returns a function that renders a template with the variables in its arguments.

  The function raises RenderError if the template refuses a conversation, and LimitError if the template takes more time or
  memory than it may use.

  Args:
    source: text of the template.
    name: name of its file, for errors.

  Raises:
    UserError: jinja2 is not installed, or ``source`` is not a template that can be run.
  """
  if importlib.util.find_spec("jinja2") is None:
    raise UserError(f"{name}: a jinja template needs jinja2, which is not installed\n  fix: {install('chat')}")
  fix = "chat_template=FILE with another template, or the chat template that was published with the model"
  try:
    program = Program("template", f"{name}: the chat template", lambda: (source,), LIMITS, fix)
  except RefusedError as error:
    raise UserError(f"{name}: not a jinja template that can be run: {error}\n  fix: {fix}") from None

  def render(**variables: Any) -> str:
    try:
      return program.call("render", variables, size=_characters(variables))
    except RefusedError as error:
      raise RenderError(f"the chat template {error}") from None

  return render


def _characters(value: Any) -> int:
  """Returns the number of characters of all texts in a JSON value, plus one for each value."""
  if isinstance(value, str):
    return 1 + len(value)
  if isinstance(value, dict):
    return 1 + sum(len(key) + _characters(item) for key, item in value.items())
  return 1 + sum(map(_characters, value)) if isinstance(value, list | tuple) else 1


class Template:
  """A compiled template. Used only in the worker process."""

  def __init__(self, source: str):
    """Compiles the template. Raises RefusedError if that fails."""
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
    environment.filters.pop("random")  # the same record would give a different text every time
    environment.filters["tojson"] = _to_json
    environment.globals = {"range": environment.globals["range"], "namespace": environment.globals["namespace"]}
    environment.globals |= {"dict": dict, "raise_exception": _refuse, "strftime_now": _no_clock}
    try:
      self._template = environment.from_string(source)
    except (jinja2.TemplateError, ArithmeticError, ValueError, TypeError) as error:  # constants are evaluated at compile time
      raise RefusedError(str(error)) from None
    except RecursionError:
      raise RefusedError("nested too deeply") from None

  def facts(self) -> dict[str, Any]:
    """Returns no facts: the caller needs none."""
    return {}

  def render(self, variables: dict[str, Any]) -> str:
    """Returns the text of a conversation. Raises RefusedError if the template fails or the text is too long."""
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
  """Same as in Hugging Face: without escapes for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
  raise RefusedError(f"refuses: {message}")


def _no_clock(form: str) -> None:
  raise RefusedError("asks for the date, so the same record would give a different text every day")
