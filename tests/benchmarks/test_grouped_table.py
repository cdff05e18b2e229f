"""benchmarks/grouped.py: the loads of its groups, and its table on this machine."""

import subprocess
import sys

import pytest

from benchmarks.grouped import loads
from maxtext_like.config.files import configs_folder

ROOT = configs_folder().parent


def test_every_row_has_a_group():
  found = loads(96, 8)
  assert list(found) == ["even", "uneven", "one"]
  assert all(sizes.sum() == 96 for sizes in found.values())
  assert found["one"].max() == 96
  assert found["uneven"].max() > found["even"].max()


@pytest.mark.slow
def test_its_table():
  words = [
    "benchmarks/grouped.py",
    "--sizes",
    "96",
    "64",
    "32",
    "8",
    "--kernels",
    "tiles",
    "--dtype",
    "float32",
    "--seconds",
    "0.01",
  ]
  done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True)
  lines = done.stdout.splitlines()
  assert lines[2] == "asked for: 96 rows of 64, 8 groups of [64, 32]"
  rows = [line.split() for line in lines[4:]]
  assert [row[:2] for row in rows] == [["tiles", "even"], ["tiles", "uneven"], ["tiles", "one"], ["one", "matrix"]]
  useful = 2 * 96 * 64 * 32 / 1e12
  for row in rows[:3]:  # milliseconds are printed with three decimals
    ms, rate, both, three = map(float, row[-4:])
    assert abs(ms - useful / rate * 1e3) < 6e-4 + 1e-3 * ms
    assert abs(both - 3 * useful / three * 1e3) < 6e-4 + 1e-3 * both
