"""benchmarks/h200.py prints its table for a tiny model on this machine, with transformers if torch is installed."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.h200 import COMMON, ROWS
from benchmarks.peer import ask, starts, write_config
from benchmarks.step_cost import require_updates
from maxtext_like.config.files import configs_folder
from maxtext_like.config.load import load_config
from maxtext_like.layers.param import count
from maxtext_like.models.build import build_decoder, precision_of

ROOT = configs_folder().parent
TINY = ["gemma3-tiny", "num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1", "emb_dim=32", "mlp_dim=32"]
TINY += ["max_target_length=24", "vocab_size=64", "per_device_batch_size=2"]
LAYER = next(row for row in ROWS if row.name == "deepseek3-layer")
SMALL = ["emb_dim=64", "moe_mlp_dim=32", "num_experts=16", "num_query_heads=4", "num_kv_heads=4", "q_lora_rank=48"]
SMALL += ["kv_lora_rank=32", "qk_nope_head_dim=16", "qk_rope_head_dim=16", "v_head_dim=24", "max_target_length=64"]


def test_documents_begin_where_the_other_side_s_do():
  assert [starts(24, n) for n in (1, 2, 3)] == [[0], [0, 8], [0, 4, 12]]


def test_steps_that_left_their_update_out_are_no_training():
  step = lambda decided, skipped: {"decided": np.bool_(decided), "skipped": np.bool_(skipped)}
  require_updates([step(True, False)] * 3)
  with pytest.raises(RuntimeError, match="2 of 3 steps left their update out"):
    require_updates([step(True, False), step(False, True), step(True, True)])


def test_the_layer_of_deepseek_has_the_released_width():
  config = load_config(LAYER.model, [*COMMON, *LAYER.words]).config
  (layer,) = build_decoder(config.model, precision_of(config.precision)).layers
  experts = layer.cfg.ffn.experts
  assert experts is not None
  assert (experts.emb_dim, experts.mlp_dim, experts.num_experts, experts.num_experts_per_tok) == (7168, 2048, 256, 8)
  assert count(layer.params()) == 11_507_286_272
  assert (config.precision.weight_dtype, config.precision.dtype) == ("bfloat16", "bfloat16")
  assert (config.training.opt_type, config.training.sgd_momentum) == ("sgd", 0)


@pytest.mark.slow
def test_the_layer_of_deepseek_beside_transformers_grouped_mm(tmp_path):
  for name in ("torch", "transformers"):
    pytest.importorskip(name, reason="needs the extra parity")
  command = [sys.executable, str(ROOT / "benchmarks" / "h200.py"), "--only", LAYER.name, "--documents=1", "--steps=1"]
  command += ["--groups=1", f"--out={tmp_path}/rows.json", "--words", *SMALL]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  (found,) = json.loads((tmp_path / "rows.json").read_text())
  ours, theirs = found["ours"], found["theirs"]
  assert ours["tokens"] == theirs["tokens"] == 64
  # Both sides draw weights from the same distribution. Logits have variance 1, so both losses are a little above the
  # logarithm of the vocabulary, 6.93.
  assert theirs["loss"] == pytest.approx(ours["loss"], rel=0.1)
  assert 1 <= theirs["fullest"] <= 16 / 2  # each token selects 8 of 16
  assert {"attention sdpa", "experts grouped_mm", "eager"} <= {*theirs["kernels"]}
  # The experts have two products. Each has two more, for the gradients of its operands.
  assert any(said.startswith("a step has 6 aten::_grouped_mm ") for said in theirs["kernels"])
  assert f", bfloat16 weights, plain SGD (eager) | one document | {ours['tokens_per_second']:,.0f} |" in done.stdout


@pytest.mark.slow
def test_a_side_of_transformers_without_grouped_mm_is_refused(tmp_path):
  for name in ("torch", "transformers"):
    pytest.importorskip(name, reason="needs the extra parity")
  write_config(load_config(LAYER.model, [*COMMON, *LAYER.words, *SMALL]).config.model, "bfloat16", str(tmp_path))
  given = {"directory": str(tmp_path), "shape": [1, 8], "documents": 1, "steps": 1, "groups": 1, "compiled": False}
  given |= {"weight_dtype": "bfloat16", "optimizer": "sgd", "clip": 0.0}
  found = ask(sys.executable, "all_weights", given | {"experts": "eager"})
  assert "RuntimeError: a step was to have grouped_mm for its 16 experts and had {}" in found["failed"]


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
    # Both models are untrained and tokens are random, so both losses are about the logarithm of the vocabulary.
    assert found["theirs"]["loss"] == pytest.approx(found["ours"]["loss"], rel=0.2)
    assert "attention sdpa" in found["theirs"]["kernels"]
  else:
    assert "failed: ModuleNotFoundError: No module named 'torch'" in row
