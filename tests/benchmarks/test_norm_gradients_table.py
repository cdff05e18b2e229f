"""benchmarks/norm_gradients.py prints its table on this machine, and rejects a kernel that cannot run here."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_its_table():
  words = ["benchmarks/norm_gradients.py", "--sizes", "6", "1024", "--kernels", "xla", "--dtype", "float32"]
  done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True)
  (row,) = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| given")]
  assert row[:3] == ["given", "6 x 1024", "xla"]
  beside, rate, alone, other = map(float, row[3:])
  moved = 6 * 1024 * 4 / 1e12
  for us, arrays, tbs in ((beside, 4, rate), (alone, 3, other)):
    assert abs(tbs - arrays * moved / us * 1e6) < 0.006


@pytest.mark.slow
def test_a_kernel_that_cannot_work_here_is_refused():
  words = ["benchmarks/norm_gradients.py", "--sizes", "6", "1000"]
  done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode != 0
  assert "norm_kernel=pallas_gpu cannot be used here" in done.stderr
