"""Outputs that never block or end a run: ``Guarded`` for any output, and ``Output`` for standard output.

``Guarded`` is a queue with a thread, so that no step waits for a disk, and no error there ends a run. ``Output`` writes lines
through one. It continues if the reader exits, the disk is full or the terminal is closed. If the reader is gone for good, the
descriptor is replaced by /dev/null, because libraries also write to it directly.
"""

import contextlib
import errno
import io
import itertools
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

_log = logging.getLogger(__name__)
WAITING = 1000  # longest queue; beyond it the oldest item that may be dropped is dropped
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 1.0, 60.0
_SLOW_SECONDS = 30.0  # a single write that takes longer is reported


class LostError(Exception):
  """An item can never be written. The message says why."""


class Guarded:
  """Writes items in order on a thread. A failed write is reported once, and the same item is retried at intervals.

  Args:
    name: name of the output, for messages.
    write: (item) -> None; runs on the thread. After an OSError it is retried later. After LostError, or any other exception (a
      bug in this project), the item is lost.
    unit: name of an item in the message about lost items.
    tell: receives messages for the user.
    may_drop: (item) -> True if it may be dropped when the queue is full.
    end: called on the thread after everything was written and the output is closed; not called if nothing was ever written.
  """

  def __init__(
    self,
    name: str,
    write: Callable[[Any], None],
    unit: str,
    tell: Callable[[str], None] = _log.warning,
    may_drop: Callable[[Any], bool] = lambda item: True,
    end: Callable[[], None] = lambda: None,
  ):
    self.name = name
    self._may_drop, self._end = may_drop, end
    self._write, self._unit, self._tell = write, unit, tell
    self._condition = threading.Condition()
    self._items: dict[Any, Any] = {}
    self._numbers = itertools.count()
    self._lost = 0
    self._reason: str | None = None  # reason of the latest failure
    self._failing = self._slow = self._closing = self._given_up = False
    self._begun: float | None = None  # start time of the current write
    self._reported: set[str] = set()
    self._thread: threading.Thread | None = None

  def put(self, item: Any, key: str | None = None) -> None:
    """Add an item to the queue. Never blocks and never raises.

    Args:
      item: for ``write``.
      key: replaces a queued item with the same key; None replaces nothing.
    """
    with self._condition:
      if self._given_up:
        self._lost += 1
        return
      if len(self._items) >= WAITING:
        # The first item is kept: it may be in the middle of being written.
        others = itertools.islice(self._items.items(), 1, None)
        oldest = next((number for number, waits in others if self._may_drop(waits)), None)
        if oldest is not None:
          del self._items[oldest]
          self._lost += 1
      self._items[next(self._numbers) if key is None else key] = item
      # A write that hangs does not fail, so it is detected by its duration.
      stuck = self._begun is not None and time.monotonic() - self._begun > _SLOW_SECONDS
      if self._thread is None:
        self._thread = threading.Thread(target=self._work, name=f"write {self.name}", daemon=True)
        self._thread.start()
      self._condition.notify_all()
    if stuck:
      self._reason = f"a write has not returned for {_SLOW_SECONDS:.0f} s"
      self._report_once(f"{self.name}: {self._reason}; training continues without it")

  def flush(self, seconds: float) -> None:
    """Wait until the queue is empty, for at most ``seconds``. Does not wait for an output that fails or was too slow before."""
    with self._condition:
      # An output that was too slow once is not waited for again until it is empty.
      done = self._condition.wait_for(lambda: not self._items or self._failing or self._slow, seconds)
      self._slow = bool(self._items) and (self._slow or not done)

  def close(self, seconds: float) -> None:
    """End the thread: write the queued items within ``seconds``, with one more attempt if writing fails."""
    with self._condition:
      self._closing = True
      self._condition.notify_all()
    # The thread writes the queue and ends. If it does not end in time, the rest is lost.
    if self._thread is not None:
      self._thread.join(seconds)
    with self._condition:
      self._given_up = True  # a thread that still hangs ends with the process
      if self._items and not self._failing:
        self._reason = f"writing did not finish within {seconds:.0f} s"
      self._lost += len(self._items)
      self._items = {}

  @property
  def unwritten(self) -> str | None:
    """A line about the items that were not written so far, and why; None if all were written."""
    with self._condition:
      count = self._lost + (len(self._items) if self._failing else 0)
    if not count:
      return None
    return f"{self.name}: {count} {self._unit}{'' if count == 1 else 's'} not written: {self._reason or 'too many at once'}"

  def _work(self) -> None:
    delay = _FIRST_RETRY_SECONDS
    while True:
      with self._condition:
        self._condition.wait_for(lambda: self._items or self._closing)
        if self._given_up:
          return
        # Closed, and everything is written.
        if not self._items:
          break
        key, item = next(iter(self._items.items()))
        self._begun = time.monotonic()
        last_try = self._closing
      # The write runs without the lock, so that ``put`` never waits for it.
      reason = self._attempt(item)
      with self._condition:
        self._begun = None
        if reason is None:
          self._failing, delay = False, _FIRST_RETRY_SECONDS
          # A newer version with the same key may have replaced the item meanwhile.
          if self._items.get(key) is item:
            del self._items[key]
        else:
          self._failing, self._reason = True, reason
        self._condition.notify_all()
      if reason is None:
        continue
      if last_try:
        return  # ``unwritten`` reports it after closing
      # Wait before the next attempt, twice as long each time; closing ends the wait.
      self._report_once(f"{self.name}: {reason}; training continues, and writing is retried at intervals")
      with self._condition:
        self._condition.wait_for(lambda: self._closing, delay)
      delay = min(2 * delay, _LAST_RETRY_SECONDS)
    try:
      self._end()
    except Exception as error:
      self._report_once(f"{self.name}: {type(error).__name__} while closing: {error}")

  def _attempt(self, item: Any) -> str | None:
    """Try to write an item once. Return why it failed, if another attempt may help."""
    try:
      # The storage may be unavailable for a while, so an error of the system is tried again.
      self._write(item)
    except OSError as error:
      return error.strerror or str(error)
    # Another error would be raised again by the next attempt. Report it once, and continue training.
    except Exception as error:
      _log.debug("%s", self.name, exc_info=True)
      self._reason = str(error) if isinstance(error, LostError) else f"{type(error).__name__}: {error}"
      with self._condition:
        self._lost += 1
      self._report_once(f"{self.name}: {self._reason}; training continues without it")
    return None

  def _report_once(self, line: str) -> None:
    if line not in self._reported:
      self._reported.add(line)
      self._tell(line)


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
