"""With the extra ``parity`` (torch, transformers): weights trained here, exported, give transformers the same logits."""

from pathlib import Path

import numpy as np
import pytest

from maxtext_like.cli.main import main

torch = pytest.importorskip("torch", reason="needs the extra parity")
transformers = pytest.importorskip("transformers", reason="needs the extra parity")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma3-tiny", "gemma4-e2b-tiny", "gemma4-moe-tiny", "deepseek3-tiny", "deepseek3.2-tiny"])
def test_logits_of_a_trained_and_exported_model(model: str, tmp_path: Path):
  run = ["steps=3", f"output_dir={tmp_path}", "run_name=run", "max_target_length=64", "per_device_batch_size=2"]
  assert main(["train", model, *run, "dtype=float32", "learning_rate=1e-2", "enable_tensorboard=false"]) == 0
  exported = tmp_path / "exported"
  assert main(["export", str(tmp_path / "run"), "--out", str(exported), "--dtype", "float32"]) == 0
  # Not longer than the indexer's top 32: of keys with equal scores (all relus 0, often so with 4 heads) each side picks others.
  ids = np.random.default_rng(0).integers(1, 256, (2, 30))
  np.savez(tmp_path / "in.npz", input_ids=ids)
  words = ["--checkpoint", str(exported), "--inputs", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")]
  assert main(["forward", *words, "dtype=float32"]) == 0
  theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager")
  with torch.no_grad():
    logits = theirs(input_ids=torch.tensor(ids), use_cache=False).logits.numpy()
  with np.load(tmp_path / "out.npz") as file:
    np.testing.assert_allclose(file["logits"], logits, rtol=0, atol=1e-4 * max(1.0, np.abs(logits).max()))
