"""Room on a disk: how much is free, and bytes as people read them."""

import logging
import shutil
from pathlib import Path

from maxtext_like.errors import UserError
from maxtext_like.storage import Place

_log = logging.getLogger(__name__)


def free_bytes(path: Path | Place) -> int | None:
  """Returns the free bytes of a file system; None where it does not know (some network file systems say 0 of 0, a
  store nothing)."""
  if isinstance(path, Place):
    return None
  usage = shutil.disk_usage(path)
  return usage.free if usage.total else None


def megabytes(count: float) -> str:
  """Formats bytes for people, as decimal MB or GB."""
  return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def require_room(directory: Path | Place, size: int, *, existing: int, kept: int | None) -> None:
  """Compares what checkpoints will need with what is free: one more than are kept exist for a moment in every save.

  Args:
    directory: of the checkpoints.
    size: of one, in bytes.
    existing: how many there are.
    kept: how many are kept; None: all. Less room than for those is a warning.

  Raises:
    UserError: not even one more fits.
  """
  free = free_bytes(directory)
  if free is None:
    return
  wanted = size * max(1, (kept or 1) + 1 - existing)
  if free < size:
    raise UserError(
      f"{directory}: a checkpoint needs {megabytes(size)}, {megabytes(free)} are free; free some space, choose "
      "another output_dir, or train without checkpoints (enable_checkpointing=false resume=false)"
    )
  if free < wanted:
    _log.warning(
      "%s: keeping %s checkpoints of %s needs %s more, %s are free; free some space or lower max_to_keep",
      directory, kept or "all", megabytes(size), megabytes(wanted), megabytes(free),
    )  # fmt: skip
