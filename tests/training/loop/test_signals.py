"""Tests maxtext_like/training/loop/signals.py with real signals to real processes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from maxtext_like import abandoned_threads
from maxtext_like.errors import InterruptedRunError, RetryableError
from maxtext_like.sharding.processes import Agreement
from maxtext_like.training.loop.signals import StopRequest, StopRequested


def start(body):
  """Start a program that prints ``ready`` when it listens for signals."""
  program = textwrap.dedent(
    """
    import signal, sys, time
    from maxtext_like.training.loop.signals import StopRequest
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever who starts this does with it
    with StopRequest() as stop:
      stop.training = True
      print("ready", flush=True)
    """
  ) + textwrap.indent(textwrap.dedent(body), "  ")
  process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  assert process.stdout is not None
  assert process.stdout.readline() == "ready\n"
  return process


LOOP = """
step = 0
while not stop.should_stop(step):
  step += 1
  time.sleep(0.01)
error = stop.error(step, "runs/a/checkpoints/7")
print(error)
sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 130), (signal.SIGHUP, 42)])
def test_the_first_signal_stops_the_loop(number, code):
  process = start(LOOP)
  process.send_signal(number)
  out, err = process.communicate(timeout=120)
  assert process.returncode == code
  assert f"stopped by {number.name} after step " in out
  assert "saved in runs/a/checkpoints/7; the same call continues from there" in out
  assert f"{number.name}: stopping after this step, with a checkpoint" in err


@pytest.mark.parametrize(
  ("first", "second"), [(signal.SIGTERM,) * 2, (signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)]
)
def test_another_signal_within_a_second_of_the_first_is_the_same_request(first, second):
  process = start(LOOP.replace("step += 1", "step += 1; print('step', flush=True); time.sleep(1.0)"))
  assert process.stdout is not None
  process.stdout.readline()  # the signals come during a step
  for number in (first, second):
    process.send_signal(number)
    time.sleep(0.005)
  out, err = process.communicate(timeout=120)
  assert process.returncode in {130 if number == signal.SIGINT else 42 for number in (first, second)}  # either may be first
  assert "stopped by SIG" in out
  assert "quitting" not in err


@pytest.mark.parametrize(
  ("first", "second", "pause"),
  [(signal.SIGINT, signal.SIGINT, 0.0), (signal.SIGTERM, signal.SIGINT, 1.1), (signal.SIGTERM, signal.SIGTERM, 1.1)],
)
def test_the_second_signal_quits_even_when_the_main_thread_is_deaf(first, second, pause):
  # During sleep() of libc the main thread runs no bytecode, as during a long compilation.
  process = start("import ctypes\nctypes.CDLL(None).sleep(60)\nctypes.CDLL(None).sleep(60)\nctypes.CDLL(None).sleep(60)")
  process.send_signal(first)
  assert process.stderr is not None
  process.stderr.readline()
  assert "stopping after this step" in process.stderr.readline()
  time.sleep(pause)
  process.send_signal(second)
  _, err = process.communicate(timeout=50)  # shorter than one sleep
  assert process.returncode == 128 + second
  assert f"{second.name} again: quitting now" in err


def test_everything_is_put_back():
  before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
  threads = threading.active_count()
  with StopRequest() as stop:
    assert not stop.should_stop(0)
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + 60
    while stop.requested is None and time.monotonic() < deadline:
      time.sleep(0.01)
    assert stop.requested == signal.SIGTERM
    assert isinstance(stop.error(3, None), RetryableError)
    assert "no checkpoint was saved" in str(stop.error(3, None))
    stop.requested = signal.SIGINT
    assert isinstance(stop.error(3, None), InterruptedRunError)
  assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
  assert threading.active_count() == threads


def test_a_terminal_that_goes_away_is_told_of_more_than_once_and_never_quits_at_once(tmp_path):
  done = tmp_path / "all were sent"
  process = start(LOOP.replace("stop.should_stop(step)", f"__import__('os').path.exists({str(done)!r})"))
  for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
    process.send_signal(number)
    time.sleep(0.05)
  done.touch()
  out, err = process.communicate(timeout=120)
  assert process.returncode == 42
  assert "stopped by SIGTERM after step " in out
  assert "quitting" not in err


def test_a_hangup_that_was_ignored_still_is():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    with StopRequest() as stop:
      os.kill(os.getpid(), signal.SIGHUP)
      os.kill(os.getpid(), signal.SIGTERM)
      assert wait_for_request(stop) == signal.SIGTERM
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
  finally:
    signal.signal(signal.SIGHUP, before)


def wait_for_request(stop):
  deadline = time.monotonic() + 60
  while stop.requested is None and time.monotonic() < deadline:
    time.sleep(0.01)
  return stop.requested


def test_work_that_a_stop_leaves_behind():
  release = threading.Event()
  with StopRequest() as stop:
    assert stop.interruptible(lambda: 3) == 3
    with pytest.raises(KeyError, match="x"):
      stop.interruptible(lambda: {}["x"])
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(StopRequested):
      stop.interruptible(release.wait)
    assert abandoned_threads.any_running()
    assert str(stop.error_at_start()).startswith("stopped by SIGINT before the first step")
    with pytest.raises(StopRequested):
      stop.interruptible(lambda: pytest.fail("it was asked before"))
    release.set()
    timer.join()


def test_several_processes_stop_where_all_have_heard_of_it():
  """All processes stop at the same step. A signal that arrived before this process began to train is also shared at its first
  step, because the others may already train."""
  wishes, known = [], [""]

  class Known(Agreement):
    def __call__(self, step, wish=""):
      wishes.append(wish)
      return [wish, *known]

  agreement = Known(1)
  stop = StopRequest(agreement)
  with stop:
    os.kill(os.getpid(), signal.SIGTERM)
    while stop.requested is None:
      time.sleep(0.01)
    stop.training = True
    assert stop.should_stop(3)
    assert stop.should_stop(3)
  assert wishes == ["SIGTERM"]
  other = StopRequest(agreement)
  other.training = True
  assert not other.should_stop(3)
  known[:] = ["SIGTERM"]
  assert not other.should_stop(3), "asked twice about one step"
  assert other.should_stop(4)
  assert other.requested == signal.SIGTERM


def test_several_processes_leave_work_between_two_steps_at_the_same_part():
  parts, known = [], [""]

  class Known(Agreement):
    def restarted(self):
      parts.append("restarted")
      return self

    def __call__(self, step, wish=""):
      parts.append(step)
      return [wish, *known]

  stop = StopRequest(Known(1))
  stop.training = True
  stop.check_together(0)
  stop.check_together(1)
  stop.check_together(0)
  known[:] = ["SIGTERM"]
  with pytest.raises(StopRequested):
    stop.check_together(1)
  assert parts == ["restarted", 0, 1, "restarted", 0, 1]
  with pytest.raises(StopRequested):
    stop.check_together(0)
  assert stop.should_stop(7)
  assert len(parts) == 6, "it is agreed"
  alone = StopRequest()
  alone.check_together(0)
  alone.requested = signal.SIGINT
  with pytest.raises(StopRequested):
    alone.check_together(1)
