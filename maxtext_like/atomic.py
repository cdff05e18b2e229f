"""Files that are either whole or not there; used for manifests, locks, resolved configurations and reports."""

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

# Around what only the owner of a place may do: raises, or does not return, when the place is no longer ours.
Fence = Callable[[], AbstractContextManager[None]]


def sync_directory(path: Path) -> None:
  """Makes the names in ``path`` durable, so that a renamed file is still there after a power cut."""
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write_text(path: Path, text: str, fence: Fence = contextlib.nullcontext) -> None:
  """Writes ``text`` in UTF-8; otherwise as ``write_bytes``."""
  write_bytes(path, text.encode(), fence)


def write_bytes(path: Path, content: bytes, fence: Fence = contextlib.nullcontext) -> None:
  """Writes ``content`` to ``path`` through a temporary neighbour, fsync and rename.

  A reader sees the old file or the new one, never half of one, whatever kills the writer.

  Args:
    path: of the file.
    content: all of it.
    fence: around the rename. The fsync before it may take long, and longer where the process is stopped within it.

  Raises:
    OSError: the directory is missing, read-only or full; ``path`` is then unchanged and no temporary file is left.
  """
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  try:
    with open(temporary, "wb") as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    with fence():
      os.replace(temporary, path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise
  sync_directory(path.parent)
