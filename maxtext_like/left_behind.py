"""Threads that nothing can end and that nobody may wait for: a compilation after Ctrl-C, orbax's after a failed save.

The interpreter would wait for them at its end, for minutes; who ends the program asks here first.
"""

import threading
from collections.abc import Iterable

_threads: list[threading.Thread] = []


def leave_behind(threads: Iterable[threading.Thread]) -> None:
  """Takes note of threads whose work is of no use any more."""
  _threads.extend(threads)


def any_running() -> bool:
  """Whether one of them still runs."""
  return any(thread.is_alive() for thread in _threads)
