"""Finds initial weights: in a run, its checkpoints folder, one step, or a Hugging Face directory. Needs no JAX.

Each may be a URL. A step that a run wrote to gs:// or s3:// is read from there, each process its own part. Any other step, and
the memory-mapped files of Hugging Face, are copied to this machine first.
"""

import contextlib
from pathlib import Path
from typing import Any

from maxtext_like import local_copies
from maxtext_like.atomic import Fence
from maxtext_like.checkpoint.store import manifest, sidecar_files
from maxtext_like.checkpoint.store.best_steps import NAME as BEST
from maxtext_like.checkpoint.store.best_steps import recorded_best
from maxtext_like.checkpoint.store.remote_steps import RemoteSteps
from maxtext_like.checkpoint.store.steps import StepDirectories
from maxtext_like.config import hub
from maxtext_like.errors import UserError
from maxtext_like.storage import CONDITIONAL, Place, failed, is_remote


def open_steps(
  directory: Path | Place,
  fence: Fence = contextlib.nullcontext,
  token: str | None = None,
) -> StepDirectories | RemoteSteps:
  """Returns the steps of a directory on a disk or in a store."""
  return RemoteSteps(directory, fence, token) if isinstance(directory, Place) else StepDirectories(directory, fence, token)


def located(text: str | Path | Place) -> Path | Place:
  """Returns the path or the place that a text names."""
  return Place(str(text)) if is_remote(str(text)) else Path(str(text)).expanduser()


def is_hugging_face(directory: Path | Place) -> bool:
  """Returns True if a directory has the format of Hugging Face."""
  return is_there(directory / "config.json")


def is_there(place: Path | Place) -> bool:
  """Returns True if a file or an object exists.

  Raises:
    RetryableError: a store does not answer.
  """
  if isinstance(place, Path):
    return place.is_file()
  try:
    return place.entry() is not None
  except OSError as error:
    raise failed(error) from error


def find_step(directory: manifest.AnyPath) -> manifest.AnyPath | None:
  """Returns the newest complete step of a run or of a directory of steps, or the step itself; None if there is none.

  ``checkpoints/best`` of a run is the step that it records as its best.

  Raises:
    UserError: a step of the run has another step's name.
    RetryableError: a store does not answer.
  """
  if isinstance(directory, Place):
    found: Any = _find_in_store(directory)
    return found
  if directory.name == BEST and (step := recorded_best(directory.parent)) is not None:
    return directory.parent / str(step) if StepDirectories(directory.parent).has(step) else None
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


def _find_in_store(directory: Place) -> Place | None:
  if is_there(directory / manifest.FILE_NAME):
    return directory
  try:
    if directory.name == BEST and (step := recorded_best(directory.parent)) is not None:
      best = RemoteSteps(directory.parent)
      return best.path(step) if best.has(step) else None
    for place in (directory / "checkpoints", directory):
      steps = RemoteSteps(place)
      for number in reversed(steps.numbered()):
        if steps.has(number):
          return steps.path(number)
  except OSError as error:
    raise failed(error) from error
  return None


def local_directory(text: str | Path) -> Path:
  """Returns the local directory for a user's input: a path, a model in the Hugging Face cache, or a copy of a URL.

  For a URL it copies the Hugging Face files, or the newest step of the run.

  Raises:
    UserError: the URL contains neither, or the copy fails for lack of space or permission.
    RetryableError: the store does not answer.
  """
  source = located(text)
  if isinstance(source, Path):
    return hub.find(str(text)) or source
  if is_hugging_face(source):
    return local_hugging_face(source)
  step = find_step(source)
  if step is None:
    raise no_checkpoint(str(source), source)
  return local_step(step)


def local_hugging_face(source: Path | Place, *, weights: bool = True) -> Path:
  """Returns a local copy of a Hugging Face directory, with or without its weights."""
  if isinstance(source, Path):
    return source
  kinds = (".json", ".model", ".txt", ".jinja", *((".safetensors",) if weights else ()))
  wanted = lambda e: e.place.name.endswith(kinds) or e.place.name in sidecar_files.NAMES
  return local_copies.copy_folder(source, wanted, below=(sidecar_files.MORE_TEMPLATES,))


def local_step(step: Place) -> Path:
  """Copies a complete step to this machine and returns its path."""
  try:
    stored = manifest.read(step)
    wanted = {step / manifest.FILE_NAME, *(manifest.home(step, stored) / name for name in stored.files)}
    local_copies.copy([entry for entry in step.entries() if entry.place in wanted])
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from error
  except OSError as error:
    raise failed(error) from error
  return local_copies.path_of(step)


def readable_step(step: Path | Place) -> Path | Place:
  """Returns a step from which arrays can be read: the place in gs:// or s3:// if a run wrote it there, else a local copy.

  Raises:
    UserError, RetryableError: as ``local_step``.
  """
  if isinstance(step, Path):
    return step
  try:
    written_there = bool(manifest.read(step).folder)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from error
  except OSError as error:
    raise failed(error) from error
  # A step that was uploaded from a disk has hashes of its files, which can be checked only in a local copy.
  return step if written_there and step.protocol in CONDITIONAL else local_step(step)


def require_source(source: Path | Place, named: str = "init_from") -> None:
  """Checks that ``init_from`` contains weights, even if the run resumes from its own checkpoint and does not read them.

  Args:
    source: where the weights are.
    named: key or option that names them, for the error.

  Raises:
    UserError: there is no checkpoint in ``source``.
    RetryableError: a store does not answer.
  """
  if not is_hugging_face(source) and find_step(source) is None:
    raise no_checkpoint(f"{named}: {source}", source)


def unsaved_run(directory: Path | Place, what: str = "") -> UserError | None:
  """Returns the error for a run that ended before its first checkpoint; None if the directory is something else.

  Args:
    directory: a directory without a complete checkpoint.
    what: the key and the directory; default: the directory.
  """
  if not is_there(directory / "config.yml"):
    return None
  return UserError(
    f"{what or directory}: no complete checkpoint: the run ended before its first one was saved",
    fix=f"maxtext-like train {directory}/config.yml starts it again; a lower checkpoint_interval saves earlier",
  )


def no_checkpoint(what: str, directory: Path | Place) -> UserError:
  """Returns the error for a directory without weights. ``what`` gives the key and the directory."""
  known = isinstance(directory, Path) and directory.exists()
  if isinstance(directory, Path) and (directory / "adapter_config.json").is_file():
    return UserError(
      f"{what} is a peft adapter, not a model\n"
      "  fix: name the weights that it was trained on; pass the adapter as lora_from=DIR to train or --adapter DIR to generate"
    )
  if (error := unsaved_run(directory, what)) is not None:
    return error
  problem = "is not a checkpoint" if known or isinstance(directory, Place) else "does not exist"
  return UserError(
    f"{what} {problem}{hub.advice(str(directory))}",
    fix=hub.fix(
      str(directory), "name a directory with config.json and safetensors, a run directory, or one of its checkpoints/N"
    ),
  )
