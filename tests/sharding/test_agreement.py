"""How often processes exchange their requests to stop."""

import itertools
import json

import pytest

from maxtext_like.sharding import processes
from maxtext_like.sharding.processes import Agreement


class Clock:
  now = 0.0

  def monotonic(self):
    return self.now


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(processes, "time", clock)
  monkeypatch.setattr(processes, "count", lambda: 2)
  monkeypatch.setattr(processes, "everyone", lambda value, seconds: [value, json.dumps(["", 1])])
  return clock


def asked(clock, seconds):
  """Return the times at which the processes exchange requests, if the steps take these numbers of seconds."""
  agreement, found = Agreement(1.0), []
  for step, taken in enumerate(seconds):
    clock.now += taken
    if agreement(step):
      found.append(clock.now)
  return found


@pytest.mark.parametrize("taken", [0.003, 0.1, 0.7, 3.0])
def test_about_once_a_second_however_long_a_step_takes(clock, taken):
  at = asked(clock, [taken] * 2000)
  pauses = [b - a for a, b in itertools.pairwise(at)]
  assert max(pauses) == pytest.approx(max(taken, min(1.0, 100 * taken)), rel=0.35)
  assert min(pauses[10:]) > 0.7 * max(pauses)


@pytest.mark.parametrize("taken", [0.6, 1.0, 10.0])
def test_a_step_that_was_only_launched_when_they_asked_does_not_keep_them_from_asking(clock, taken):
  """The loop waits for all steps after the first step, a checkpoint and an evaluation. The time of the step behind it then
  covers only its launch."""
  seconds = ([taken, 0.01] + [taken] * 20) * 5
  at = asked(clock, seconds)
  assert max(b - a for a, b in itertools.pairwise(at)) <= 2.1 * taken
