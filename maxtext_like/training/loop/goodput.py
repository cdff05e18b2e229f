"""Goodput: which share of a run's wall time went into steps that count, over all its lives.

Every second of a life belongs to one phase. Steps that a killed life had done beyond its last checkpoint are "lost": the
next life trains them again. Between two lives nothing runs; that is kept beside, for nobody knows whether it was meant.
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
  "end": "explaining and writing at the end",
}
"""Phase to what a reader is told about it."""
_LARGEST = 1e12
_log = logging.getLogger(__name__)


class Goodput:
  """The clock of one life, which begins now, in "start". For one thread at a time."""

  def __init__(self) -> None:
    self.seconds = dict.fromkeys(PHASES, 0.0)
    self._stack = ["start"]
    self._since = self._begin = time.monotonic()
    self._began = time.time()
    self._earlier: dict[str, Any] = {"lives": 0, "between_lives_seconds": 0.0, "seconds": {}}

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """The time within belongs to ``name``, but for that of phases within it."""
    self._charge()
    self._stack.append(name)
    try:
      yield
    finally:
      self._charge()
      self._stack.pop()

  def move(self, source: str, target: str, seconds: float) -> None:
    """Gives time of one phase to another, as far as it has any."""
    self._charge()
    seconds = min(seconds, self.seconds[source])
    self.seconds[source] -= seconds
    self.seconds[target] += seconds

  def go_on(self, directory: Path, lost: float) -> None:
    """Adds the lives before this one, of which ``lost`` seconds of steps are trained again."""
    path = directory / FILE_NAME
    try:
      earlier = strict_json.loads(path.read_bytes())
      seconds = {name: _seconds(earlier["seconds"].get(name, 0.0)) for name in PHASES}
      between = _seconds(earlier["between_lives_seconds"]) + max(0.0, self._began - _seconds(earlier["until"]))
      self._earlier = {"lives": int(_seconds(earlier["lives"])), "between_lives_seconds": between, "seconds": seconds}
    except FileNotFoundError:
      return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
      _log.warning("%s is damaged (%r); the time of earlier lives is not counted", path, error)
      return
    lost = min(lost, seconds["steps"])
    seconds["steps"] -= lost
    seconds["lost"] += lost

  def to_json(self) -> dict[str, Any]:
    """All lives up to now: lives, goodput (share of the steps that count), seconds by phase, and what lies between lives."""
    self._charge()
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
  """Return a number of the file. ValueError where this project would not have written it."""
  if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LARGEST:
    raise ValueError(f"no number of seconds: {value!r:.40}")
  return float(value)


def shares(goodput: dict[str, Any]) -> list[tuple[str, float]]:
  """(phase, share of the wall time), the largest first, without those under half a thousandth."""
  total = sum(goodput["seconds"].values()) or 1.0
  found = [(name, seconds / total) for name, seconds in goodput["seconds"].items() if seconds / total >= 0.0005]
  return sorted(found, key=lambda pair: -pair[1])


def summary(goodput: dict[str, Any]) -> str:
  """One line for the screen."""
  lives = goodput["lives"]
  times = f" over {lives} starts" if lives > 1 else ""
  return ", ".join(f"{name} {share:.1%}" for name, share in shares(goodput)) + times
