"""With the extra ``parity`` (torch, transformers): weights trained here, exported, give transformers the same logits."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxtext_like.cli.forward import forward
from maxtext_like.cli.generate_model import open_model
from maxtext_like.cli.main import main
from maxtext_like.generation.engine import Prompts, generate
from maxtext_like.generation.sampling import Sampling
from tests.generation.letters import copy_golden

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


def reference(folder: Path):
  return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma4_e2b", "gemma4_moe"])
def test_tokens_of_images_video_and_sound_without_any(case: str, tmp_path: Path):
  """In a prompt, and given by the model itself, they are looked up as padding, there and here."""
  folder = copy_golden(case, tmp_path / "model")
  prompt, tokens = [2, 20, 9, 21, 33, 22, 7, 40], 14

  def mark(**ids: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {f"{name}_token_id": token for name, token in ids.items()}))

  def answers() -> tuple[list[int], list[int]]:
    model = open_model(folder, ["dtype=float32", "matmul_precision=highest"])
    ours = [
      token
      for rows in generate(
        model.program.decoder,
        model.params(),
        Prompts([prompt]),
        max_tokens=tokens,
        stop=frozenset(),
        sampling=Sampling(temperature=0.0),
      )
      for token in rows[0]
    ]
    with torch.no_grad():
      made = reference(folder).generate(
        input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=[]
      )
    return ours, made[0, len(prompt) :].tolist()

  mark(image=20, video=21, audio=22)
  np.savez(tmp_path / "in.npz", input_ids=np.array([prompt]))
  ours, _ = forward(folder, tmp_path / "in.npz", ["dtype=float32"])
  with torch.no_grad():
    theirs = reference(folder)(input_ids=torch.tensor([prompt])).logits.numpy()
  np.testing.assert_allclose(ours["logits"], theirs, rtol=0, atol=1e-4)
  free, expected = answers()
  assert free == expected
  given = next(token for token in free if token not in (0, *prompt))
  mark(image=20, video=given, audio=22)
  marked, expected = answers()
  assert marked == expected
  assert marked != free
