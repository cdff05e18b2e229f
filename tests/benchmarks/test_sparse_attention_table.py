"""benchmarks/sparse_attention.py prints its table on this machine. Tiles need less memory than all pairs at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import nightly, slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("forms", [slow(("whole", "gathered")), nightly(("whole", "masked", "gathered"))], ids=len)
def test_its_table(forms):
  words = ["benchmarks/sparse_attention.py", "--model", "deepseek3.2-tiny", "--length", "512", "--seconds", "0.3"]
  done = subprocess.run([sys.executable, *words, "--forms", *forms], cwd=ROOT, capture_output=True, text=True, check=True)
  rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| 512")]
  assert [row[:3] for row in rows] == [["512", "32", form] for form in forms]
  times, ratios, gib = (list(map(float, column)) for column in list(zip(*rows, strict=True))[3:])
  assert all(abs(ratio - time / times[0]) < 0.02 for time, ratio in zip(times, ratios, strict=True))
  assert max(gib[1:]) < gib[0]
