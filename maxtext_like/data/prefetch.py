"""A thread that makes batches ahead of the training step, with exact state and a watchdog over a stalled source."""

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

DEPTH = 2  # batches made ahead
POLL_SECONDS = 0.5


class Prefetch:
  """Calls `produce` in one daemon thread; every item comes with the state after it.

  One thread and no worker processes: the order cannot depend on their number, none can be orphaned, and the
  interpreter can exit while a read hangs. An exception of `produce` is raised by `get`, in its place in the order.
  """

  def __init__(
    self,
    produce: Callable[[], tuple[Any, Any]],
    *,
    warn_seconds: float,
    limit_seconds: float,
    waiting: Callable[[], None] = lambda: None,
  ):
    """`produce`: the next (item, state after it). The times are how long `get` waits before it warns and gives up.

    `waiting` is called about twice a second while `get` waits; what it raises ends the wait, and the item comes next time.
    """
    self._produce, self._waiting = produce, waiting
    self._warn_seconds, self._limit_seconds = warn_seconds, limit_seconds
    self._items: queue.Queue[tuple[str, Any]] = queue.Queue(DEPTH)
    self._stopping = threading.Event()
    self._failed: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name="maxtext-like-data", daemon=True)
    atexit.register(self.stop, 1.0)  # a daemon thread inside a C++ or Rust tokenizer can crash the interpreter's end
    self._thread.start()

  def _run(self) -> None:
    while not self._stopping.is_set():
      try:
        entry = ("item", self._produce())
      except BaseException as error:  # handed over, whatever it is: get raises it in the caller's thread
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
    """The next (item, state). Raises what `produce` or `waiting` raised, or RetryableError when the source stalls."""
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
          raise RetryableError("the data thread has ended without a batch or an error") from None
        self._waiting()
        if waited > self._limit_seconds:
          raise RetryableError(
            f"no batch for {waited:.0f} s: the data source stalls (a network file system, or a dead disk?). "
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
    """Ends the thread; False when it did not end in time (it is left behind, and ends with the process)."""
    atexit.unregister(self.stop)
    self._stopping.set()
    with contextlib.suppress(queue.Empty):
      self._items.get_nowait()  # room for the item that the thread may be waiting to hand over: it need not poll
    self._thread.join(seconds)
    return not self._thread.is_alive()
