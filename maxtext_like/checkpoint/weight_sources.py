"""Where weights to begin with may lie: a run, its checkpoints, one step of them, or a Hugging Face directory. Without JAX."""

from pathlib import Path

from maxtext_like.checkpoint import manifest
from maxtext_like.checkpoint.steps import StepDirectories
from maxtext_like.config import hub
from maxtext_like.errors import UserError


def find_step(directory: Path) -> Path | None:
  """The directory of the newest complete step in a run, a directory of steps, or a step itself; None: there is none.

  Raises:
    UserError: the run has a step under another's name.
  """
  if (directory / manifest.FILE_NAME).is_file():
    return directory
  for place in (directory / "checkpoints", directory):
    if not place.is_dir():
      continue
    directories = StepDirectories(place)
    directories.require_names()
    if steps := directories.complete():
      return place / str(max(steps))
  return None


def require_source(source: Path, named: str = "init_from") -> None:
  """Looks for the weights of ``init_from``, whether a run needs them or goes on from a step of its own.

  Args:
    source: where they are.
    named: what to call it in the error.

  Raises:
    UserError: there is no checkpoint in ``source``.
  """
  source = source.expanduser()
  if not (source / "config.json").is_file() and find_step(source) is None:
    raise no_checkpoint(f"{named}: {source}", source)


def no_checkpoint(what: str, directory: Path) -> UserError:
  """The error for a directory without weights; ``what`` says who named it, and the directory."""
  return UserError(
    f"{what} {'is no checkpoint' if directory.exists() else 'does not exist'}{hub.advice(str(directory))}\n"
    "  fix: name a directory with config.json and safetensors, a run directory, or one of its checkpoints/N"
  )
