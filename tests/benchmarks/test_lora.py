"""benchmarks/lora.py prints its table for a tiny model on this machine, with peft and bitsandbytes if they are installed."""

import importlib.util
import json
import subprocess
import sys

import pytest

from benchmarks.lora import cells
from maxtext_like.config.files import configs_folder

ROOT = configs_folder().parent
TINY = ["num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1", "emb_dim=32", "mlp_dim=32"]
TINY += ["max_target_length=24", "vocab_size=64", "lora_rank=3"]


def test_a_row_says_what_the_other_side_did_not_do():
  ours = {"tokens_per_second": 30.0}
  theirs = {"tokens_per_second": 20.0, "peak_gib": 1.5, "maps": 4, "unquantized": ["gate_up_proj"], "without": ["a", "b"]}
  said = cells(ours, theirs)
  assert said.split()[:3] == ["20", "1.50", "1.50"]
  assert said.endswith("  gate_up_proj in bfloat16; 4 maps; nothing added to a, b")
  assert cells({"failed": "out of memory"}, theirs | {"unquantized": [], "without": []}).split() == ["20", "1.50", "-"]
  assert cells(ours, {"failed": "no module"}).split() == ["-", "-", "-", "no", "module"]


@pytest.mark.nightly
def test_the_table_of_both_sides(tmp_path):
  command = [sys.executable, str(ROOT / "benchmarks" / "lora.py"), "gemma3-tiny:nf4,fp8_block", "--steps=1", "--against=peft"]
  command += [f"--out={tmp_path}/rows.json", "--words", *TINY]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  _, nf4, fp8 = done.stdout.splitlines()
  found, without = json.loads((tmp_path / "rows.json").read_text())
  assert f"{found['tokens_per_second']:9.0f}" in nf4
  assert fp8.endswith("bitsandbytes has no such form")
  assert without["tokens_per_second"] > 0
  theirs = found["peft"]
  if all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft", "bitsandbytes")):
    # Both models are untrained and tokens are random, so both losses are about the logarithm of the vocabulary.
    assert theirs["loss"] == pytest.approx(found["losses"][-1], rel=0.2)
    # The layer has 7 linear maps, and each has an adapter.
    assert (theirs["maps"], theirs["without"], theirs["dtypes"]) == (7, [], ["float32"])
    assert theirs["trained"] == found["trained"]
  else:
    assert "No module named" in theirs["failed"]
    assert theirs["failed"] in nf4
