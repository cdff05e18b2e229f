"""Benchmarks that a CPU runs in seconds, and that no other test runs, print their tables."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import nightly, slow

ROOT = Path(__file__).parents[2]
TINY = ["qwen3-tiny", "num_decoder_layers=1", "max_target_length=16"]


@pytest.mark.parametrize(
  ("name", "words", "rows"),
  [
    slow("loss_chunks", [*TINY, "vocab_size=512", "num_vocab_tiling=4", "--steps=1"], 3),
    nightly("packed_data", ["1"], 3),
    slow("step_cost", [*TINY, "--against", "numerics", "--steps=2"], 1),
    nightly("float8", [], 6),
    slow("generation", ["--cases", "tiny"], 1),
    slow("loading", ["qwen3-tiny", "--no-steps"], 8),
    nightly("moments", [*TINY, "steps=20"], 3),
    slow("precision_flags", ["--length=64"], 12),
    slow("xray", TINY, 2),
  ],
)
def test_it_prints_its_rows(name, words, rows):
  command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *words]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-2000:]
  numbers = [line for line in done.stdout.splitlines() if any(c.isdigit() for c in line)]
  assert len(numbers) >= rows, done.stdout
  assert not re.search(r"\bnan\b", done.stdout)
