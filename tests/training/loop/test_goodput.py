"""The wall time of a run by phase, added up over its starts. The clock is simulated."""

import json

import pytest

from maxtext_like.training.loop import goodput as module
from maxtext_like.training.loop.goodput import FILE_NAME, Goodput, summary


@pytest.fixture
def clock(monkeypatch):
  """The simulated monotonic clock in seconds, as a list of one number. The wall clock is 1000 s ahead."""
  now = [100.0]
  monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(module.time, "time", lambda: now[0] + 1000)
  return now


def life(clock, *, steps, lost=0.0, directory=None):
  """Return the goodput of one start: 10 s of startup, 5 s of compilation, a save of 3 s, and ``steps`` seconds of steps, a
  tenth of which is spent waiting for data."""
  goodput = Goodput()
  clock[0] += 10
  with goodput.phase("compile"):
    clock[0] += 5
  if directory is not None:
    goodput.add_earlier(directory, lost)
  with goodput.phase("steps"):
    clock[0] += steps / 2
    with goodput.phase("save"):
      clock[0] += 3
    clock[0] += steps / 2
    goodput.move("steps", "data", steps / 10)
  return goodput.to_json()


def test_every_second_is_in_one_phase(clock):
  found = life(clock, steps=100.0)
  assert {name: s for name, s in found["seconds"].items() if s} == {
    "steps": 90.0, "data": 10.0, "compile": 5.0, "start": 10.0, "save": 3.0,
  }  # fmt: skip
  assert found["goodput"] == round(90 / 118, 4)
  assert found["lives"] == 1
  assert summary(found) == "steps 76.3%, data 8.5%, start 8.5%, compile 4.2%, save 2.5%"


def test_a_second_life_counts_the_first_and_what_it_lost(clock, tmp_path):
  (tmp_path / FILE_NAME).write_text(json.dumps(life(clock, steps=100.0)))
  clock[0] += 60
  found = life(clock, steps=50.0, lost=20.0, directory=tmp_path)
  assert found["seconds"]["steps"] == 90 - 20 + 45
  assert found["seconds"]["lost"] == 20
  assert sum(found["seconds"].values()) == 118 + 68
  assert found["lives"] == 2
  assert found["between_lives_seconds"] == 60
  assert summary(found).endswith(" over 2 starts")


_FILE = '{"lives": LIVES, "seconds": {"steps": STEPS}, "between_lives_seconds": 0, "until": UNTIL}'


def damaged(lives="1", steps="2.5", until="3"):
  return _FILE.replace("LIVES", lives).replace("STEPS", steps).replace("UNTIL", until)


@pytest.mark.parametrize(
  "content",
  [
    *("", "[]", '{"lives": 1}', '{"lives": 1, "seconds": 3}', "\0\0", "[" * 100_000, '"x"'),
    *(damaged(steps=value) for value in ("1e999", "-1e999", "NaN", "-1", "1e300", '"3"', "null", "true", "9" * 5000)),
    *(damaged(lives="1e999"), damaged(lives="-4"), damaged(until="1e999"), damaged(until="[]")),
  ],
)
def test_a_damaged_file_is_told_and_this_life_still_counts(clock, tmp_path, caplog, content):
  (tmp_path / FILE_NAME).write_text(content)
  found = life(clock, steps=10.0, lost=5.0, directory=tmp_path)
  assert found["lives"] == 1
  assert found["seconds"]["lost"] == 0
  assert "the time of earlier starts is not counted" in caplog.text
