"""Tests maxtext_like/training/loop/watchdog.py with processes that really hang, also if their last messages cannot be
written."""

import os
import signal
import subprocess
import sys
import time

import pytest

from maxtext_like.training.loop.watchdog import Watchdog

PRELUDE = """
import os, signal, sys, threading, time
from pathlib import Path
from maxtext_like.training.loop import watchdog
from maxtext_like.training.loop.signals import StopRequest
watchdog._TICK_SECONDS = 0.05
directory = Path(sys.argv[1])
os.mkfifo(directory / "pipe")
hang = lambda: open(directory / "pipe").read()
"""


def run(tmp_path, program, **how):
  command = [sys.executable, "-c", PRELUDE + program, str(tmp_path)]
  return subprocess.run(command, timeout=60, text=True, **{"stderr": subprocess.PIPE, **how})


def test_what_hangs_is_named_with_the_place_of_every_thread(tmp_path):
  done = run(tmp_path, """
with watchdog.Watchdog({"step": 0.3, "save": 99}) as watch:
  watch.directory = directory
  threading.Thread(target=hang, name="a reader", daemon=True).start()
  with watch.watch("save", "the save of step 6"), watch.watch("step", "step 7"):
    hang()
""")  # fmt: skip
  assert done.returncode == 42
  assert "error: step 7 takes longer than 0 s (watchdog_step_seconds=" in done.stderr
  assert "fix: " in done.stderr
  assert " MainThread\n" in done.stderr
  assert " a reader\n" in done.stderr
  assert done.stderr.count("in <lambda>") == 2
  assert (tmp_path / "stacks.txt").read_text().strip() in done.stderr
  assert "warning: step 7 has taken " in done.stderr


def test_last_words_that_nobody_takes_keep_nobody(tmp_path):
  """The process ends at its limit although standard error is a full pipe, and the file for the stacks is a pipe without a
  reader."""
  os.mkfifo(tmp_path / "stacks.txt")
  read, write = os.pipe()
  os.set_blocking(write, False)
  with open(write, "wb", buffering=0) as full:
    while full.write(bytes(4096)):
      pass
    os.set_blocking(write, True)
    done = run(tmp_path, """
watchdog._FAREWELL_SECONDS = 0.4
with watchdog.Watchdog({"step": 0.2}) as watch:
  watch.directory = directory
  with watch.watch("step"):
    hang()
""", stderr=full)  # fmt: skip
  os.close(read)
  assert done.returncode == 42


@pytest.mark.slow
def test_inner_work_and_progress_are_not_the_outer_ones_time(tmp_path):
  done = run(tmp_path, """
with watchdog.Watchdog({"step": 1.0, "save": 0}) as watch, watch.watch("step"):
  with watch.watch("save"):
    time.sleep(1.2)
  for _ in range(5):
    time.sleep(0.25)
    watch.restart()
  def work():
    for _ in range(5):
      time.sleep(0.25)
      watch.restart(thread=threading.main_thread().ident)
  worker = threading.Thread(target=work)
  worker.start()
  worker.join()
  watch.restart("save")
  time.sleep(1.2)
""")  # fmt: skip
  assert done.returncode == 0, done.stderr  # stderr is not compared: on a busy machine it may have the warning


def test_a_stopped_process_does_not_age(tmp_path):
  with subprocess.Popen([sys.executable, "-c", PRELUDE + """
with watchdog.Watchdog({"step": 1.0}) as watch, watch.watch("step"):
  print("ready", flush=True)
  time.sleep(0.1)
  sys.stdin.readline()
""", str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
def test_a_signal_limits_the_way_out(tmp_path, number, code):
  done = run(tmp_path, f"""
with StopRequest() as stop, watchdog.Watchdog({{"step": 99, "exit": 0.3}}) as watch:
  watch.stop = stop
  with watch.watch("compile"):
    os.kill(os.getpid(), {int(number)})
    hang()
""")  # fmt: skip
  assert done.returncode == code
  assert "error: the shutdown of the run takes longer than 0 s (watchdog_exit_seconds=" in done.stderr


def test_the_way_out_begins_at_the_end_of_the_step(tmp_path):
  """A step that takes longer than the shutdown limit, and waits for data in the meantime, is finished after a signal. The
  shutdown time is counted from the end of the step."""
  done = run(tmp_path, """
with StopRequest() as stop, watchdog.Watchdog({"step": 99, "exit": 0.3}) as watch:
  watch.stop = stop
  with watch.watch("first_step"):
    os.kill(os.getpid(), signal.SIGTERM)
    with watch.watch("data"):
      time.sleep(0.5)
    watch.restart("step")
    time.sleep(0.5)
    print("the step is done", flush=True)
    watch.begin_shutdown()
    hang()
""", stdout=subprocess.PIPE)  # fmt: skip
  assert (done.returncode, done.stdout) == (42, "the step is done\n")
  assert "error: the shutdown of the run takes longer than 0 s (watchdog_exit_seconds=" in done.stderr


def test_a_step_keeps_its_limit_after_a_signal(tmp_path):
  done = run(tmp_path, """
with StopRequest() as stop, watchdog.Watchdog({"step": 0.3, "exit": 0.1}) as watch:
  watch.stop = stop
  with watch.watch("step"):
    os.kill(os.getpid(), signal.SIGTERM)
    hang()
""")  # fmt: skip
  assert done.returncode == 42
  assert "error: step takes longer than 0 s (watchdog_step_seconds=" in done.stderr


def test_what_is_read_for_another_thread_is_not_its_time(tmp_path):
  """A read for a waiting thread has its own, longer limit, because a large state takes longer than the start. If the waiting
  thread no longer waits when the read ends, the bookkeeping stays correct."""
  done = run(tmp_path, """
with watchdog.Watchdog({"compile": 0.5}) as watch:
  watch.state_bytes = 500_000_000
  begun, here = threading.Event(), threading.get_ident()
  def read(seconds):
    with watch.watch("read", thread=here):
      begun.set()
      time.sleep(seconds)
  with watch.watch("compile"):
    reader = threading.Thread(target=read, args=(0.8,))
    reader.start()
    reader.join()
  begun.clear()
  with watch.watch("compile"):
    reader = threading.Thread(target=read, args=(0.2,))
    reader.start()
    begun.wait()
  reader.join()
  assert not watch._watched
  watch.state_bytes = 0
  with watch.watch("read", "the restore"):
    hang()
""")  # fmt: skip
  assert done.returncode == 42
  assert "error: the restore takes longer than 0 s (watchdog_compile_seconds=" in done.stderr, done.stderr


def test_a_program_that_does_not_end_is_ended(tmp_path):
  done = run(tmp_path, """
with watchdog.Watchdog({"exit": 0.3}):
  threading.Thread(target=hang, name="left behind").start()
""")  # fmt: skip
  assert done.returncode == 42
  assert "error: the program did not end within 0 s (watchdog_exit_seconds)" in done.stderr
  assert " left behind\n" in done.stderr


def test_a_large_state_has_more_time():
  watchdog = Watchdog({"compile": 20, "step": 10, "save": 10, "exit": 0})
  watchdog.state_bytes = 400_000_000_000
  assert watchdog.limit("step") == 10
  assert watchdog.limit("save") == 8010
  assert watchdog.limit("compile") == watchdog.limit("first_step") == 20
  assert watchdog.limit("read") == 8020
  assert watchdog.limit("exit") == float("inf")
