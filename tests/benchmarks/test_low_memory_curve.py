"""benchmarks/low_memory_curve.py: its comparison of loss curves, and a run that fails among others."""

import sys

import numpy as np
import pytest

from benchmarks import low_memory_curve
from benchmarks.low_memory_curve import Run, distances
from maxtext_like.errors import UserError


def test_each_is_compared_at_its_best_rate_seed_by_seed():
  ends = {
    Run("float32", 1e-4, 0): 2.0,
    Run("float32", 1e-4, 1): 4.0,
    Run("float32", 3e-4, 0): 1.0,
    Run("float32", 3e-4, 1): 9.0,  # mean 5, compared with 3 at the rate 1e-4
    Run("dynamic8", 1e-4, 0): 2.2,
    Run("dynamic8", 1e-4, 1): 9.0,
    Run("dynamic8", 3e-4, 0): 2.1,
    Run("dynamic8", 3e-4, 1): 4.4,
    Run("adafactor", 1e-4, 0): 1.0,
  }
  assert distances(ends) == [
    "dynamic8, at its best rate, 0.0003: +7.50% +- 2.50% of AdamW in float32, 2 seeds",
    "adafactor, at its best rate, 0.0001: -50.00% of AdamW in float32, 1 seeds",
  ]
  assert not distances({run: end for run, end in ends.items() if run.kind != "float32"})
  (alone,) = distances({Run("float32", 1e-4, 1): 4.0, Run("adafactor", 1e-4, 0): 1.0})
  assert "no seed" in alone


@pytest.mark.parametrize(("failing", "code"), [("adamw", 1), (None, 0)])
def test_a_run_that_fails_is_a_row(failing, code, monkeypatch, capsys):
  def curve(given, device):
    assert device in (0, 1)
    if failing and f"opt_type={failing}" in given and "gpu/one_h200.yml" in given:
      raise UserError("out of memory")
    return [*np.arange(200.0)], 1.0

  monkeypatch.setattr(low_memory_curve, "in_process", curve)
  words = ["gemma3-tiny", "--rates", "1e-3", "--seeds", "2", "--only", "float32", "adamw", "--devices", "2"]
  monkeypatch.setattr(sys, "argv", ["low_memory_curve.py", *words])
  assert low_memory_curve.main() == code
  out = capsys.readouterr().out
  assert out.count("| float32 | 0.001 |") == 2
  assert "| float32 | 0.001 | 1 | 189.5000 | 109.5000 | 1.00 | 0 |" in out
  assert out.count("out of memory") == 2 * code
