"""The watchdog ends runs that hang on a frozen disk or in a stopped thread, with stacks in the log and exit code 42."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

LONG = {"steps": 50_000, "log_interval": 5, "replay_failed_step": "false"}


class Disk:
  """A separate file system in its own mount namespace. ``freeze`` blocks all writers (FIFREEZE) until ``thaw``."""

  def __init__(self, image: Path, place: Path):
    self.place = place
    script = (
      'truncate -s 64M "$0" && mkfs.ext4 -q -F "$0" && mount -o loop "$0" "$1" && echo ready && read end; fsfreeze -u "$1"'
    )
    self._keeper = subprocess.Popen(
      ["unshare", "-m", "sh", "-c", script, image, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert self._keeper.stdout is not None
    self.usable = self._keeper.stdout.readline() == "ready\n"
    self.inside = ["nsenter", "-m", "-t", str(self._keeper.pid), f"--wdns={ROOT}"]
    self.seen_from_outside = Path(f"/proc/{self._keeper.pid}/root{place}")
    self._processes: list[subprocess.Popen] = []

  def spawn(self, train, name, **keys):
    """Starts a run of train.py in the namespace that has this disk."""
    self._processes.append(train.spawn(name, prefix=self.inside, **keys))
    return self._processes[-1]

  def freeze(self):
    subprocess.run([*self.inside, "fsfreeze", "-f", self.place], check=True)

  def thaw(self):
    subprocess.run([*self.inside, "fsfreeze", "-u", self.place], stderr=subprocess.DEVNULL, check=False)

  def close(self):
    for process in self._processes:
      process.kill()  # before the thaw lets it continue
    if self.usable:
      self.thaw()
    for process in self._processes:
      process.wait()
    self._keeper.communicate("end\n")

  def steps(self):
    """Returns the steps that have a manifest (COMPLETE.json)."""
    return sorted(int(path.parent.name) for path in self.seen_from_outside.glob("*/COMPLETE.json"))


@pytest.fixture
def disk(train, tmp_path):
  """A separate disk for the checkpoints of run "a"."""
  if not all(map(shutil.which, ("unshare", "nsenter", "fsfreeze", "mkfs.ext4"))):
    pytest.skip("needs unshare, nsenter, fsfreeze and mkfs.ext4")
  train.checkpoints("a").mkdir(parents=True)
  found = Disk(tmp_path / "image", train.checkpoints("a"))
  try:
    if not found.usable:
      pytest.skip("needs the right to mount a loop device (root with CAP_SYS_ADMIN)")
    yield found
  finally:
    found.close()


def hangs_and_ends(train, process, disk, message):
  """Checks that the log has the error message and the stacks, and that the process exits with 42 after the thaw.

  A process that waits for a frozen disk cannot exit before the disk thaws.
  """
  train.wait_for(message, process)
  train.wait_for(r"threads:\n(.*\n)*.*Thread 0x.*most recent call first", process)
  disk.thaw()
  assert process.wait(timeout=240) == 42, train.log.read_text()
  assert "Traceback" not in train.log.read_text()


def threads_inside(folder, text):
  """Returns the names of the threads that have a stack frame in a file of ``folder``."""
  names = dict(re.findall(r"^  (0x[0-9a-f]+) (.+)$", text, re.MULTILINE))
  stacks = re.findall(r"hread (0x[0-9a-f]+) .*\n((?:  File .*\n)+)", text)
  return [names[ident] for ident, frames in stacks if ident in names and f"/{folder}" in frames]


def waits_for_the_disk(process):
  """Waits until a thread of the process stays in uninterruptible sleep (state D), as in a write to a frozen disk."""
  deadline = time.monotonic() + 60
  looks = 0
  while looks < 20:  # a read from a working disk causes the same state for a moment
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{process.pid}/task").glob("*/stat")]
    looks = looks + 1 if "D" in states else 0
    assert time.monotonic() < deadline, states
    time.sleep(0.01)


@pytest.mark.slow
def test_a_disk_that_never_answers(train, disk):
  """A save, a shutdown during a save, and a start each hang and exit with 42. The run resumes from its newest checkpoint."""
  process = disk.spawn(train, "a", watchdog_save_seconds=4, **LONG)
  train.wait_for(r"step +25 of", process)
  disk.freeze()
  saved = disk.steps()
  hangs_and_ends(train, process, disk, r"error: the (wait for the )?save of step \d+ takes longer than 4 s")
  text = train.log.read_text()
  assert "watchdog_save_seconds=4" in text
  assert "checkpoint is unchanged" in text
  assert any(re.fullmatch(r"MainThread|checkpoint-\d+", name) for name in threads_inside("maxtext_like/checkpoint/", text))
  assert text.partition("threads:")[2] in (train.output_dir / "a" / "stacks.txt").read_text()
  assert disk.steps() == saved

  process = disk.spawn(train, "a", watchdog_save_seconds=0, watchdog_exit_seconds=3, **LONG)
  train.wait_for(rf"from step {saved[-1]} in(.*\n)*step", process)
  disk.freeze()
  saved = disk.steps()
  waits_for_the_disk(process)
  process.send_signal(signal.SIGTERM)
  hangs_and_ends(train, process, disk, r"error: the shutdown of the run takes longer than 3 s \(watchdog_exit_seconds=3\)")
  assert disk.steps() == saved

  disk.freeze()
  process = disk.spawn(train, "b", output_dir=disk.place, watchdog_compile_seconds=3, **LONG)
  hangs_and_ends(train, process, disk, r"error: the start takes longer than 3 s \(watchdog_compile_seconds=3\)")


@contextlib.contextmanager
def helped_by(program, *words, says):
  """Runs a Python program until the end of the context. Yields None if the program ended without printing ``says``."""
  with subprocess.Popen([sys.executable, "-c", program, *map(str, words)], stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout is not None
    yield process if process.stdout.readline() == f"{says}\n" else None
    process.kill()


STOP_MAIN_THREAD = """
import ctypes, os, sys, time
SEIZE, INTERRUPT, CONT = 0x4206, 0x4207, 7
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
thread = int(sys.argv[1])
if libc.ptrace(SEIZE, thread, None, None):
  sys.exit(f"cannot trace: {os.strerror(ctypes.get_errno())}")
while True:
  libc.ptrace(INTERRUPT, thread, None, None)
  os.waitpid(thread, 0x40000000)
  # Stopped in a futex it waits for something, and so without Python's lock, which the other threads need.
  if open(f"/proc/{thread}/task/{thread}/syscall").read().startswith("202 "):
    break
  libc.ptrace(CONT, thread, None, None)
  time.sleep(0.001)
print("stopped", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="knows the system calls of x86_64 Linux")
def test_a_step_that_never_ends(train):
  """The main thread, which runs the steps, is stopped with ptrace. The other threads run, and the watchdog ends the run."""
  # The steps are so long that the thread waits for the device most of the time.
  process = train.start("a", watchdog_step_seconds=4, max_target_length=128, per_device_batch_size=64, **LONG)
  train.wait_for(r"step +10 of", process)
  while not train.complete("a"):
    time.sleep(0.01)
  with helped_by(STOP_MAIN_THREAD, process.pid, says="stopped") as stopper:
    if stopper is None:
      process.kill()
      pytest.skip("needs the right to trace a process")
    train.wait_for(r"error: step \d+ takes longer than 4 s \(watchdog_step_seconds=4\)(.*\n)*.*Thread 0x", process)
  assert process.wait(timeout=240) == 42
  assert "MainThread" in train.log.read_text()
  assert train.complete("a")
