"""``generate --output`` is killed several times; the same command continues the job."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.generation.letters import copy_golden
from tests.processes import ROOT, environment

PROMPTS = 40


@pytest.mark.nightly
def test_a_killed_job_ends_with_the_answers_of_one_job(tmp_path: Path):
  folder = copy_golden("gemma3_text", tmp_path / "model", eos=[1, 4])
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text("".join(json.dumps({"prompt": "the fox " * (i % 5)}) + "\n" for i in range(1, PROMPTS + 1)))
  command = [sys.executable, "-m", "maxtext_like", "generate", "--checkpoint", str(folder), "--batch", str(prompts)]
  command += ["--slots", "2", "--max-tokens", "60", f"compilation_cache_dir={tmp_path}/cache", "dtype=float32", "--output"]

  def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []

  whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
  run = {"cwd": ROOT, "env": environment(), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
  assert subprocess.run([*command, str(whole)], **run, timeout=300, check=False).returncode == 0
  kills = 0
  for wanted in (1, 9, 17):
    process = subprocess.Popen([*command, str(parts)], **run)
    deadline = time.monotonic() + 200
    while len(lines(parts)) < wanted and process.poll() is None and time.monotonic() < deadline:
      time.sleep(0.002)
    if process.poll() is None:
      os.kill(process.pid, signal.SIGKILL)
      kills += 1
    process.wait()
  assert kills, "every job ended before it was killed"
  # Add an incomplete line, as a kill during a write leaves it.
  with open(parts, "ab") as file:
    file.write(lines(whole)[-1][:20])
  assert subprocess.run([*command, str(parts)], **run, timeout=300, check=False).returncode == 0
  assert sorted(lines(parts)) == sorted(lines(whole))
  assert len(lines(whole)) == PROMPTS
