"""benchmarks/h200.py: its table of a tiny model on this machine, of transformers too where torch is."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.peer import starts
from benchmarks.step_cost import require_updates
from maxtext_like.config.files import configs_folder

ROOT = configs_folder().parent
TINY = ["gemma3-tiny", "num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1", "emb_dim=32", "mlp_dim=32"]
TINY += ["max_target_length=24", "vocab_size=64", "per_device_batch_size=2"]


def test_documents_begin_where_the_other_side_s_do():
  assert [starts(24, n) for n in (1, 2, 3)] == [[0], [0, 8], [0, 4, 12]]


def test_steps_that_left_their_update_out_are_no_training():
  step = lambda usual, skipped: {"usual": np.bool_(usual), "skipped": np.bool_(skipped)}
  require_updates([step(True, False)] * 3)
  with pytest.raises(RuntimeError, match="2 of 3 steps left their update out"):
    require_updates([step(True, False), step(False, True), step(True, True)])


@pytest.mark.slow
def test_the_table_of_both_sides(tmp_path):
  command = [sys.executable, str(ROOT / "benchmarks" / "h200.py"), "--steps=1", "--groups=2", f"--out={tmp_path}/rows.json"]
  done = subprocess.run(
    [*command, "--documents=3", "--model", *TINY], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
  )
  assert done.returncode == 0, done.stderr[-3000:]
  (row,) = [line for line in done.stdout.splitlines() if "| 3 documents |" in line]
  (found,) = json.loads((tmp_path / "rows.json").read_text())
  assert found["ours"]["tokens"] == 48
  assert found["ours"]["tokens_per_second"] > 0
  assert f"{found['ours']['tokens_per_second']:,.0f}" in row
  if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
    # Fresh weights of one model on random tokens: both losses are about the logarithm of the vocabulary.
    assert found["theirs"]["loss"] == pytest.approx(found["ours"]["loss"], rel=0.2)
    assert "attention sdpa" in found["theirs"]["kernels"]
  else:
    assert "failed: ModuleNotFoundError: No module named 'torch'" in row
