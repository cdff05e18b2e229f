"""Tests maxtext_like/training/run/run_directory.py: the lock when its holder is running, dead or on another host, and unusable
paths."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from maxtext_like.errors import RetryableError, UserError
from maxtext_like.training.run import resume_state, run_directory
from maxtext_like.training.run.run_directory import RunDirectory


def can_mount():
  """Return True if this user may mount a tmpfs in a separate mount namespace."""
  if shutil.which("unshare") is None:
    return False
  return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0


HOLDER = """
import os, sys, time
from maxtext_like.training.run import run_directory
from maxtext_like.training.sinks.run_files import RunFiles
run_directory._HEARTBEAT_SECONDS, run_directory._WATCH_SECONDS = 0.2, 1.0
if sys.argv[3:] == ["replacing"]:
  run_directory._HEARTBEAT_SECONDS = 60.0  # which would end it first
with run_directory.RunDirectory(sys.argv[1], sys.argv[2]) as run:
  metrics = open(run.path / "metrics.jsonl", "a")
  metrics.write("row" + chr(10))
  metrics.flush()
  print("held", flush=True)
  if sys.argv[3:] == ["exclusive"]:
    with run.exclusive():
      print("inside", flush=True)
      time.sleep(60)
  if sys.argv[3:] == ["replacing"]:
    files = RunFiles(run.path, tensorboard=False, step=0, require_held=run.require_held, fence=run.fence)
    os.fsync = lambda number: (print("all but renamed", flush=True), sys.stdin.readline())
    files.text("finiteness.json", "of the first")
    time.sleep(60)
  while True:
    run.require_held()
    metrics.write("row" + chr(10))
    metrics.flush()
    if sys.argv[3:] == ["pausing"]:
      print("written", flush=True)
      sys.stdin.readline()
    time.sleep(0.002)
"""


@contextlib.contextmanager
def holding(*words):
  with subprocess.Popen(
    [sys.executable, "-c", HOLDER, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()


@pytest.fixture
def holder(tmp_path):
  with holding(tmp_path, "run") as process:
    yield process


@pytest.fixture
def abroad(monkeypatch):
  """To this process the holder seems to run on another host, whose processes it cannot inspect."""
  identity = run_directory._identity
  monkeypatch.setattr(run_directory, "_identity", lambda: {**identity(), "host": "far-away", "boot": "another"})
  monkeypatch.setattr(run_directory, "_WATCH_SECONDS", 1.0)


def test_second_process_is_refused_and_told_who(tmp_path, holder):
  """A second process on the same run directory is refused, with the holder's process id, host and start time (F18)."""
  with pytest.raises(UserError) as caught, RunDirectory(tmp_path, "run"):
    pass
  lock = json.loads((tmp_path / "run" / "run.lock").read_text())
  assert lock["pid"] == holder.pid
  message = str(caught.value)
  assert f"{tmp_path}/run: in use by process {holder.pid} on {lock['host']}, started {lock['started']}" in message
  assert "choose another run_name" in message
  with RunDirectory(tmp_path, "other"):
    pass


@pytest.mark.parametrize("reaped", [True, False])
def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, holder, caplog, reaped):
  holder.send_signal(signal.SIGKILL)
  if reaped:
    holder.wait()
  else:
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the process table as a zombie
  with RunDirectory(tmp_path, "run") as run:
    assert json.loads((run.path / "run.lock").read_text())["pid"] == os.getpid()
  assert f"taking over the lock of process {holder.pid} on " in caplog.text
  assert not (run.path / "run.lock").exists()


def test_a_process_number_that_was_given_out_again_is_not_the_holder(tmp_path, holder, caplog):
  path = tmp_path / "run" / "run.lock"
  lock = json.loads(path.read_text())
  path.write_text(json.dumps({**lock, "start_ticks": lock["start_ticks"] - 100}))
  with RunDirectory(tmp_path, "run"):
    assert "taking over" in caplog.text


def test_a_living_holder_on_another_host_is_left_alone(tmp_path, holder, caplog, abroad):
  with pytest.raises(UserError, match=f"in use by process {holder.pid} on "), RunDirectory(tmp_path, "run"):
    pass
  assert "watching its heartbeat for 1 s" in caplog.text
  assert holder.poll() is None


def test_a_holder_that_was_stopped_and_taken_over_writes_nothing_more(tmp_path, abroad):
  """A holder is stopped with SIGSTOP before it checks the lock again, another host takes over, and SIGCONT resumes it. It must
  end without writing anything."""
  with holding(tmp_path, "run", "pausing") as holder:
    assert holder.stdout is not None
    assert holder.stdout.readline() == "written\n"
    holder.send_signal(signal.SIGSTOP)
    with RunDirectory(tmp_path, "run") as run:
      before = {path.name: path.read_bytes() for path in run.path.iterdir()}
      assert before["metrics.jsonl"] == b"row\nrow\n"
      holder.send_signal(signal.SIGCONT)
      _, said = holder.communicate("\n", timeout=60)
      assert holder.returncode == 42
      assert f"error: run directory {run.path}: process {os.getpid()} on far-away, started 20" in said
      assert "took it over" in said
      assert "writes nothing more into it" in said
      assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before
      run.require_held()


def test_a_file_that_was_all_but_replaced_stays_the_next_holders(tmp_path, abroad):
  """A holder is stopped with SIGSTOP during the fsync of a file, another host takes over, and SIGCONT resumes it. It checked
  the lock before the write, but must not replace the new holder's file."""
  with holding(tmp_path, "run", "replacing") as holder:
    assert holder.stdout is not None
    assert holder.stdout.readline() == "all but renamed\n"
    holder.send_signal(signal.SIGSTOP)
    with RunDirectory(tmp_path, "run") as run:
      run.write_text("finiteness.json", "of the second")
      holder.send_signal(signal.SIGCONT)
      _, said = holder.communicate("\n", timeout=60)
      assert holder.returncode == 42
      assert "took it over" in said
      assert (run.path / "finiteness.json").read_text() == "of the second"


def test_no_takeover_falls_into_what_two_must_not_do(tmp_path, monkeypatch, abroad):
  """A holder that is stopped in an exclusive section, such as the rename of a checkpoint, keeps the directory until it is
  dead."""
  monkeypatch.setattr(run_directory, "_GUARD_SECONDS", 0.3)
  with holding(tmp_path, "run", "exclusive") as holder:
    assert holder.stdout is not None
    assert holder.stdout.readline() == "inside\n"
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(UserError, match=f"in use by process {holder.pid} "), RunDirectory(tmp_path, "run"):
      pass
    holder.kill()
    holder.wait()
    with RunDirectory(tmp_path, "run"):
      pass


@pytest.mark.parametrize(
  ("remove", "what"),
  [
    (lambda run: (run / "run.lock").unlink(), "its run.lock was removed during the run"),
    (lambda run: run.rename(run.with_name("elsewhere")), "it was removed or renamed during the run"),
  ],
)
def test_a_holder_whose_lock_or_directory_is_removed_ends(tmp_path, holder, remove, what):
  remove(tmp_path / "run")
  _, said = holder.communicate(timeout=30)
  assert (holder.returncode, f"error: run directory {tmp_path}/run: {what}" in said) == (42, True), said
  assert not (tmp_path / "run" / "run.lock").exists()


def test_a_run_that_ends_without_its_directory_does_not_end_well(tmp_path, caplog):
  with pytest.raises(RetryableError, match="was removed or renamed"), RunDirectory(tmp_path, "run") as run:
    shutil.rmtree(run.path)
  with pytest.raises(RetryableError, match="was removed or renamed"), RunDirectory(tmp_path, "run") as run:  # noqa: PT012
    shutil.rmtree(run.path)
    (run.path / "report.html").write_text("")
  with pytest.raises(UserError, match="the first error"), RunDirectory(tmp_path, "run") as run:  # noqa: PT012
    shutil.rmtree(run.path)
    raise UserError("the first error")
  assert "was removed or renamed" in caplog.text
  assert not run.path.exists()


READ_ONLY = """
set -e
mount -t tmpfs -o size=1m none {disk}
{python} -c '{program}' {disk} &
until grep -q held {disk}/../log; do sleep 0.05; done
mount -o remount,ro {disk}
until grep -q "heartbeat failed: Read-only file system; retrying" {disk}/../log; do sleep 0.05; done
mount -o remount,rw {disk}
until grep -q "heartbeat succeeded again" {disk}/../log; do sleep 0.05; done
touch {disk}/done
wait $!
"""
BEATING = """
import logging, pathlib, sys, time
from maxtext_like.training.run import run_directory
logging.basicConfig()
run_directory._HEARTBEAT_SECONDS = 0.1
with run_directory.RunDirectory(sys.argv[1], "run") as run:
  print("held", file=sys.stderr)
  while not (run.path.parent / "done").exists():
    time.sleep(0.05)
  lock = run.path / "run.lock"
  before = lock.stat().st_mtime_ns
  while lock.stat().st_mtime_ns == before:
    time.sleep(0.05)
"""


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a tmpfs (root with CAP_SYS_ADMIN)")
def test_the_heart_beats_on_after_a_disk_was_away(tmp_path):
  disk = tmp_path / "disk"
  disk.mkdir()
  script = READ_ONLY.format(disk=disk, python=sys.executable, program=BEATING.replace("'", '"'))
  with open(tmp_path / "log", "w") as log:
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], stderr=log, timeout=60)
  assert done.returncode == 0, (tmp_path / "log").read_text()
  assert (tmp_path / "log").read_text().count("heartbeat failed") == 1


def test_twice_in_one_process(tmp_path):
  with (
    RunDirectory(tmp_path, "run"),
    pytest.raises(UserError, match=f"process {os.getpid()}"),
    RunDirectory(tmp_path, "run"),
  ):
    pass
  with RunDirectory(tmp_path, "run"):
    pass


def test_a_lock_that_is_no_lock_is_replaced(tmp_path, caplog):
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "run.lock").write_bytes(b"\xff\xfe not json")
  with RunDirectory(tmp_path, "run") as run:
    assert json.loads((run.path / "run.lock").read_text())["pid"] == os.getpid()
  assert "is not a valid lock file" in caplog.text


def test_odd_names_work_and_relative_paths_become_absolute(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with RunDirectory("out put/ünï", "run ☃ 1") as run:
    assert run.path == tmp_path / "out put" / "ünï" / "run ☃ 1"
    assert run.write_text("config.yml", "a: ☃\n").read_text(encoding="utf-8") == "a: ☃\n"
    assert run.checkpoints == run.path / "checkpoints"
  assert {entry.name for entry in run.path.iterdir()} == {"config.yml", "run.lock.guard"}


def loop(path):
  (path / "a").symlink_to(path / "b")
  (path / "b").symlink_to(path / "a")
  return path / "a"


def file_in_the_way(path):
  (path / "file").write_text("")
  return path / "file"


@pytest.mark.parametrize(
  "make", [loop, file_in_the_way, lambda path: path / ("x" * 300), lambda path: "/proc/none", lambda path: "a\0b"]
)
def test_unusable_paths_are_user_errors(tmp_path, make):
  """A path that cannot be a directory gives a UserError instead of a traceback (F20)."""
  path = make(tmp_path)
  with pytest.raises(UserError) as caught, RunDirectory(path, "run"):
    pass
  assert "run" in str(caught.value)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0"])
def test_a_run_name_is_one_directory(tmp_path, name):
  with pytest.raises(UserError, match="must be the name of one directory"):
    RunDirectory(tmp_path, name)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
  with RunDirectory(tmp_path, "run") as run:
    run.write_text("report.html", "old")
    with pytest.raises(UnicodeEncodeError):
      run.write_text("report.html", "new \ud800")
    assert (run.path / "report.html").read_text() == "old"
    assert not list(run.path.glob("*.tmp"))


def test_an_earlier_file_is_kept_without_its_secrets(tmp_path):
  run = RunDirectory(tmp_path, "run")
  run.path.mkdir()
  (run.path / "config.yml").write_text("dataset_path: https://me:hunter2@host/data\n")
  run.keep_previous("config.yml", "dataset_path: null\n")
  assert (run.path / "config.1.yml").read_text() == "dataset_path: https://***@host/data\n"


def test_what_was_made_for_nothing_is_removed(tmp_path):
  with RunDirectory(tmp_path / "new", "run") as run:
    assert run.path.is_dir()
  assert list(tmp_path.iterdir()) == []
  with RunDirectory(tmp_path / "new", "run"), RunDirectory(tmp_path / "new", "other") as other:
    other.write_text("file", "kept")
  assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
    "new", "new/other", "new/other/file", "new/other/run.lock.guard",
  ]  # fmt: skip
  (tmp_path / "there").mkdir()
  with RunDirectory(tmp_path, "there"):
    pass
  assert (tmp_path / "there").is_dir()  # it existed before


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.lock", "run.lock.guard", "goodput.json"])
@pytest.mark.parametrize("kind", ["fifo", "link to a device", "link to a fifo"])
def test_a_file_that_is_no_regular_file_is_refused_and_not_read(tmp_path, name, kind):
  (tmp_path / "run").mkdir()
  path = tmp_path / "run" / name
  if kind == "link to a device":
    path.symlink_to("/dev/full")
  else:
    os.mkfifo(path if kind == "fifo" else tmp_path / "fifo")
    if kind != "fifo":
      path.symlink_to(tmp_path / "fifo")
  with pytest.raises(UserError, match=f"{name}.* not a regular file") as caught, RunDirectory(tmp_path, "run"):
    pass
  assert "fix: remove it" in str(caught.value)
  with pytest.raises(UserError, match=f"{name}.* not a regular file"):  # a start reads them before it has the lock
    resume_state.read(tmp_path / "run", tmp_path / "run" / "checkpoints")


def test_a_directory_with_the_name_of_a_file_is_refused(tmp_path):
  (tmp_path / "run" / "goodput.json").mkdir(parents=True)  # only a statistic, so it does not end a run
  with RunDirectory(tmp_path, "run"):
    pass
  for name in ("newest_checkpoint.json", "metrics.jsonl", "config.yml"):
    (tmp_path / "run" / name).mkdir()
    with pytest.raises(UserError, match=f"{name} is a directory, not a file"), RunDirectory(tmp_path, "run"):
      pass
    with pytest.raises(UserError, match=f"{name} is a directory, not a file"):
      resume_state.read(tmp_path / "run", tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / name).rmdir()


def test_links_to_files_and_to_nowhere_are_left_alone(tmp_path):
  (tmp_path / "run").mkdir()
  (tmp_path / "rows").write_text("")
  (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "rows")
  (tmp_path / "run" / "notes").symlink_to(tmp_path / "gone")
  with RunDirectory(tmp_path, "run") as run:
    assert run.holder
