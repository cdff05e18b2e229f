"""What callers give: words and keywords of a configuration, directories, and where lines go; and what mistakes are told."""

import inspect
import numbers
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.config import hub
from maxtext_like.config.files import model_names
from maxtext_like.config.overrides import is_key
from maxtext_like.config.paths import require_local
from maxtext_like.config.problems import did_you_misspell
from maxtext_like.config.yaml_file import to_text
from maxtext_like.errors import UserError
from maxtext_like.storage import Place, is_remote

if TYPE_CHECKING:
  from maxtext_like.training.loop.progress import Shown


class Saved:
  """What a function of the API has written, with its ``directory``; it may be given where a directory may."""

  directory: Path | Place

  @property
  def place(self) -> str:
    """By which it may be named: the directory, or the URL of what is in a store."""
    return str(self.directory)


def words(overrides: tuple[Any, ...], keys: dict[str, Any], of: Callable[..., Any] | None = None) -> list[str]:
  """Overrides and keywords as the words of a command line.

  Args:
    overrides: of a call.
    keys: of the call.
    of: the function that was called, whose own keywords may have been meant.

  Raises:
    UserError: an override that is no text, a keyword that is no key but nearly one of the function's own.
  """
  if wrong := [word for word in overrides if not isinstance(word, str | Path)]:
    raise UserError(
      f"override {wrong[0]!r:.60} ({type(wrong[0]).__name__}): neither a text nor a path\n"
      '  fix: keys as keywords, as steps=20, or texts, as "steps=20"; a dict as **settings, a list as *settings'
    )
  if of is not None:
    own = [name for name, p in inspect.signature(of).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in keys:
      if not is_key(name) and (near := did_you_misspell(name, own)):
        raise UserError(f"{of.__name__}: unknown argument {name!r}{near}")
  given = [word if isinstance(word, str) else str(word) for word in overrides]
  return [*given, *(f"{name}={to_text(_plain(value))}" for name, value in keys.items())]


def _plain(value: Any) -> Any:
  if isinstance(value, Path):
    return str(value)
  if isinstance(value, Saved):
    return value.place
  value = dtype_name(value)
  return value.item() if hasattr(value, "item") else value  # a number of numpy's


def dtype_name(value: Any) -> Any:
  """``jnp.bfloat16`` and the like by name; anything else as it is."""
  if isinstance(value, type) or hasattr(value, "kind"):
    import numpy as np

    return np.dtype(value).name
  return value


def require_number(of: Callable[..., Any], name: str, value: Any, *, whole: bool = False) -> None:
  """UserError for an argument of a function that is no number, or no whole one."""
  if not isinstance(value, numbers.Integral if whole else numbers.Real) or isinstance(value, bool):
    raise UserError(f"{of.__name__}: {name}={value!r:.60}: not a {'whole ' if whole else ''}number")


def require_function(of: Callable[..., Any], name: str, value: Any) -> None:
  """UserError for an argument of a function that cannot be called."""
  if not callable(value):
    raise UserError(f"{of.__name__}: {name}={value!r:.60}: not a function")


def place_of(given: "str | os.PathLike[str] | Saved", what: str) -> Path:
  """The directory that was named: by its path, by a name in this machine's Hugging Face cache, or by what wrote it.

  Of a URL what its checkpoint needs is copied to this machine first.

  Args:
    given: what a caller said.
    what: what it is to be, for the error.

  Raises:
    UserError: neither of these; or nothing in that store.
    RetryableError: the store does not answer.
  """
  found = place_or_url(given, what)
  if isinstance(found, Path):
    return found
  from maxtext_like.checkpoint.weight_sources import on_this_machine

  return on_this_machine(str(found))


def place_or_url(given: "str | os.PathLike[str] | Saved", what: str) -> Path | Place:
  """The same without a copy: what is in a store stays there.

  Raises:
    UserError: neither of these.
  """
  directory = given.place if isinstance(given, Saved) else given
  if not isinstance(directory, str | os.PathLike):
    raise UserError(
      f"{what} {given!r:.80} ({type(given).__name__}) names no directory\n"
      "  fix: a path, a name of the Hugging Face cache, or what train, import_checkpoint or export_checkpoint returned"
    )
  text = os.fspath(directory)
  if text in model_names() and not Path(text).exists():
    raise UserError(
      f"{what} {text}: the name of a configuration, which has no weights\n"
      "  fix: name what it was trained into, as runs/NAME, or a Hugging Face checkpoint"
    )
  if is_remote(text):
    return Place(text)
  return hub.find(text) or Path(require_local(text)).expanduser()


def require_shown(progress: "Shown") -> None:
  """UserError for a ``progress`` that takes no lines."""
  if progress is not None and not callable(progress) and not hasattr(progress, "write"):
    raise UserError(
      f"progress={progress!r:.60} takes no lines\n  fix: a function of a line, as print, or a stream, as sys.stdout"
    )


def line_taker(progress: "Shown") -> Callable[[str], None]:
  """``progress`` as a function of a line."""
  require_shown(progress)
  if progress is None:
    return lambda _: None
  if callable(progress):
    return progress

  def write(line: str) -> None:
    progress.write(f"{line}\n")
    progress.flush()

  return write
