"""Profiler traces of some steps on host and devices, for xprof."""

import time
from collections.abc import Callable
from pathlib import Path

import jax

from maxtext_like.config.schema import profiled

DIRECTORY = "profile"


class Profile:
  """Traces the steps of ``profile_steps`` into the run's directory. Errors of the profiler are printed and never end the run.

  Args:
    steps: value of the key, for example "10-12".
    directory: run directory.
    say: prints lines.
    traces: False in processes that do not trace but must pause at the same steps.
  """

  def __init__(self, steps: str, directory: Path, say: Callable[[str], None], *, traces: bool = True):
    self._first, self._last = profiled(steps)
    self._place, self._say = directory / DIRECTORY, say
    self._traces = traces
    self._tracing = self._done = False

  def starts(self, step: int) -> bool:
    """Return True if the trace starts with this step. The device should be idle then."""
    return step == self._first and not self._done

  def ends(self, step: int) -> bool:
    """Return True if the trace ends after this step, which must be finished."""
    return self._tracing and step == self._last

  def note(self, finished: int) -> None:
    """Print a note if a resumed run is already past the first traced step."""
    if finished >= self._first:
      self._say(f"note    profile_steps={self._first}-{self._last}: step {self._first} is already finished, nothing is traced")

  def start(self) -> None:
    """Start the trace."""
    # A failed start is not retried.
    self._done = True
    try:
      if self._traces:
        jax.profiler.start_trace(self._place)
    except Exception as error:  # profiler exceptions are undocumented and platform-specific; training does not need a trace
      self._say(f"no profile: {' '.join(str(error).split())[:300]}")
      return
    self._tracing = True

  def stop(self) -> None:
    """Stop the trace if one is running, and print where it is."""
    if not self._tracing:
      return
    self._tracing = False
    if not self._traces:
      return
    # Writing a trace can take seconds, so its duration is printed.
    begin = time.perf_counter()
    try:
      jax.profiler.stop_trace()
    except Exception as error:
      self._say(f"no profile in {self._place}: {' '.join(str(error).split())[:300]}")
      return
    self._say(
      f"profile of steps {self._first} to {self._last} in {self._place}, written in {time.perf_counter() - begin:.1f} s\n"
      f"  view it with: pip install xprof; xprof --logdir {self._place} (or open its *.trace.json.gz in ui.perfetto.dev)"
    )
