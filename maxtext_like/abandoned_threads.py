"""Threads that cannot be stopped and should not be waited for: a compilation after Ctrl-C, orbax's threads after a failed save.

The interpreter would wait for them at exit, for minutes. The code that ends the program therefore asks this module first.
"""

import threading
from collections.abc import Iterable

_threads: list[threading.Thread] = []
_calling_back = False


def abandon(threads: Iterable[threading.Thread], *, calls_back: bool = False) -> None:
  """Registers threads whose results are no longer needed.

  Args:
    threads: Python threads.
    calls_back: True if threads of a library (which are not in ``threads``) may still call into Python. If one does so while
      the interpreter shuts down, the process may end with a signal ("FATAL: exception not rethrown") instead of its exit code.
  """
  global _calling_back
  _threads.extend(threads)
  _calling_back = _calling_back or calls_back


def any_running() -> bool:
  """Returns True if a registered thread is still running."""
  return any(thread.is_alive() for thread in _threads)


def may_call_back() -> bool:
  """Returns True if threads of a library may still call into Python."""
  return _calling_back
