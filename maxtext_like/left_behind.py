"""Threads that nothing can end and that nobody may wait for: a compilation after Ctrl-C, orbax's after a failed save.

The interpreter would wait for them at its end, for minutes; who ends the program asks here first.
"""

import threading
from collections.abc import Iterable

_threads: list[threading.Thread] = []
_calling_back: list[str] = []


def leave_behind(threads: Iterable[threading.Thread], *, callbacks_of: str | None = None) -> None:
  """Takes note of threads whose work is of no use any more.

  Args:
    threads: of Python.
    callbacks_of: a library whose own threads may still call Python. Where one does at the interpreter's end, the process ends
      with a signal ("FATAL: exception not rethrown") in place of its exit code.
  """
  _threads.extend(threads)
  if callbacks_of is not None:
    _calling_back.append(callbacks_of)


def any_running() -> bool:
  """Whether one of them still runs."""
  return any(thread.is_alive() for thread in _threads)


def may_call_back() -> bool:
  """Whether a library may still call Python."""
  return bool(_calling_back)
