"""State of a save in progress, statistics of the saves of a run, and shortening of orbax's error messages."""

import dataclasses
import functools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Statistics:
  """Number, outcome and cost of the saves of a run. Times are wall-clock seconds."""

  saved: int = 0
  skipped_busy: int = 0
  refused_nonfinite: int = 0
  failures: int = 0
  blocked_seconds: float = 0.0
  write_seconds: float = 0.0
  hash_seconds: float = 0.0


@dataclasses.dataclass
class PendingSave:
  """A save in progress. Its thread fills in the outcome."""

  step: int
  needed_bytes: int
  best: tuple[int, float] | None = None  # step with the lowest evaluation loss, and that loss
  error: BaseException | None = None
  write_seconds: float = 0.0
  hash_seconds: float = 0.0
  thread: threading.Thread = dataclasses.field(init=False)


def reason(error: Exception) -> str:
  """Returns an error in one line. Of a long TensorStore message it keeps only the reason of the operating system."""
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  said = re.search(r"os_error_code='(\d+)'", str(error))
  return os.strerror(int(said[1])) if said else " ".join(str(error).split())[:300] or type(error).__name__


_TOLD = (
  "Handler Commit operations or",
  "_SignalingThread.run() raised",
  "Failed to write metadata=",
  "Failed to update metadata=",
)


def told_by_us(entry: logging.LogRecord) -> bool:
  """Logging filter that drops orbax's tracebacks of a failed asynchronous save; ``_settle`` reports the failure in one line."""
  return not any(part in str(entry.msg) for part in _TOLD)


@functools.cache
def hide_calls_into_closed_loops() -> None:
  """Installs ``without_calls_into_closed_loops`` as ``sys.unraisablehook``, once per process."""
  sys.unraisablehook = without_calls_into_closed_loops(sys.unraisablehook)


def without_calls_into_closed_loops(hook: Callable[[Any], object]) -> Callable[[Any], object]:
  """Returns an unraisable-exception hook that drops TensorStore's errors after a failed save.

  When one array cannot be written, orbax closes its event loop while TensorStore still writes the others. Each finished write
  then calls the closed loop, and Python prints a traceback for each. The failed save has already been reported in one line.

  Args:
    hook: called with every other exception.
  """

  def filtered(unraisable: Any) -> None:
    error, trace = unraisable.exc_value, unraisable.exc_traceback
    from_native_code = trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
    if not (from_native_code and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
      hook(unraisable)

  return filtered
