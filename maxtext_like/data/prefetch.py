"""A thread that prepares batches ahead of the training step, with exact state and a limit on the wait for a stalled source."""

import atexit
import contextlib
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from maxtext_like.errors import RetryableError

logger = logging.getLogger(__name__)

DEPTH = 2  # batches prepared ahead
POLL_SECONDS = 0.5


class Prefetch:
  """Calls ``produce`` in one daemon thread. Each item has the state of the source after it.

  There is one thread and no worker process. The order therefore cannot depend on a number of workers, no process can be left
  running, and the interpreter can exit while a read hangs. ``get`` raises an exception of ``produce`` at its place in the
  order.
  """

  def __init__(
    self,
    produce: Callable[[], tuple[Any, Any]],
    *,
    warn_seconds: float,
    limit_seconds: float,
    waiting: Callable[[], None] = lambda: None,
  ):
    """Starts the thread.

    Args:
      produce: returns the next item and the state after it.
      warn_seconds: time that ``get`` waits before it logs a warning.
      limit_seconds: time that ``get`` waits before it raises RetryableError.
      waiting: called about twice a second while ``get`` waits. An exception that it raises ends the wait; the next ``get``
        returns the item.
    """
    self._produce, self._waiting = produce, waiting
    self._warn_seconds, self._limit_seconds = warn_seconds, limit_seconds
    self._items: queue.Queue[tuple[str, Any]] = queue.Queue(DEPTH)
    self._stopping = threading.Event()
    self._failed: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name="maxtext-like-data", daemon=True)
    atexit.register(self.stop, 1.0)  # a daemon thread inside a C++ or Rust tokenizer can crash the interpreter as it exits
    self._thread.start()

  def _run(self) -> None:
    while not self._stopping.is_set():
      try:
        entry = ("item", self._produce())
      except BaseException as error:  # any exception: get raises it in the caller's thread
        entry = ("error", error)
      while not self._stopping.is_set():
        try:
          self._items.put(entry, timeout=POLL_SECONDS)
          break
        except queue.Full:
          continue
      if entry[0] == "error":
        return

  def get(self) -> tuple[Any, Any]:
    """Returns the next (item, state).

    Raises:
      RetryableError: the source stalls, or its thread ended without an error.
      BaseException: whatever ``produce`` or ``waiting`` raised.
    """
    if self._failed is not None:
      raise self._failed
    started, warned = time.monotonic(), False
    while True:
      try:
        kind, value = self._items.get(timeout=POLL_SECONDS)
        break
      except queue.Empty:
        waited = time.monotonic() - started
        if not self._thread.is_alive() and self._items.empty():
          raise RetryableError("the data thread ended without a batch and without an error") from None
        self._waiting()
        if waited > self._limit_seconds:
          raise RetryableError(
            f"no batch for {waited:.0f} s: the data source is stalled (a network file system or a failing disk?). "
            f"The data thread is at:\n{self._stack()}"
          ) from None
        if waited > self._warn_seconds and not warned:
          warned = True
          logger.warning("no batch for %.0f s; the data thread is at:\n%s", waited, self._stack())
    if kind == "error":
      self._failed = value
      raise value
    return value

  def _stack(self) -> str:
    frame = sys._current_frames().get(self._thread.ident or 0)
    return "".join(traceback.format_stack(frame, limit=None)[-6:]) if frame else "(ended)"

  def stop(self, seconds: float = 5.0) -> bool:
    """Ends the thread. Returns False if it did not end in time; it then runs until the process exits."""
    atexit.unregister(self.stop)
    self._stopping.set()
    with contextlib.suppress(queue.Empty):
      self._items.get_nowait()  # makes room for an item that the thread may be waiting to put, so that it need not poll
    self._thread.join(seconds)
    return not self._thread.is_alive()
