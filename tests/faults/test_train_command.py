"""Faults that the other files test with driver.py, here with ``train.py`` on text: kills, stops, damage, other settings."""

import os
import random
import shutil
import signal
import time

import pytest
from conftest import TrainRuns, assert_bitwise_equal


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, environment, server, shared):
  """An undisturbed run for comparison."""
  runs = TrainRuns(tmp_path_factory.mktemp("unbroken_train"), environment, server, *shared)
  code, text = runs.run("u")
  assert code == 0, text
  assert runs.complete("u") == [60, 70, 80]
  return runs


@pytest.mark.slow  # test_kill, test_endings and test_damage do each of these to a smaller process
def test_killed_stopped_and_damaged_it_ends_like_the_unbroken_run(train, unbroken):
  """F01 F02 F04 F09 F18 in one run: it ends bitwise equal to the undisturbed run.

  The faults are SIGKILL, SIGTERM, Ctrl-C, a second run in the same directory, and a flipped byte.
  """
  process = train.start("a")
  train.wait_for(r"step +12 of 80", process)
  process.kill()
  assert process.wait() == -signal.SIGKILL
  for number, code in ((signal.SIGTERM, 42), (signal.SIGINT, 130)):
    process = train.start("a")
    first = train.log
    train.wait_for(r"step +\d+ of 80.*\n.*step +\d+ of 80", process)
    if number == signal.SIGTERM:
      process.send_signal(signal.SIGSTOP)  # it stays alive and cannot end meanwhile
      second, text = train.run("a")
      process.send_signal(signal.SIGCONT)
      assert second == 2, text
      assert f"in use by process {process.pid} on " in text
    process.send_signal(number)
    assert process.wait(timeout=240) == code, first.read_text()
    text = first.read_text()
    step = train.complete("a")[-1]
    assert f"\nstopped by {number.name} after step {step}, saved in {train.checkpoints('a')}/{step}" in text
    assert "; to continue: python " in text
  assert train.losses("a").keys() == set(range(1, step + 1))
  files = [path for path in (train.checkpoints("a") / str(step) / "state").rglob("*") if path.is_file()]
  largest = max(files, key=lambda path: path.stat().st_size)
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 4
  largest.write_bytes(content)
  code, text = train.run("a")
  assert code == 0, text
  assert f"step {step} is corrupt: file {largest} has changed since it was written" in text
  assert_bitwise_equal(train.state("a", 80), unbroken.state("u", 80))
  assert train.losses("a") == unbroken.losses("u")


@pytest.mark.slow
def test_other_configurations_are_refused_and_a_finished_run_is_left_alone(train, unbroken):
  """F13 F14 F15 F70: changed models and dtypes are rejected, and a start of a finished run changes no file."""
  shutil.copytree(unbroken.output_dir / "u", train.output_dir / "u")
  before = {path: path.read_bytes() for path in (train.output_dir / "u").rglob("*") if path.is_file()}
  for keys, expected in (
    ({"rope_max_timescale": 777}, "model.rope_max_timescale: checkpoint 1000000.0, this run 777.0"),
    ({"mu_dtype": "bfloat16"}, "float32 in the checkpoint, bfloat16 in this run"),
    ({"num_decoder_layers": 4}, "model.num_decoder_layers: checkpoint 2, this run 4"),
  ):
    code, text = train.run("u", steps=90, **keys)
    assert code == 2, text
    assert expected in text
    assert "Traceback" not in text
  code, text = train.run("u")
  assert code == 0, text
  assert "already at step 80 of 80" in text
  assert {path: path.read_bytes() for path in (train.output_dir / "u").rglob("*") if path.is_file()} == before
  code, text = train.run("u", steps=81, mu_dtype="bfloat16", allow_dtype_change="true")
  assert code == 0, text
  assert text.count("from float32 to bfloat16 (allow_dtype_change)") == 1
  assert {array.dtype.name for name, array in train.state("u", 81).items() if ".mu." in name} == {"bfloat16"}


@pytest.mark.slow
def test_f12_devices_faces_and_scan_change_between_lives(train):
  """A run changes its number of devices, module_api and scan_layers between starts, and resumes each time.

  The losses equal those of an uninterrupted run.
  """
  lives = (
    {"devices": 8, "per_device_batch_size": 1, "module_api": "linen", "steps": 10},
    {"devices": 1, "per_device_batch_size": 8, "module_api": "nnx", "scan_layers": "false", "steps": 20},
    {"devices": 8, "per_device_batch_size": 1, "module_api": "nnx", "steps": 30},
  )
  flat = {"lr_schedule_type": "constant", "warmup_steps_fraction": 0.0}  # does not depend on the number of steps
  for life in lives:
    code, text = train.run("a", **flat, **life)
    assert code == 0, text
    assert f"from step {life['steps'] - 10}" in text
  code, text = train.run("b", **flat, steps=30)
  assert code == 0, text
  one, other = train.losses("a"), train.losses("b")
  assert one.keys() == other.keys()
  for step in one:
    assert one[step] == pytest.approx(other[step], rel=1e-5), step


@pytest.mark.slow
def test_f24_eight_random_kills(train):
  """SIGKILL at eight random moments, including startup, changes neither weights nor losses. test_kill.py has twenty kills."""
  flat = {"lr_schedule_type": "constant", "warmup_steps_fraction": 0.0}  # does not depend on the number of steps
  moments = random.Random(24)
  for life in range(8):
    begin = train.spawn if life % 5 == 0 else train.start  # a few starts with imports are enough
    process = begin("killed", **flat, steps=100_000)
    saved = train.complete("killed")
    while life % 4 == 3 and train.complete("killed") == saved:  # some lives save a checkpoint even on a slow machine
      assert process.poll() is None, train.log.read_text()
      time.sleep(0.05)
    if moments.random() < 0.75:
      train.wait_for(r"step +\d+ of 100000", process)
      time.sleep(moments.uniform(0, 0.4))
    else:
      time.sleep(moments.uniform(0, 5 if life % 5 == 0 else 2))
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, train.log.read_text()
  steps = train.complete("killed")[-1] + 25
  for name in ("unbroken", "killed"):
    code, text = train.run(name, **flat, steps=steps)
    assert code == 0, text
  assert_bitwise_equal(train.state("killed", steps), train.state("unbroken", steps))
  assert train.losses("killed") == train.losses("unbroken")
