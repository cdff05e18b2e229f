"""Profiler traces: what host and devices do in some steps, for xprof."""

import time
from collections.abc import Callable
from pathlib import Path

import jax

from maxtext_like.config.schema import profiled

DIRECTORY = "profile"


class Profile:
  """Traces the steps of ``profile_steps`` into the run's directory.

  A fault here is told and ends the trace, never the run.

  Args:
    steps: the key's value, as "10-12".
    directory: of the run.
    say: takes lines for whoever watches.
    traces: False: it only says when, so that all processes of a run wait for the same steps.
  """

  def __init__(self, steps: str, directory: Path, say: Callable[[str], None], *, traces: bool = True):
    self._first, self._last = profiled(steps)
    self._place, self._say = directory / DIRECTORY, say
    self._traces = traces
    self._tracing = self._done = False

  def starts(self, step: int) -> bool:
    """Whether the trace begins with this step; the device should be idle then."""
    return step == self._first and not self._done

  def ends(self, step: int) -> bool:
    """Whether the trace ends after this step, which must be finished."""
    return self._tracing and step == self._last

  def note(self, finished: int) -> None:
    """Says so when a run that goes on is past the first step."""
    if finished >= self._first:
      self._say(f"note    profile_steps={self._first}-{self._last}: step {self._first} is done already, so nothing is traced")

  def start(self) -> None:
    """Begins the trace."""
    self._done = True
    try:
      if self._traces:
        jax.profiler.start_trace(self._place)
    except Exception as error:  # what the profiler of a platform raises is not documented; training does not need it
      self._say(f"no profile: {' '.join(str(error).split())[:300]}")
      return
    self._tracing = True

  def stop(self) -> None:
    """Ends a trace, wherever it is, and says where it lies."""
    if not self._tracing:
      return
    self._tracing = False
    if not self._traces:
      return
    begin = time.perf_counter()
    try:
      jax.profiler.stop_trace()
    except Exception as error:
      self._say(f"no profile in {self._place}: {' '.join(str(error).split())[:300]}")
      return
    self._say(
      f"profile of steps {self._first} to {self._last} in {self._place}, written in {time.perf_counter() - begin:.1f} s\n"
      f"  to look at it: pip install xprof, then xprof --logdir {self._place}; its *.trace.json.gz opens in ui.perfetto.dev too"
    )
