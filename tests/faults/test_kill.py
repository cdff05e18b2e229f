"""Kills training programs: SIGKILL during a save, SIGTERM, Ctrl-C, and SIGKILL at twenty random moments."""

import random
import signal
import time

import pytest
from conftest import assert_bitwise_equal


def kill_in_save(runs, name, delay, **keys):
  """Kills a run ``delay`` seconds after its next checkpoint directory appears. ``linger`` prevents further steps until then."""
  before = set(runs.checkpoints(name).iterdir()) if runs.checkpoints(name).exists() else set()
  process = runs.start(name, linger=100, **keys)
  deadline = time.monotonic() + 240
  while process.poll() is None and time.monotonic() < deadline:
    if set(runs.checkpoints(name).glob("*")) - before and "start " in runs.log.read_text():
      time.sleep(delay)
      break
    time.sleep(0.0005)
  process.kill()
  assert process.wait() == -signal.SIGKILL, runs.log.read_text()


def test_f01_kill_during_an_asynchronous_save(runs, unbroken):
  """A partly written checkpoint is never used. The resumed run ends bitwise equal to an undisturbed one."""
  for delay in (0.0, 0.02, 0.05, 0.1):
    complete = runs.complete("a")
    kill_in_save(runs, "a", delay)
    assert not complete or max(runs.complete("a")) >= max(complete)
  # The kills above may have missed every save, so create the directory that orbax leaves of an interrupted save.
  (runs.checkpoints("a") / "29.saving-0a1b2c3d" / "state.orbax-checkpoint-tmp").mkdir(parents=True)
  newest = max(runs.complete("a"), default=0)
  code, text = runs.run("a")
  assert code == 0, text
  assert f"start {newest}\n" in text
  assert "29.saving-0a1b2c3d was left by an interrupted save" in text
  assert runs.complete("a")[-1] == 30
  assert_bitwise_equal(runs.state("a", 30), unbroken.state("unbroken", 30))
  assert runs.losses("a") == unbroken.losses("unbroken")
  assert not list(runs.checkpoints("a").glob("**/*tmp*"))


def test_f02_f04_signals(runs, unbroken):
  """SIGTERM and Ctrl-C save a checkpoint and exit with 42 and 130. A second SIGTERM exits at once without saving.

  The run resumes from the saved checkpoint and ends bitwise equal to an undisturbed one.
  """
  for number, code in ((signal.SIGTERM, 42), (signal.SIGINT, 130)):
    process = runs.start("a", pause=0.5)
    runs.wait_for(r"step \d+\n", process)
    process.send_signal(number)
    assert process.wait() == code, runs.log.read_text()
    text = runs.log.read_text()
    step = int(text.rpartition("\nstep ")[2].split()[0])
    assert f"error: stopped by {number.name} after step {step}, saved in {runs.checkpoints('a')}/{step}; " in text
    assert runs.complete("a")[-1] == step
  process = runs.start("a", pause=100)
  runs.wait_for(r"step \d+\n", process)
  process.send_signal(signal.SIGTERM)
  runs.wait_for("stopping after this step", process)
  time.sleep(1.2)  # a second signal within one second counts as the same request
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=90) == 128 + signal.SIGTERM
  assert runs.complete("a")[-1] == step
  code, text = runs.run("a")
  assert code == 0, text
  assert "taking over the lock of process" in text
  assert_bitwise_equal(runs.state("a", 30), unbroken.state("unbroken", 30))
  assert runs.losses("a") == unbroken.losses("unbroken")


@pytest.mark.nightly  # test_train_command.py has eight kills
def test_f24_twenty_random_kills(runs):
  """SIGKILL at twenty random moments, including startup, changes neither weights nor losses."""
  steps = 150
  code, text = runs.run("unbroken", steps=steps)
  assert code == 0, text
  moments = random.Random(20)
  for _ in range(20):
    process = runs.start("killed", steps=steps, pause=0.1)
    if moments.random() < 0.75:
      runs.wait_for(r"step \d+\n", process)
    time.sleep(moments.uniform(0, 0.9))
    process.kill()
    assert process.wait() == -signal.SIGKILL, runs.log.read_text()
  code, text = runs.run("killed", steps=steps)
  assert code == 0, text
  assert int(text.partition("start ")[2].split()[0]) > 0
  assert_bitwise_equal(runs.state("killed", steps), runs.state("unbroken", steps))
  assert runs.losses("killed") == runs.losses("unbroken")
