"""Threads that nothing can end and that nobody may wait for: a compilation after Ctrl-C, orbax's after a failed save.

The interpreter would wait for them at its end, for minutes; who ends the program asks here first.
"""

import threading
from collections.abc import Iterable

_threads: list[threading.Thread] = []
_calling_back = False


def leave_behind(threads: Iterable[threading.Thread], *, calls_back: bool = False) -> None:
  """Takes note of threads whose work is of no use any more.

  Args:
    threads: of Python.
    calls_back: a library's own threads, which are in no list, may still call Python for that work. Where one does at the
      interpreter's end, the process may end by a signal ("FATAL: exception not rethrown") in place of its exit code.
  """
  global _calling_back
  _threads.extend(threads)
  _calling_back = _calling_back or calls_back


def any_running() -> bool:
  """Whether one of them still runs."""
  return any(thread.is_alive() for thread in _threads)


def may_call_back() -> bool:
  """Whether a library may still call Python."""
  return _calling_back
