"""Tests maxtext_like/training/signals.py with real signals to real processes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from maxtext_like.errors import InterruptedRunError, RetryableError
from maxtext_like.training.signals import StopRequest


def start(body):
  """Starts a program that prints ``ready`` when it listens."""
  program = textwrap.dedent(
    """
    import sys, time
    from maxtext_like.training.signals import StopRequest
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
def test_the_first_signal_stops_the_loop(number, code):
  process = start(LOOP)
  process.send_signal(number)
  out, err = process.communicate(timeout=20)
  assert process.returncode == code
  assert f"stopped by {number.name} after step " in out
  assert "saved in runs/a/checkpoints/7; to go on from there: python" in out
  assert f"{number.name}: stopping after this step, with a checkpoint; once more to quit now" in err


@pytest.mark.parametrize(("first", "second"), [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_the_second_signal_quits_even_when_the_main_thread_is_deaf(first, second):
  # sleep() of libc runs no bytecode of the main thread, as a long compilation does not.
  process = start("import ctypes\nctypes.CDLL(None).sleep(60)\nctypes.CDLL(None).sleep(60)\nctypes.CDLL(None).sleep(60)")
  process.send_signal(first)
  assert process.stderr is not None
  process.stderr.readline()
  assert "stopping after this step" in process.stderr.readline()
  begin = time.monotonic()
  process.send_signal(second)
  _, err = process.communicate(timeout=20)
  assert process.returncode == 128 + second
  assert time.monotonic() - begin < 2
  assert f"{second.name} again: quitting now" in err


def test_everything_is_put_back():
  before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
  threads = threading.active_count()
  with StopRequest() as stop:
    assert not stop.should_stop(0)
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + 5
    while stop.requested is None and time.monotonic() < deadline:
      time.sleep(0.01)
    assert stop.requested == signal.SIGTERM
    assert isinstance(stop.error(3, None), RetryableError)
    assert "nothing of it is kept" in str(stop.error(3, None))
    stop.requested = signal.SIGINT
    assert isinstance(stop.error(3, None), InterruptedRunError)
  assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
  assert threading.active_count() == threads
