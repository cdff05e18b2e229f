"""Runs that fail without being killed: full disks, programs that close nothing, non-finite states, two runs at once."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, Runs

from tests.processes import xla_flags


@pytest.mark.parametrize("end", ["return", "exception", "sys.exit"])
def test_f07_a_program_that_ends_right_after_save(runs: Runs, end):
  """A program that does not close the manager either has its last step saved or exits with an error."""
  code, text = runs.run("a", end=end, steps=5)
  assert code != 0 or runs.complete("a") == [5], text
  if code != 0:
    assert "checkpoint of step 5 failed" in text


def test_f22_a_state_that_is_not_finite(runs: Runs):
  code, text = runs.run("a", nan_at=18, keep=1, steps=23)
  assert code == 0, text
  assert runs.complete("a") == [15]
  assert "checkpoint of step 20 refused: the state is not finite; step 15 is kept" in text
  assert "checkpoint of step 23 refused" in text


def test_f18_two_runs_in_one_directory(runs: Runs):
  first = runs.start("a", pause=0.5)
  runs.wait_for("step 1\n", first)
  code, text = runs.run("a")
  first.kill()
  first.wait()
  assert code == 2, text
  assert f"in use by process {first.pid} on " in text
  assert "started 20" in text


FULL_DISK = """
set -e
mount -t tmpfs -o size=100m none {disk}
mkdir {disk}/output
cp -r {begun} {disk}/output
used=$(df --output=used -B1 {disk} | tail -n 1)
# Room for the arrays of one more checkpoint, but not for its files: only writing finds out.
mount -o remount,size=$((used + 12000000 + 49152)) none {disk}
set +e
{program} > {log}.1 2>&1; echo "code $?" >> {log}.1
ls {disk}/output/a/checkpoints > {log}.ls
mount -o remount,size=100m none {disk}
{program} > {log}.2 2>&1; echo "code $?" >> {log}.2
"""


BEGUN = {"width": 1000, "interval": 2, "keep": 1}


def can_mount():
  """Returns True if this user may mount a tmpfs in a new mount namespace."""
  if shutil.which("unshare") is None:
    return False
  return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a tmpfs (root with CAP_SYS_ADMIN)")
@pytest.mark.slow
def test_f05_full_disk(runs: Runs, tmp_path):
  """The disk fills up while step 4 is saved. The run reports it, retries and exits with 42. With free space it resumes."""
  disk = tmp_path / "disk"
  disk.mkdir()
  code, text = runs.run("a", **BEGUN, steps=2)
  assert code == 0, text
  environment = runs.environment | {"XLA_FLAGS": xla_flags(1)}  # the same flags as that run, whose program is in the cache
  inside = Runs(disk / "output", environment, None)
  program = " ".join(inside.command("a", **BEGUN, pause=0.05)) + " steps=12"
  script = FULL_DISK.format(disk=disk, program=program, log=tmp_path / "log", begun=runs.output_dir / "a")
  subprocess.run(["unshare", "-m", "sh", "-c", script], env=environment, cwd=ROOT, check=True, timeout=240)
  first, second = ((tmp_path / f"log.{number}").read_text() for number in (1, 2))
  assert first.endswith("code 42\n"), first
  assert f"checkpoint of step 4 failed (1 of 3): {disk}/output/a/checkpoints/4: needs 12.00 MB, " in first
  assert " free: No space left on device; step 2 is kept" in first
  assert "failed (3 of 3)" in first
  assert "step 6\n" in first  # training continued between the attempts
  assert (tmp_path / "log.ls").read_text() == "2\n"
  assert second.endswith("code 0\n"), second
  assert "start 2\n" in second


# A file at the path where orbax creates a directory: one of its threads fails, and the others wait for it for minutes.
IN_THE_WAY = """
import sys
from maxtext_like.checkpoint.store.array_writer import ArrayWriter
from maxtext_like.cli.main import main
begin = ArrayWriter.save
def save(self, path, flat, number):
  path.parent.rmdir()
  path.parent.write_text("in the way")
  begin(self, path, flat, number)
ArrayWriter.save = save
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_threads_of_failed_saves_keep_nobody(train, tmp_path):
  command = [sys.executable, "-c", IN_THE_WAY, "train", *train.command("a", steps=2)[2:]]
  done = subprocess.run(command, env=train.environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert done.returncode == 42, done
  assert "failed (3 of 3)" in done.stderr
