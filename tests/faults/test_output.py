"""Metrics, reports and log lines on disks, pipes and terminals that fail: a failed write stops neither a step nor the run."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_endings import can_mount

from tests.processes import xla_flags
from tests.tiers import slow

needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs the right to mount a tmpfs (root with CAP_SYS_ADMIN)")
MOUNTS = """
mkdir -p {run}/checkpoints
mount -t tmpfs -o size={size} none {run}
mkdir {run}/checkpoints
mount -t tmpfs -o size=64m none {run}/checkpoints
{more}
exec "$@"
"""


def mounted(run, size, more=""):
  """Returns words before a command that mount a small disk as its run directory, and another one for the checkpoints."""
  return ["unshare", "-m", "sh", "-ec", MOUNTS.format(run=run, size=size, more=more), "sh"]


def rows(run, whole=True):
  """Returns the rows of metrics.jsonl. Every line must be complete. With ``whole=False`` an incomplete last one is skipped."""
  lines = (run / "metrics.jsonl").read_text().split("\n")
  assert not whole or lines[-1] == ""
  return [json.loads(line) for line in lines[:-1]]


def wait_for(condition, process, what):
  deadline = time.monotonic() + 120
  while not condition():
    assert process.poll() is None, f"ended with {process.poll()} before {what}"
    assert time.monotonic() < deadline, what
    time.sleep(0.01)


@needs_mounts
@pytest.mark.slow  # fast tests of writes that fail: tests/training/sinks
def test_f69_a_full_disk_under_metrics_events_and_report(train):
  """Everything except the checkpoints is on a disk of 64 KB. The run finishes and reports the rows that it could not write."""
  run = train.output_dir / "a"
  kept = train.output_dir / "kept"
  more = f"mkdir {kept}"
  inside = mounted(run, "64k", more)
  inside[-2] = inside[-2].replace('exec "$@"', f'set +e\n"$@"\ncode=$?\ncp -r {run}/. {kept}\nexit $code')
  process = train.spawn("a", prefix=inside, steps=150, checkpoint_interval=50, enable_tensorboard="true")
  assert process.wait(timeout=240) == 0, train.log.read_text()
  text = train.log.read_text()
  assert "finished: 150 steps" in text
  assert "Traceback" not in text
  assert text.count("metrics.jsonl: No space left on device; training ") == 1
  lost = {name: int(count) for name, count in re.findall(r"^(\S+): (\d+) rows not written: No space left", text, re.MULTILINE)}
  assert lost["metrics.jsonl"] == 150 - len(rows(kept)) > 0
  assert lost["tensorboard"] > 0
  assert (kept / "checkpoints/150/COMPLETE.json").exists()


@needs_mounts
@pytest.mark.slow
def test_f69_what_waited_is_written_when_the_disk_has_room_again(train):
  run = train.output_dir / "a"
  process = train.spawn("a", prefix=mounted(run, "64k"), steps=1_000_000, checkpoint_interval=1000)
  train.wait_for("metrics.jsonl: No space left on device", process)
  subprocess.run(["nsenter", "-t", str(process.pid), "-m", "mount", "-o", "remount,size=64m", "none", str(run)], check=True)
  there = Path(f"/proc/{process.pid}/root{run}")
  wait_for(lambda: b'"step": 300,' in (there / "metrics.jsonl").read_bytes(), process, "rows of the time after")
  steps = [row["step"] for row in rows(there, whole=False)]
  assert steps == list(range(1, len(steps) + 1))  # no step is missing or repeated
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=240) == 42, train.log.read_text()
  assert "not written" not in train.log.read_text()


@pytest.mark.slow  # the shutdown waits 10 s for the disk
def test_a_disk_that_does_not_answer_holds_up_nothing(train):
  """A FIFO without a reader simulates a network disk that does not respond, because open() does not return."""
  run = train.output_dir / "a"
  process = train.start("a", steps=1_000_000, checkpoint_interval=100, log_interval=1)
  train.wait_for(r"step +5 of", process)
  os.mkfifo(train.output_dir / "fifo")
  os.rename(train.output_dir / "fifo", run / "metrics.jsonl")  # atomically, because a row may be written at any moment
  train.wait_for(r"step +400 of", process)  # includes checkpoints, which wait for rows if the disk responds
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=240) == 42, train.log.read_text()
  text = train.log.read_text()
  assert re.search(r"^metrics.jsonl: \d+ rows not written: [^\n]*\d+ s$", text, re.MULTILINE), text
  assert train.complete("a")


@pytest.mark.slow
def test_a_reader_that_left_and_then_a_stop(train):
  """After the reader of ``train ... | head`` has ended, SIGTERM still saves and exits with 42, not with 0."""
  process = train.spawn("a", stdout=subprocess.PIPE, steps=100_000, max_to_keep=1)
  assert process.stdout is not None
  while not re.match(rb"step +2 of", line := process.stdout.readline()):
    assert line, train.log.read_text()
  process.stdout.close()
  wait_for(lambda: train.complete("a")[-1:] >= [30], process, "step 30")
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=240) == 42, train.log.read_text()
  text = train.log.read_text()
  assert text.startswith("standard output: Broken pipe; training ")
  (stopped,) = re.findall(r"^stopped by SIGTERM after step (\d+), saved in", text, re.MULTILINE)
  assert train.complete("a") == [int(stopped)]
  assert len(rows(train.output_dir / "a")) == int(stopped)
  assert "error:" not in text


SECRETS = (
  "NVIDIA_API_KEY NGC_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN "
  "AWS_ACCESS_KEY_ID GOOGLE_API_KEY GEMINI_API_KEY OPENAI_API_KEY ANTHROPIC_API_KEY AZURE_CLIENT_SECRET AZURE_STORAGE_KEY "
  "GITHUB_TOKEN GH_TOKEN GITLAB_TOKEN CI_JOB_TOKEN NEPTUNE_API_TOKEN COMET_API_KEY MLFLOW_TRACKING_PASSWORD KAGGLE_KEY "
  "REPLICATE_API_TOKEN SLACK_BOT_TOKEN DATABASE_URL PGPASSWORD NPM_TOKEN TWINE_PASSWORD JUPYTER_TOKEN JAX_SECRET_TOKEN "
  "XLA_AUTH_TOKEN MAXTEXT_LIKE_TOKEN LIBTPU_PASSWORD"
)


@pytest.mark.slow
def test_no_stream_at_all_and_thirty_secrets(train):
  """With all three streams closed the run finishes. No file in its directory has a secret of the environment or command."""
  environment = {name: f"hunter{i}" for i, name in enumerate(SECRETS.split())}
  assert len(environment) > 30
  environment["XLA_FLAGS"] = (
    f"{xla_flags(1)} --xla_dump_hlo_as_text=false --xla_dump_to=/tmp/hunter_hf_hunterhunterhunterhunter"
  )
  closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
  words = {"steps": 20, "sample_prompts": "[password=hunter]"}
  process = train.spawn("a", prefix=closed, environment=environment, **words)
  assert process.wait(timeout=240) == 0
  run = train.output_dir / "a"
  assert train.complete("a")[-1] == 20
  shown = {path.name: path.read_bytes().replace(b"xla_dump_to=/tmp/hunter_", b"") for path in run.iterdir() if path.is_file()}
  assert shown.keys() >= {"config.yml", "env.json", "report.html", "metrics.jsonl", "goodput.json"}
  assert [name for name, content in shown.items() if b"hunter" in content] == []


@pytest.mark.slow
def test_full_disks_behind_both_streams(train):
  with open("/dev/full", "w") as full:
    process = train.spawn("a", stdout=full, stderr=full)
    assert process.wait(timeout=240) == 0
  assert train.complete("a")[-1] == 80
  page = (train.output_dir / "a/report.html").read_text()
  assert re.search(r"<p class=bad>standard output: \d+ lines not written: No space left on device</p>", page)


@pytest.mark.slow
def test_a_terminal_that_goes_away_is_a_stop(train):
  process = train.start("a", steps=100_000)
  train.wait_for(r"step +5 of", process)
  for _ in range(2):  # the shell and the kernel each send one
    process.send_signal(signal.SIGHUP)
  assert process.wait(timeout=240) == 42, train.log.read_text()
  text = train.log.read_text()
  (step,) = re.findall(r"^stopped by SIGHUP after step (\d+), saved in", text, re.MULTILINE)
  assert train.complete("a")[-1] == int(step)
  assert f"<p class=text>stopped by SIGHUP after step {step}" in (train.output_dir / "a/report.html").read_text()


@pytest.mark.slow
def test_nohup_is_left_as_it_is(train):
  process = train.spawn("a", prefix=["nohup"], steps=100)
  train.wait_for(r"step +5 of", process)
  process.send_signal(signal.SIGHUP)
  assert process.wait(timeout=240) == 0, train.log.read_text()
  assert "SIGHUP" not in train.log.read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), slow(signal.SIGTERM, 42)])
def test_a_stop_does_not_wait_for_a_compilation(train, number, code):
  keys = {"num_decoder_layers": 200, "scan_layers": "false", "compilation_cache_dir": "null"}  # compiles for minutes
  process = train.start("a", **keys)
  train.wait_for("(?m)^run ", process)
  begin = time.monotonic()
  process.send_signal(number)
  assert process.wait(timeout=240) == code, train.log.read_text()
  assert time.monotonic() - begin < 45  # measured: 0.2 s; a compilation takes more than a minute
  text = train.log.read_text()
  assert re.search(rf"stopped by {number.name} before the first step.*\n\Z", text), text
  assert "error:" not in text
  assert not (train.output_dir / "a/run.lock").exists()
  # A stop by Ctrl-C does not count as a restart without progress.
  assert (train.output_dir / "a/restarts.json").exists() == (number != signal.SIGINT)


@pytest.mark.slow
def test_goodput_counts_a_killed_life_and_damaged_rows_are_told(train):
  run = train.output_dir / "a"
  process = train.start("a", steps=100_000, checkpoint_interval=20, max_to_keep=1)
  wait_for(lambda: train.complete("a") and rows(run, whole=False)[-1]["step"] > train.complete("a")[-1], process, "more rows")
  process.kill()
  process.wait()
  last = train.complete("a")[-1]
  again = [row["step_seconds"] for row in rows(run, whole=False) if row["step"] > last]
  first = json.loads((run / "goodput.json").read_text())["seconds"]
  with open(run / "metrics.jsonl", "ab") as file:
    file.write(b'{"step": 3, "lo\n\0\0\0\n')
  code, text = train.run("a", steps=last + 5)
  assert code == 0, text
  assert f"warning: {run}/metrics.jsonl: 2 damaged lines moved to metrics.dropped.jsonl" in text
  assert [row["step"] for row in rows(run)] == list(range(1, last + 6))
  found = json.loads((run / "goodput.json").read_text())
  assert found["lives"] == 2
  assert found["seconds"]["lost"] == pytest.approx(min(sum(again), first["steps"]), abs=0.002)
  assert found["seconds"]["compile"] > first["compile"] > 0
  assert f"<p class=facts>goodput {found['goodput']:.1%} of" in (run / "report.html").read_text()
  assert re.search(r"^time    .* over 2 starts$", text, re.MULTILINE), text
