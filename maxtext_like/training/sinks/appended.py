"""An append-only file that is written in complete pieces: a piece that does not fit on the disk is removed again."""

import contextlib
import os
from pathlib import Path


class AppendedFile:
  """Appends to a file. The file is created with the first piece, and again if it was deleted meanwhile.

  Args:
    path: path of the file, in a directory that exists. Existing content is kept.
    header: written before the first piece of an empty file.
  """

  def __init__(self, path: Path, header: bytes = b""):
    self._path, self._header = path, header
    self._descriptor: int | None = None
    self._incomplete_from: int | None = None  # start of an incomplete piece that could not be removed yet

  def append(self, piece: bytes) -> None:
    """Write a complete piece, or nothing.

    Raises:
      OSError: the piece could not be written. Any incomplete rest of it is removed before the next piece is written.
    """
    try:
      self._append(piece)
    except OSError:
      self.close()  # a descriptor of a disk that was disconnected stays invalid when the disk is back
      raise

  def close(self) -> None:
    """Close the file. No data is buffered, so only the disk itself can fail."""
    if self._descriptor is not None:
      descriptor, self._descriptor = self._descriptor, None
      with contextlib.suppress(OSError):  # network disks can report late errors of earlier pieces
        os.close(descriptor)

  def _append(self, piece: bytes) -> None:
    # The file was deleted: start a new one.
    if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
      self.close()
      self._incomplete_from = None
    if self._descriptor is None:
      self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    self._remove_incomplete()
    # The size before the piece is needed to remove an incomplete piece.
    begin = os.fstat(self._descriptor).st_size
    left = memoryview(piece if begin else self._header + piece)
    # The system may write only part of a piece at a time.
    try:
      while left:
        left = left[os.write(self._descriptor, left) :]
    except OSError:
      # An incomplete row must not stay, because later pieces would be appended to it.
      self._incomplete_from = begin
      with contextlib.suppress(OSError):  # removed before the next piece instead
        self._remove_incomplete()
      raise

  def _remove_incomplete(self) -> None:
    if self._incomplete_from is not None and self._descriptor is not None:
      os.ftruncate(self._descriptor, min(self._incomplete_from, os.fstat(self._descriptor).st_size))
      self._incomplete_from = None
