"""Goodput: the share of a run's wall time that went into steps that count, over all its starts.

Every second of a process belongs to one phase. Steps that a killed process finished after its last checkpoint are "lost",
because the next process trains them again. The time between two processes is recorded separately: the pause may be intended.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxtext_like import strict_json

FILE_NAME = "goodput.json"
PHASES = {
  "steps": "steps that count",
  "lost": "steps trained again after a restart",
  "data": "waiting for data",
  "compile": "compiling",
  "start": "starting",
  "restore": "reading weights and checkpoints",
  "save": "waiting for checkpoints",
  "evaluate": "evaluating",
  "sample": "sampling",
  "end": "analyzing and writing at the end",
}
"""Description of each phase for readers."""
_LARGEST = 1e12
_log = logging.getLogger(__name__)


class Goodput:
  """Measures the time of this process from now on, beginning in phase "start". Not thread-safe."""

  def __init__(self) -> None:
    self.seconds = dict.fromkeys(PHASES, 0.0)
    self._stack = ["start"]
    self._since = self._begin = time.monotonic()
    self._began = time.time()
    self._earlier: dict[str, Any] = {"lives": 0, "between_lives_seconds": 0.0, "seconds": {}}

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Charge the time inside the context to ``name``, except for that of phases inside it."""
    self._charge()
    self._stack.append(name)
    try:
      yield
    finally:
      self._charge()
      self._stack.pop()

  def move(self, source: str, target: str, seconds: float) -> None:
    """Move time from one phase to another, at most as much as the first one has."""
    self._charge()
    seconds = min(seconds, self.seconds[source])
    self.seconds[source] -= seconds
    self.seconds[target] += seconds

  def add_earlier(self, directory: Path, lost: float) -> None:
    """Add the time of earlier processes. ``lost``: seconds of their steps that are trained again."""
    path = directory / FILE_NAME
    try:
      # The file is validated completely, so that a damaged one cannot make the sums negative or NaN.
      earlier = strict_json.loads(path.read_bytes())
      seconds = {name: _seconds(earlier["seconds"].get(name, 0.0)) for name in PHASES}
      between = _seconds(earlier["between_lives_seconds"]) + max(0.0, self._began - _seconds(earlier["until"]))
      self._earlier = {"lives": int(_seconds(earlier["lives"])), "between_lives_seconds": between, "seconds": seconds}
    except FileNotFoundError:
      return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
      _log.warning("%s is damaged (%s: %s); the time of earlier starts is not counted", path, type(error).__name__, error)
      return
    # Steps that are trained again did not count.
    lost = min(lost, seconds["steps"])
    seconds["steps"] -= lost
    seconds["lost"] += lost

  def to_json(self) -> dict[str, Any]:
    """Return lives (number of starts), goodput (share of steps that count), seconds by phase, and the seconds between lives."""
    self._charge()
    # Add the earlier processes of this run.
    seconds = {name: self.seconds[name] + self._earlier["seconds"].get(name, 0.0) for name in PHASES}
    return {
      "goodput": round(seconds["steps"] / max(sum(seconds.values()), 1e-9), 4),
      "lives": self._earlier["lives"] + 1,
      "seconds": {name: round(value, 3) for name, value in seconds.items()},
      "between_lives_seconds": round(self._earlier["between_lives_seconds"], 3),
      "until": round(self._began + time.monotonic() - self._begin, 3),
    }

  def _charge(self) -> None:
    now = time.monotonic()
    self.seconds[self._stack[-1]] += now - self._since
    self._since = now


def _seconds(value: Any) -> float:
  """Validate a number of the file. Raises ValueError if this project cannot have written it."""
  if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LARGEST:
    raise ValueError(f"not a number of seconds: {value!r:.40}")
  return float(value)


def shares(goodput: dict[str, Any]) -> list[tuple[str, float]]:
  """Return (phase, share of the wall time), largest first, without those below 0.0005."""
  total = sum(goodput["seconds"].values()) or 1.0
  found = [(name, seconds / total) for name, seconds in goodput["seconds"].items() if seconds / total >= 0.0005]
  return sorted(found, key=lambda pair: -pair[1])


def summary(goodput: dict[str, Any]) -> str:
  """Return the time accounting as one line for the terminal."""
  lives = goodput["lives"]
  times = f" over {lives} starts" if lives > 1 else ""
  return ", ".join(f"{name} {share:.1%}" for name, share in shares(goodput)) + times
