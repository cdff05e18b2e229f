"""Records in ``best.json`` which step of a run has the lowest evaluation loss.

``checkpoints/best`` then names that step wherever a checkpoint is expected. On a disk it is a symbolic link.
"""

import contextlib
import json
import logging
import os
from pathlib import Path

from maxtext_like import atomic, strict_json
from maxtext_like.storage import Place

NAME = "best"
FILE_NAME = "best.json"
_log = logging.getLogger(__name__)


def to_text(step: int, eval_loss: float) -> str:
  """Returns the content of the file."""
  return json.dumps({"step": step, "eval_loss": eval_loss}) + "\n"


def record_best(checkpoints: Path | Place, step: int, eval_loss: float, fence: atomic.Fence = contextlib.nullcontext) -> None:
  """Records the best step. Raises OSError if the disk or the store refuses the write."""
  content = to_text(step, eval_loss)
  if isinstance(checkpoints, Place):
    (checkpoints / FILE_NAME).write_bytes(content.encode())
    return
  atomic.write_text(checkpoints / FILE_NAME, content, fence)
  link, new = checkpoints / NAME, checkpoints / f"{NAME}.{os.getpid()}.tmp"
  try:
    for left in checkpoints.glob(f"{NAME}.*.tmp"):  # left by a killed process
      left.unlink(missing_ok=True)
    new.symlink_to(str(step))
    with fence():
      if link.is_dir() and not link.is_symlink():  # the run was copied by a tool that follows links
        aside = _aside(link)
        _log.warning("%s is a directory, not a link to the best step; it was renamed to %s and is ignored", link, aside.name)
      new.replace(link)
  except OSError as error:  # the disk does not support links
    with contextlib.suppress(OSError):
      new.unlink(missing_ok=True)
    _log.warning("%s: %s; name the step in %s explicitly", link, error.strerror, FILE_NAME)


def _aside(path: Path) -> Path:
  """Renames ``path`` to a free name and returns that."""
  number = 1
  while os.path.lexists(target := path.with_name(f"{NAME}.copied{f'-{number}' if number > 1 else ''}")):
    number += 1
  path.rename(target)
  return target


def recorded_best(checkpoints: Path | Place) -> int | None:
  """Returns the recorded step, or None if there is none. Raises OSError if a store does not answer."""
  with contextlib.suppress(FileNotFoundError, NotADirectoryError):
    if (found := parse((checkpoints / FILE_NAME).read_bytes())) is not None:
      return found[0]
  return None


def parse(content: bytes) -> tuple[int, float] | None:
  """Parses the content of the file into step and loss. Returns None if it is incomplete."""
  with contextlib.suppress(ValueError, KeyError, TypeError):
    values = strict_json.loads(content)
    return int(values["step"]), float(values["eval_loss"])
  return None
