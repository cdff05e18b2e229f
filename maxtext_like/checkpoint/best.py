"""``best.json`` among the steps of a run: which of them has the lowest held-out loss.

``checkpoints/best`` then stands for that step, wherever a checkpoint is named.
"""

import contextlib
import json
from pathlib import Path

from maxtext_like import atomic
from maxtext_like.storage import Place

NAME = "best"
FILE_NAME = "best.json"


def name_best(checkpoints: Path | Place, step: int, eval_loss: float) -> None:
  """Writes it down. OSError: the disk or the store does not take it."""
  content = json.dumps({"step": step, "eval_loss": eval_loss}) + "\n"
  if isinstance(checkpoints, Place):
    (checkpoints / FILE_NAME).write_bytes(content.encode())
  else:
    atomic.write_text(checkpoints / FILE_NAME, content)


def named_best(checkpoints: Path | Place) -> int | None:
  """The step that is written down; None: none is. OSError: a store does not answer."""
  with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
    return int(json.loads((checkpoints / FILE_NAME).read_bytes())["step"])
  return None
