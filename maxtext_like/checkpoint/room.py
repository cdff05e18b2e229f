"""Room on a disk: how much is free, and bytes as people read them."""

import shutil
from pathlib import Path


def free_bytes(path: Path) -> int | None:
  """Returns the free bytes of a file system; None where it does not know (some network file systems say 0 of 0)."""
  usage = shutil.disk_usage(path)
  return usage.free if usage.total else None


def megabytes(count: float) -> str:
  """Formats bytes for people, as decimal MB or GB."""
  return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
