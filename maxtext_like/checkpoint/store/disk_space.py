"""Free disk space, and checks that checkpoints will fit."""

import logging
import shutil
from pathlib import Path

from maxtext_like.errors import UserError
from maxtext_like.storage import Place

_log = logging.getLogger(__name__)


def free_bytes(path: Path | Place) -> int | None:
  """Returns the free bytes of a file system, or None if unknown: for a store, and for network disks that report 0 of 0."""
  if isinstance(path, Place):
    return None
  usage = shutil.disk_usage(path)
  return usage.free if usage.total else None


def megabytes(count: float) -> str:
  """Formats a number of bytes as decimal MB or GB."""
  return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def require_disk_space(directory: Path | Place, size: int, *, existing: int, kept: int | None) -> None:
  """Compares the space that checkpoints need with the free space. During every save one more exists than is kept.

  Args:
    directory: directory of the checkpoints.
    size: bytes of one checkpoint.
    existing: number of existing checkpoints.
    kept: number of checkpoints to keep; None for all. Too little space for these logs a warning.

  Raises:
    UserError: not even one more checkpoint fits.
  """
  free = free_bytes(directory)
  if free is None:
    return
  wanted = size * max(1, (kept or 1) + 1 - existing)
  if free < size:
    raise UserError(
      f"{directory}: a checkpoint needs {megabytes(size)}, {megabytes(free)} are free\n"
      "  fix: free disk space, choose another output_dir, or save no checkpoints (enable_checkpointing=false resume=false)"
    )
  if free < wanted:
    _log.warning(
      "%s: keeping %s checkpoints of %s needs %s more, %s are free; free disk space or lower max_to_keep",
      directory, kept or "all", megabytes(size), megabytes(wanted), megabytes(free),
    )  # fmt: skip
