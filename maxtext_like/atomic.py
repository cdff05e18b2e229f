"""Files that are either whole or not there; used for manifests, locks, resolved configurations and reports."""

import os
from pathlib import Path


def sync_directory(path: Path) -> None:
  """Makes the names in ``path`` durable, so that a renamed file is still there after a power cut."""
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write_text(path: Path, text: str) -> None:
  """Writes ``text`` (UTF-8) to ``path`` through a temporary neighbour, fsync and rename.

  A reader sees the old file or the new one, never half of one, whatever kills the writer.

  Raises:
    OSError: the directory is missing, read-only or full; ``path`` is then unchanged and no temporary file is left.
  """
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  try:
    with open(temporary, "w", encoding="utf-8") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise
  sync_directory(path.parent)
