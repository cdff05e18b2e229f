"""Atomic file writes: a reader sees the old file or the complete new one. Used for manifests, locks and reports."""

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

# A context around an operation that only the owner of a directory may do. It raises, or does not return, if ownership was lost.
Fence = Callable[[], AbstractContextManager[None]]


def sync_directory(path: Path) -> None:
  """Flushes the directory entries of ``path`` to disk, so that a renamed file survives a power failure."""
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write_text(path: Path, text: str, fence: Fence = contextlib.nullcontext) -> None:
  """Writes ``text`` in UTF-8. See ``write_bytes``."""
  write_bytes(path, text.encode(), fence)


def write_bytes(path: Path, content: bytes, fence: Fence = contextlib.nullcontext) -> None:
  """Writes ``content`` to ``path`` through a temporary file in the same directory, fsync and rename.

  A reader sees the old file or the new one, never a partial one, even if the writer is killed.

  Args:
    path: the file to write or replace.
    content: the complete content.
    fence: context entered around the rename only. The fsync before it can take long, so ownership is checked after it.

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
