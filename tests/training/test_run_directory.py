"""Tests maxtext_like/training/run_directory.py: the lock against living, dead and distant holders; unusable paths."""

import json
import os
import signal
import subprocess
import sys

import pytest

from maxtext_like.errors import UserError
from maxtext_like.training import run_directory
from maxtext_like.training.run_directory import RunDirectory

HOLDER = """
import sys, time
from maxtext_like.training import run_directory
run_directory._HEARTBEAT_SECONDS = 0.2
with run_directory.RunDirectory(sys.argv[1], sys.argv[2]):
  print("held", flush=True)
  time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
  process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path, "run"], stdout=subprocess.PIPE, text=True)
  assert process.stdout is not None
  assert process.stdout.readline() == "held\n"
  yield process
  process.kill()
  process.communicate()


def test_second_process_is_refused_and_told_who(tmp_path, holder):
  """F18."""
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
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the process table as a zombie
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


@pytest.mark.parametrize("beats", [True, False])
def test_a_holder_on_another_host_is_judged_by_its_heartbeat(tmp_path, holder, caplog, monkeypatch, beats):
  monkeypatch.setattr(run_directory, "_WATCH_SECONDS", 8.0 if beats else 1.0)
  path = tmp_path / "run" / "run.lock"
  lock = json.loads(path.read_text())
  path.write_text(json.dumps({**lock, "host": "far-away"}))
  if beats:
    with pytest.raises(UserError, match="on far-away"), RunDirectory(tmp_path, "run"):
      pass
  else:
    holder.kill()
    holder.wait()
    with RunDirectory(tmp_path, "run"):
      assert "taking over" in caplog.text


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
  assert "is not a lock file" in caplog.text


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
  """F20."""
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
