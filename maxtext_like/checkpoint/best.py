"""``best.json`` among the steps of a run: which of them has the lowest held-out loss.

``checkpoints/best`` then stands for that step, wherever a checkpoint is named; on a disk it is a link to it.
"""

import contextlib
import json
import logging
import os
from pathlib import Path

from maxtext_like import atomic
from maxtext_like.storage import Place

NAME = "best"
FILE_NAME = "best.json"
_log = logging.getLogger(__name__)


def name_best(checkpoints: Path | Place, step: int, eval_loss: float) -> None:
  """Writes it down. OSError: the disk or the store does not take it."""
  content = json.dumps({"step": step, "eval_loss": eval_loss}) + "\n"
  if isinstance(checkpoints, Place):
    (checkpoints / FILE_NAME).write_bytes(content.encode())
    return
  atomic.write_text(checkpoints / FILE_NAME, content)
  new = checkpoints / f"{NAME}.{os.getpid()}.tmp"
  try:
    new.symlink_to(str(step))
    new.replace(checkpoints / NAME)
  except OSError as error:  # a disk without links
    _log.warning("%s: %s; name the step that %s has", checkpoints / NAME, error.strerror, FILE_NAME)


def named_best(checkpoints: Path | Place) -> int | None:
  """The step that is written down; None: none is. OSError: a store does not answer."""
  with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
    return int(json.loads((checkpoints / FILE_NAME).read_bytes())["step"])
  return None
