"""Checks of arguments that the API functions share: overrides, keywords, directories, numbers and progress targets."""

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
  """Base class of results that are directories. API functions accept them wherever they accept a directory."""

  directory: Path | Place

  @property
  def place(self) -> str:
    """The directory as text, or its URL in a store."""
    return str(self.directory)


def words(overrides: tuple[Any, ...], keys: dict[str, Any], of: Callable[..., Any] | None = None) -> list[str]:
  """Return overrides and keywords as ``key=value`` words.

  Args:
    overrides: positional overrides of a call.
    keys: keyword arguments of the call that are configuration keys.
    of: the called function, to suggest its own keywords for a misspelled one.

  Raises:
    UserError: an override is not a text, or a keyword is not a key but similar to a keyword of the function.
  """
  if wrong := [word for word in overrides if not isinstance(word, str | Path)]:
    raise UserError(
      f"override {wrong[0]!r:.60} ({type(wrong[0]).__name__}): neither a text nor a path\n"
      '  fix: pass steps=20 or "steps=20"; pass a dict as **settings and a list as *settings'
    )
  if of is not None:
    own = [name for name, p in inspect.signature(of).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in keys:
      if not is_key(name) and (near := did_you_misspell(name, own)):
        raise UserError(
          f"{of.__name__}: unknown argument {name!r}{near}", fix=f"write one of {', '.join(own)}, or a key of the configuration"
        )
  given = [word if isinstance(word, str) else str(word) for word in overrides]
  return [*given, *(f"{name}={to_text(_plain(value))}" for name, value in keys.items())]


def _plain(value: Any) -> Any:
  if isinstance(value, Path):
    return str(value)
  if isinstance(value, Saved):
    return value.place
  value = dtype_name(value)
  return value.item() if hasattr(value, "item") else value  # a NumPy scalar


def after_loading(of: Callable[..., Any], word: str) -> UserError:
  """Return the error about a setting that was passed to ``of`` with a loaded model: ``key=value``, or "adapters"."""
  name, argument = (word, "adapters=[...]") if word == "adapters" else (word.partition("=")[0], f'"{word}"')
  return UserError(
    f"{of.__name__}: {word}: {name} cannot be changed after the model is loaded",
    fix=f"pass it when the model is loaded: maxtext_like.load(DIR, {argument})",
  )


def dtype_name(value: Any) -> Any:
  """Return the name of a dtype such as ``jnp.bfloat16``; any other value unchanged."""
  if isinstance(value, type) or hasattr(value, "kind"):
    import numpy as np

    return np.dtype(value).name
  return value


def require_number(of: Callable[..., Any], name: str, value: Any, *, whole: bool = False) -> None:
  """Raise UserError if an argument is not a number, or with ``whole`` not a whole number."""
  if not isinstance(value, numbers.Integral if whole else numbers.Real) or isinstance(value, bool):
    raise UserError(
      f"{of.__name__}: {name}={value!r:.60}: not a {'whole ' if whole else ''}number",
      fix=f"pass {name} as a {'whole ' if whole else ''}number",
    )


def require_function(of: Callable[..., Any], name: str, value: Any) -> None:
  """Raise UserError if an argument is not callable."""
  if not callable(value):
    raise UserError(f"{of.__name__}: {name}={value!r:.60}: not a function", fix=f"pass a function as {name}")


def place_of(given: "str | os.PathLike[str] | Saved", what: str) -> Path:
  """Return a directory named by a path, a name in the local Hugging Face cache, a URL, or a result of the API.

  For a URL, the needed files are copied to this machine first.

  Args:
    given: argument of the caller.
    what: name of the argument in errors.

  Raises:
    UserError: the argument names no directory, or the store has none there.
    RetryableError: the store does not answer.
  """
  found = place_or_url(given, what)
  if isinstance(found, Path):
    return found
  from maxtext_like.checkpoint.weight_sources import local_directory

  return local_directory(str(found))


def place_or_url(given: "str | os.PathLike[str] | Saved", what: str) -> Path | Place:
  """Return a directory as ``place_of``, or the place of a URL without a copy.

  Raises:
    UserError: the argument names no directory.
  """
  directory = given.place if isinstance(given, Saved) else given
  if not isinstance(directory, str | os.PathLike):
    raise UserError(
      f"{what} {given!r:.80} ({type(given).__name__}) names no directory\n"
      "  fix: pass a path, a name in the Hugging Face cache, or a result of train, import_checkpoint or export_checkpoint"
    )
  text = os.fspath(directory)
  if text in model_names() and not Path(text).exists():
    raise UserError(
      f"{what} {text}: this is the name of a configuration, which has no weights\n"
      "  fix: pass a run directory, such as runs/NAME, or a Hugging Face checkpoint"
    )
  if is_remote(text):
    return Place(text)
  return hub.find(text) or Path(require_local(text)).expanduser()


def require_shown(progress: "Shown") -> None:
  """Raise UserError if ``progress`` is neither None, nor callable, nor a stream."""
  if progress is not None and not callable(progress) and not hasattr(progress, "write"):
    raise UserError(
      f"progress={progress!r:.60} cannot receive lines\n"
      "  fix: pass a function that takes a line, such as print, or a stream, such as sys.stdout"
    )


def line_taker(progress: "Shown") -> Callable[[str], None]:
  """Return ``progress`` as a function that takes a line."""
  require_shown(progress)
  if progress is None:
    return lambda _: None
  if callable(progress):
    return progress

  def write(line: str) -> None:
    progress.write(f"{line}\n")
    progress.flush()

  return write
