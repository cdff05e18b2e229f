"""Standard output that never blocks or ends a run: not if the reader exits, the disk is full or the terminal is closed.

Lines are written on a thread (``guarded.py``). If the reader is gone for good, the descriptor is replaced by /dev/null, because
libraries also write to it directly.
"""

import contextlib
import errno
import io
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from maxtext_like.training.sinks.guarded import Guarded, LostError

_CLOSE_SECONDS = 10.0


def say_on_stderr(line: str) -> None:
  """Write a line to standard error, unless it cannot be written without blocking."""
  with contextlib.suppress(OSError, ValueError):  # closed, or its disk is full: the message cannot be shown anywhere else
    if select.select([], [2], [], 0)[1]:
      os.write(2, f"{line}\n".encode())


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
  """Replace ``sys.stdout`` by an ``Output``."""
  before = sys.stdout
  with contextlib.suppress(OSError):  # reported when the next line fails
    before.flush()
  sys.stdout = output = Output(before)
  try:
    yield
  finally:
    sys.stdout = before
    output.close()


class Output(io.TextIOBase):
  """A text stream whose ``write`` neither blocks nor raises.

  Args:
    stream: receives the text.
  """

  def __init__(self, stream: TextIO):
    super().__init__()
    self._stream = stream
    try:
      self._descriptor: int | None = stream.fileno()
      self._terminal = stream.isatty()
    except (OSError, ValueError):  # a stream without a file descriptor, as in a notebook
      self._descriptor, self._terminal = None, False
    self._gone: str | None = None
    self._lock = threading.Lock()
    self._line = ""  # the current incomplete line
    self._left: memoryview | None = None  # the rest of the piece that is being written
    self._guarded = Guarded("standard output", self._write, "line", say_on_stderr)

  @property
  def unwritten(self) -> str | None:
    """A line about text that could not be written, and why; None if all was written."""
    return self._guarded.unwritten

  @property
  def encoding(self) -> str:  # type: ignore[override]
    """Encoding of the stream."""
    return getattr(self._stream, "encoding", None) or "utf-8"

  def isatty(self) -> bool:
    """Return True if the stream was a terminal at the start."""
    return self._terminal

  def fileno(self) -> int:
    """Return the descriptor. Raises io.UnsupportedOperation if there is none."""
    return self._stream.fileno()

  def writable(self) -> bool:
    """Return True."""
    return True

  def write(self, text: str) -> int:
    """Accept text. An incomplete line waits for its end or for ``flush``."""
    with self._lock:  # warnings come from several threads
      *lines, self._line = (self._line + text).split("\n")
      for line in lines:
        self._guarded.put(line + "\n")
    return len(text)

  def flush(self) -> None:
    """Queue an incomplete line. Does not wait until it is written."""
    with self._lock:
      if self._line:
        self._guarded.put(self._line)
        self._line = ""

  def close(self) -> None:
    """Wait a moment until everything is written. The stream itself stays open."""
    if not self.closed:
      super().close()  # flushes
      self._guarded.close(_CLOSE_SECONDS)
      if self.unwritten is not None:
        say_on_stderr(self.unwritten)

  def _write(self, text: str) -> None:
    # The reader is gone for good.
    if self._gone is not None:
      raise LostError(self._gone)
    # A stream without a descriptor, as in a notebook, is written to directly.
    if self._descriptor is None:
      self._stream.write(text)
      self._stream.flush()
      return
    if self._left is None:
      self._left = memoryview(text.encode(self.encoding, "backslashreplace"))
    # Write with the descriptor, because the stream's own buffer would lose track of what was written after an error.
    while self._left:
      try:
        self._left = self._left[os.write(self._descriptor, self._left) :]
      except BlockingIOError:  # another process made the shared terminal non-blocking
        select.select([], [self._descriptor], [])
      except OSError as error:
        if not self._terminal and error.errno not in (errno.EPIPE, errno.EBADF, errno.ECONNRESET):
          raise  # a disk error, which may be temporary
        self._give_up(self._descriptor, error.strerror or str(error))
    self._left = None

  def _give_up(self, descriptor: int, reason: str) -> None:
    # Libraries also write to the descriptor, so it is replaced and not only closed.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
    self._gone, self._left = reason, None
    raise LostError(reason)
