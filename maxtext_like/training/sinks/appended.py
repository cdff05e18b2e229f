"""A file that grows by whole pieces: a piece that does not fit on the disk leaves nothing of itself behind."""

import contextlib
import os
from pathlib import Path


class AppendedFile:
  """Appends to a file, which is made with the first piece, and again when somebody removed it.

  Args:
    path: of the file, in a directory that exists. What it holds already is kept.
    header: goes before the first piece of an empty file.
  """

  def __init__(self, path: Path, header: bytes = b""):
    self._path, self._header = path, header
    self._descriptor: int | None = None
    self._torn: int | None = None  # where a half-written piece begins that could not be taken away

  def append(self, piece: bytes) -> None:
    """Writes a piece, all of it or none.

    Raises:
      OSError: it could not be written. What may be left of it then goes before the next one comes.
    """
    try:
      self._append(piece)
    except OSError:
      self.close()  # a descriptor of a disk that was away stays bad when the disk is back
      raise

  def close(self) -> None:
    """Nothing waits to be written, so nothing can fail but the disk itself."""
    if self._descriptor is not None:
      descriptor, self._descriptor = self._descriptor, None
      with contextlib.suppress(OSError):  # of a network disk: about pieces that were taken before
        os.close(descriptor)

  def _append(self, piece: bytes) -> None:
    if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
      self.close()
      self._torn = None
    if self._descriptor is None:
      self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    self._mend()
    begin = os.fstat(self._descriptor).st_size
    left = memoryview(piece if begin else self._header + piece)
    try:
      while left:
        left = left[os.write(self._descriptor, left) :]
    except OSError:
      self._torn = begin
      with contextlib.suppress(OSError):  # tried again before the next piece
        self._mend()
      raise

  def _mend(self) -> None:
    if self._torn is not None and self._descriptor is not None:
      os.ftruncate(self._descriptor, min(self._torn, os.fstat(self._descriptor).st_size))
      self._torn = None
