"""Changes between two starts of a run: flipped bytes, missing files, empty step directories, other settings and devices."""

import shutil

import pytest
from conftest import Runs, assert_bitwise_equal

from tests.tiers import slow


@pytest.fixture
def copy(runs, unbroken):
  """A copy of the undisturbed run for the test to damage. It has checkpoints at steps 20, 25 and 30."""
  shutil.copytree(unbroken.output_dir / "unbroken", runs.output_dir / "unbroken")
  return runs


def largest_file(runs, step):
  files = [path for path in (runs.checkpoints("unbroken") / str(step) / "state").rglob("*") if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def flip_a_byte(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 3] ^= 16
  path.write_bytes(content)


def test_f08_f09_f11_damaged_steps(copy: Runs, unbroken: Runs):
  """The run resumes from the newest valid checkpoint.

  The newest checkpoint has a flipped byte, the one before lacks a file, and an empty directory has a higher step number.
  """
  flip_a_byte(largest_file(copy, 30))
  largest_file(copy, 25).unlink()
  (copy.checkpoints("unbroken") / "100").mkdir()
  code, text = copy.run("unbroken")
  assert code == 0, text
  assert "100 is empty and not a checkpoint" in text
  assert "step 30 is corrupt: file " in text
  assert "has changed since it was written" in text
  assert "step 25 is corrupt: file " in text
  assert text.count("; using step 20") == 2
  assert "start 20\n" in text
  assert copy.complete("unbroken") == [20, 25, 30]
  assert not list(copy.checkpoints("unbroken").glob("*.corrupt"))
  assert_bitwise_equal(copy.state("unbroken", 30), unbroken.state("unbroken", 30))
  assert copy.losses("unbroken") == unbroken.losses("unbroken")


def test_f08_nothing_valid_is_left(copy: Runs):
  for step in (20, 25, 30):
    largest_file(copy, step).write_bytes(b"")
  code, text = copy.run("unbroken")
  assert code == 2, text
  assert "no valid checkpoint is left" in text
  assert "start " not in text.partition("error:")[0]
  assert "Traceback" not in text


def test_f70_a_finished_run_started_again(copy: Runs):
  before = {path: path.stat().st_mtime_ns for path in copy.output_dir.rglob("*") if path.is_file()}
  code, text = copy.run("unbroken")
  assert (code, "already at step 30 of 30" in text) == (0, True), text
  after = {path: path.stat().st_mtime_ns for path in copy.output_dir.rglob("*") if path.is_file()}
  changed = [path.name for path in after if before.get(path) != after[path] and not path.name.startswith(("log", "run.lock"))]
  assert changed == []


@pytest.mark.parametrize(
  ("keys", "expected", "fix"),
  [
    slow({"dtype": "bfloat16"}, "float32 in the checkpoint, bfloat16 in this run: ", ""),  # F13
    ({"heads": 8}, "model.heads: checkpoint 4, this run 8", "heads=4"),  # F14: the key changes no array shape
    slow({"width": 32}, "model.width: checkpoint 64, this run 32", "width=64"),  # F15
  ],
)
def test_f13_f14_f15_another_configuration(copy: Runs, keys, expected, fix):
  code, text = copy.run("unbroken", **keys)
  assert code == 2, text
  assert expected in text
  assert f"fix: {fix}" in text
  assert "Traceback" not in text
  assert copy.complete("unbroken") == [20, 25, 30]


def test_f12_other_numbers_of_devices(runs: Runs):
  """A run changes from 4 devices to 1 and back. Every restored array is bitwise equal to the saved one."""
  last = None
  for devices, steps in ((4, 3), (1, 6), (4, 9)):
    code, text = runs.run("a", devices=devices, steps=steps, interval=100)
    assert code == 0, text
    assert f"start {steps - 3}\n" in text
    hashes = dict(line.split()[1:] for line in text.splitlines() if line.startswith("hash "))
    assert last is None or hashes["restored"] == last
    last = hashes["saved"]
  assert runs.complete("a") == [3, 6, 9]
