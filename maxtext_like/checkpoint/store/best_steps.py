"""``best.json`` among the steps of a run: which of them has the lowest held-out loss.

``checkpoints/best`` then stands for that step, wherever a checkpoint is named; on a disk it is a link to it.
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


def written(step: int, eval_loss: float) -> str:
  """What stands in the file."""
  return json.dumps({"step": step, "eval_loss": eval_loss}) + "\n"


def name_best(checkpoints: Path | Place, step: int, eval_loss: float, fence: atomic.Fence = contextlib.nullcontext) -> None:
  """Writes it down. OSError: the disk or the store does not take it."""
  content = written(step, eval_loss)
  if isinstance(checkpoints, Place):
    (checkpoints / FILE_NAME).write_bytes(content.encode())
    return
  atomic.write_text(checkpoints / FILE_NAME, content, fence)
  link, new = checkpoints / NAME, checkpoints / f"{NAME}.{os.getpid()}.tmp"
  try:
    for left in checkpoints.glob(f"{NAME}.*.tmp"):  # of one that was killed
      left.unlink(missing_ok=True)
    new.symlink_to(str(step))
    with fence():
      if link.is_dir() and not link.is_symlink():  # a run that was copied with its links followed
        aside = _aside(link)
        _log.warning("%s is a directory and no link to the best step; moved to %s, which nothing reads", link, aside.name)
      new.replace(link)
  except OSError as error:  # a disk without links
    with contextlib.suppress(OSError):
      new.unlink(missing_ok=True)
    _log.warning("%s: %s; name the step that %s has", link, error.strerror, FILE_NAME)


def _aside(path: Path) -> Path:
  """Gives what is there another name, and returns that."""
  number = 1
  while os.path.lexists(target := path.with_name(f"{NAME}.copied{f'-{number}' if number > 1 else ''}")):
    number += 1
  path.rename(target)
  return target


def named_best(checkpoints: Path | Place) -> int | None:
  """The step that is written down; None: none is. OSError: a store does not answer."""
  with contextlib.suppress(FileNotFoundError, NotADirectoryError):
    if (found := parsed((checkpoints / FILE_NAME).read_bytes())) is not None:
      return found[0]
  return None


def parsed(content: bytes) -> tuple[int, float] | None:
  """The step and its loss that stand in the file; None where it is not whole."""
  with contextlib.suppress(ValueError, KeyError, TypeError):
    values = strict_json.loads(content)
    return int(values["step"]), float(values["eval_loss"])
  return None
