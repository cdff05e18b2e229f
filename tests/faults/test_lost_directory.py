"""The run directory is removed during training, restored from the mirror, or taken over by another host."""

import json
import re
import shutil
import signal
import subprocess
import time

import pytest
from conftest import assert_bitwise_equal


@pytest.mark.slow  # fast tests of this: tests/training/run/test_run_directory.py
def test_removed_while_it_trains(train):
  """The run exits with 42 and a message without a traceback. Only an unfinished save may create directories again."""
  process = train.start("a", steps=1_000_000, log_interval=5)
  train.wait_for(r"step +10 of", process)
  run = train.output_dir / "a"
  while run.exists():  # a save may create directories during the removal
    subprocess.run(["rm", "-rf", run], check=False)
  assert process.wait(timeout=240) == 42, train.log.read_text()
  said = rf"run directory {re.escape(str(run))}: (it was removed or renamed|its run.lock was removed) "
  assert re.search(said, train.log.read_text())  # rm may remove the lock first
  assert "Traceback" not in train.log.read_text()
  made_again = {str(path.relative_to(run)) for path in run.rglob("*")} if run.exists() else set()
  assert all(re.match(r"checkpoints($|/\d+\.saving-)", name) for name in made_again), made_again


@pytest.mark.slow  # tests of the manager's errors: tests/checkpoint
def test_checkpoints_removed_while_it_trains(train):
  """The run exits with 42 and a message without a traceback."""
  process = train.start("a", steps=1_000_000, log_interval=5)
  train.wait_for(r"step +10 of", process)
  checkpoints = train.checkpoints("a")
  deadline = time.monotonic() + 240
  # A save in progress creates its directories again, so one removal is not always enough.
  while process.poll() is None and time.monotonic() < deadline:
    subprocess.run(["rm", "-rf", checkpoints], check=False)
    time.sleep(0.1)
  assert process.poll() == 42, train.log.read_text()
  text = train.log.read_text()
  assert re.search(rf"error: checkpoint .*{re.escape(str(checkpoints))}", text), text
  assert "Traceback" not in text, text


@pytest.mark.slow
def test_lost_and_brought_back(train, tmp_path):
  keys = {"checkpoint_mirror": tmp_path / "mirror", "max_to_keep": 1, "steps": 30, "log_interval": 10}
  code, text = train.run("a", **keys)
  assert code == 0, text
  whole, run = train.state("a", 30), train.output_dir / "a"
  assert [path.name for path in (tmp_path / "mirror" / "a" / "checkpoints").iterdir()] == ["30"]
  shutil.rmtree(run)
  code, text = train.run("a", **keys)
  assert code == 0, text
  assert f"mirror  copied back step 30, the newest in checkpoint_mirror {tmp_path}/mirror" in text
  assert "already at step 30 of 30" in text
  assert_bitwise_equal(train.state("a", 30), whole)
  # If only the checkpoints are missing from an existing run directory, they are restored too and the run resumes.
  shutil.rmtree(train.checkpoints("a"))
  code, text = train.run("a", **keys | {"steps": 40})
  assert code == 0, text
  assert "from step 30 in" in text
  assert train.losses("a").keys() == set(range(31, 41))
  for other, said in (
    ({"checkpoint_mirror": "s4://bucket/runs"}, "unknown protocol s4://\n  fix: "),
    ({"resume": "false", "run_name": "a", "output_dir": tmp_path / "new"}, "holds step 40, and resume is false"),
  ):
    code, text = train.run("a", **keys | other)
    assert (code, said in text) == (2, True), text


@pytest.mark.slow
def test_restarted_without_progress(train):
  """A run is killed twice before its first checkpoint. The next start exits with 3, so that no launcher restarts it forever."""
  for _ in range(2):
    process = train.start("a", max_restarts_without_progress=1, steps=1_000_000, checkpoint_interval=1_000_000)
    train.wait_for(r"model  ", process)
    process.kill()
    process.wait()
  code, text = train.run("a", max_restarts_without_progress=1)
  assert code == 3, text
  assert "started 2 times in a row without a new checkpoint" in text
  assert "max_restarts_without_progress=1" in text
  assert "remove" in text
  (train.output_dir / "a" / "restarts.json").unlink()
  code, text = train.run("a", max_restarts_without_progress=1, steps=10)
  assert code == 0, text


@pytest.mark.slow
def test_taken_over_from_another_host(train, tmp_path):
  """A suspended run is taken over by a process on another host. When it continues, it exits with 42 and changes nothing."""
  elsewhere = ["unshare", "--uts", "sh", "-c", 'hostname far-away && exec "$@"', "sh"]
  if not shutil.which("unshare") or subprocess.run([*elsewhere, "true"], capture_output=True).returncode:
    pytest.skip("needs the right to have another host name (root with CAP_SYS_ADMIN)")
  first = train.spawn("a", prefix=elsewhere, steps=1_000_000, log_interval=5)
  log = train.log
  train.wait_for(r"step +35 of", first)
  first.send_signal(signal.SIGSTOP)
  code, text = train.run("a")
  assert code == 0, text
  assert "far-away; watching its heartbeat for 16 s" in text
  assert f"taking over the lock of process {first.pid} on far-away" in text
  run = train.output_dir / "a"
  lock = run / "run.lock"
  # An interrupted save or write leaves a temporary folder or file.
  own = (".saving-", f".{first.pid}.tmp")
  kept = lambda: {
    str(path.relative_to(run)): path.read_bytes()
    for path in run.rglob("*")
    if path.is_file() and path != lock and not any(part in str(path) for part in own)
  }
  before = kept()
  holder = subprocess.Popen(["sleep", "100"])
  lock.write_text(json.dumps({"host": "here", "pid": holder.pid, "started": "now", "command": "the second one"}))
  first.send_signal(signal.SIGCONT)
  assert first.wait(timeout=240) == 42, log.read_text()
  holder.kill()
  holder.wait()
  assert "process" in log.read_text().rpartition("error: ")[2]
  assert "took it over" in log.read_text()
  assert lock.exists()
  after = kept()
  # Rows are written without a fence (run_directory.py): if SIGSTOP came between the check of the lock and the write of a
  # row, that row is still written.
  rows_before, rows_after = before.pop("metrics.jsonl"), after.pop("metrics.jsonl")
  assert rows_after.startswith(rows_before)
  assert rows_after.removeprefix(rows_before).count(b"\n") <= 1
  assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == set()
