"""Every row of the table of known failures: the failing policy fails, and ours does not."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.failures import float16, hidden, masks, rounding, ties

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "known_failures.py"


def test_float16_mlp_saturates_and_ours_is_exact():
  numbers = float16.mlp_saturation().numbers
  assert numbers["bad_is_down"] == numbers["cause_is_product"] == 1
  assert numbers["finite"] == 1
  assert numbers["clamped"] == 0  # no number was clamped
  assert numbers["error"] < 2e-3


@pytest.mark.slow  # compiles three gradients
def test_float16_residual_overflows_backward():
  numbers = float16.residual_backward().numbers
  assert numbers["loss"] < 1e8
  assert numbers["their_finite"] < 0.5
  assert 0 <= numbers["largest"] < 15
  assert numbers["our_finite"] == 1
  assert numbers["error"] < 2e-3


def test_float16_vision_pooler():
  numbers = float16.vision_pooler().numbers
  assert numbers["their_finite"] == 0
  assert numbers["our_finite"] == 1
  assert numbers["error"] < 1e-3


def test_masks_that_are_added():
  numbers = masks.double_masks().numbers
  assert 0.3 < numbers["their_nan"] < 0.4  # two padded queries of six
  assert numbers["our_finite"] == 1


def test_a_query_that_sees_no_key():
  numbers = masks.fully_masked_row().numbers
  assert numbers["uniform_over_all"] < 1e-6
  assert numbers["infinite_nan"] == 1
  assert numbers["our_largest"] == 0


def test_indexer_recall():
  numbers = ties.indexer_ties().numbers
  assert numbers["their_recall"] < 0.999
  assert numbers["their_ties"] > 0.1
  assert numbers["our_recall"] == 1


def test_router_flips():
  numbers = ties.router_ties().numbers
  assert numbers["their_flips"] > 0.05
  assert numbers["our_flips"] == 0


def test_router_bias_accumulates():
  numbers = ties.router_bias().numbers
  assert numbers["theirs"] == 0
  assert numbers["ours"] == pytest.approx(numbers["intended"], rel=1e-3)


def test_a_hidden_nan_is_named():
  numbers = hidden.nan_to_num().numbers
  assert numbers["loss_finite"] == 1
  assert numbers["gradient_finite"] < 1
  assert numbers["masked"] == numbers["is_log"] == 1


def test_non_finite_updates_are_never_applied():
  numbers = hidden.apply_if_finite().numbers
  assert numbers["their_finite"] == 0
  assert numbers["our_kept"] == 1
  assert numbers["our_skipped"] == 5


@pytest.mark.slow  # tests/generation also tests the engine's error
def test_sampling_from_nan():
  numbers = hidden.sampling().numbers
  assert 0 <= numbers["token"] < 11
  assert numbers["flagged"] == numbers["raised"] == 1


def test_float8_casts():
  numbers = rounding.float8_casts().numbers
  assert numbers["e4m3_their_finite"] == 0
  assert numbers["e5m2_their_finite"] == 0.5
  assert numbers["e4m3_our_finite"] == numbers["e5m2_our_finite"] == 1


@pytest.mark.parametrize("row", [rounding.bfloat16_updates, rounding.e4m3_updates])
def test_updates_arrive(row):
  numbers = row().numbers
  assert numbers["theirs"] < 0.3
  assert numbers["ours"] == pytest.approx(1, abs=0.1)


def test_float16_weights_end_nearer():
  numbers = rounding.turning_updates().numbers
  assert numbers["theirs"] > 0.9
  assert numbers["float16"] < 0.3 < 0.8 < numbers["bfloat16"]


def test_every_row_is_in_the_table_and_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.syspath_prepend(str(BENCHMARK.parent))
  rows = runpy.run_path(str(BENCHMARK))["ROWS"]
  modules = (float16, masks, ties, hidden, rounding)
  assert [row.__name__ for row in rows] == [row.__name__ for module in modules for row in module.ROWS]


@pytest.mark.slow
def test_the_benchmark_prints_a_table():
  done = subprocess.run([sys.executable, str(BENCHMARK), "--only", "^float8"], capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert "| float8 casts of 500 and -1e5 | e4m3 [nan, nan], e5m2 [512.0, -inf] |" in done.stdout
  assert subprocess.run([sys.executable, str(BENCHMARK), "--only", "nothing"], capture_output=True, check=False).returncode == 2
