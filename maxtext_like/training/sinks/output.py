"""Standard output that nobody waits for: a reader that left, a full disk or a terminal that is gone end no run.

A line goes through a thread as a file's does (``guarded``). Where the reader is gone for good, /dev/null takes its place,
for libraries that write there by themselves too.
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
  """Writes a line to standard error, unless nobody takes it now."""
  with contextlib.suppress(OSError, ValueError):  # closed, or its disk is full: there is no other place to say so
    if select.select([], [2], [], 0)[1]:
      os.write(2, f"{line}\n".encode())


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
  """Puts an ``Output`` in the place of ``sys.stdout``."""
  before = sys.stdout
  with contextlib.suppress(OSError):  # told when the next line fails
    before.flush()
  sys.stdout = output = Output(before)
  try:
    yield
  finally:
    sys.stdout = before
    output.close()


class Output(io.TextIOBase):
  """A text stream whose ``write`` neither waits nor raises.

  Args:
    stream: where the text goes.
  """

  def __init__(self, stream: TextIO):
    super().__init__()
    self._stream = stream
    try:
      self._descriptor: int | None = stream.fileno()
      self._terminal = stream.isatty()
    except (OSError, ValueError):  # a stream without a file behind it, as a notebook's
      self._descriptor, self._terminal = None, False
    self._gone: str | None = None
    self._lock = threading.Lock()
    self._line = ""  # begun, and not yet ended
    self._left: memoryview | None = None  # of the piece that is being written
    self._guarded = Guarded("standard output", self._write, "line", say_on_stderr)

  @property
  def unwritten(self) -> str | None:
    """What nobody took, and why; None: nothing."""
    return self._guarded.unwritten

  @property
  def encoding(self) -> str:  # type: ignore[override]
    """Of the stream."""
    return getattr(self._stream, "encoding", None) or "utf-8"

  def isatty(self) -> bool:
    """Whether it was a terminal at the start."""
    return self._terminal

  def fileno(self) -> int:
    """Raises io.UnsupportedOperation where there is no file behind it."""
    return self._stream.fileno()

  def writable(self) -> bool:
    """It is."""
    return True

  def write(self, text: str) -> int:
    """Takes text; a line that is not ended waits for its end or for ``flush``."""
    with self._lock:  # warnings come from many threads
      *lines, self._line = (self._line + text).split("\n")
      for line in lines:
        self._guarded.put(line + "\n")
    return len(text)

  def flush(self) -> None:
    """Hands over what is not a whole line; does not wait until it is written."""
    with self._lock:
      if self._line:
        self._guarded.put(self._line)
        self._line = ""

  def close(self) -> None:
    """Waits a moment until all is written, and leaves the stream itself open."""
    if not self.closed:
      super().close()  # flushes
      self._guarded.close(_CLOSE_SECONDS)
      if self.unwritten is not None:
        say_on_stderr(self.unwritten)

  def _write(self, text: str) -> None:
    if self._gone is not None:
      raise LostError(self._gone)
    if self._descriptor is None:
      self._stream.write(text)
      self._stream.flush()
      return
    if self._left is None:
      self._left = memoryview(text.encode(self.encoding, "backslashreplace"))
    while self._left:
      try:
        self._left = self._left[os.write(self._descriptor, self._left) :]
      except BlockingIOError:  # somebody made the terminal that we share non-blocking
        select.select([], [self._descriptor], [])
      except OSError as error:
        if not self._terminal and error.errno not in (errno.EPIPE, errno.EBADF, errno.ECONNRESET):
          raise  # a disk, which may have room again
        self._give_up(self._descriptor, error.strerror or str(error))
    self._left = None

  def _give_up(self, descriptor: int, reason: str) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
    self._gone, self._left = reason, None
    raise LostError(reason)
