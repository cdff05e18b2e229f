"""With the extra ``parity`` (torch, transformers): weights that were trained and exported give equal logits in transformers."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxtext_like import load
from maxtext_like.api.forward import forward
from maxtext_like.cli.main import main
from maxtext_like.generation.engine import Prompts, generate
from maxtext_like.generation.sampling import Sampling
from tests.checkpoint.huggingface.test_tied import another_head, nothing_but_the_head, rewritten
from tests.generation.letters import copy_golden

torch = pytest.importorskip("torch", reason="needs the extra parity")
transformers = pytest.importorskip("transformers", reason="needs the extra parity")


@pytest.mark.slow
@pytest.mark.parametrize(
  "model",
  ["gemma3-tiny", "gemma4-e2b-tiny", "gemma4-moe-tiny", "deepseek3-tiny", "deepseek3.2-tiny", "qwen3-tiny", "qwen3-moe-tiny"],
)
def test_logits_of_a_trained_and_exported_model(model: str, tmp_path: Path):
  run = ["steps=3", f"output_dir={tmp_path}", "run_name=run", "max_target_length=64", "per_device_batch_size=2"]
  assert main(["train", model, *run, "dtype=float32", "learning_rate=1e-2", "enable_tensorboard=false"]) == 0
  exported = tmp_path / "exported"
  assert main(["export", str(tmp_path / "run"), "--out", str(exported), "--dtype", "float32"]) == 0
  # Rows are shorter than the indexer's top 32. Among keys with equal scores, which are often 0 with 4 heads, the
  # implementations select different ones.
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
  """Placeholder tokens without an image, video or sound are looked up as padding here and in transformers, both in a prompt and
  in an answer."""
  folder = copy_golden(case, tmp_path / "model")
  prompt, tokens = [2, 20, 9, 21, 33, 22, 7, 40], 14

  def mark(**ids: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {f"{name}_token_id": token for name, token in ids.items()}))

  def answers() -> tuple[list[int], list[int]]:
    model = load(folder, "dtype=float32", "matmul_precision=highest")
    ours = [
      token
      for rows in generate(
        model.model.decoder,
        model.params,
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
  ours = forward(folder, tmp_path / "in.npz", "dtype=float32").arrays
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


IDS = np.array([[2, 5, 9, 14, 33, 8, 7, 11, 12, 3, 5, 40, 41]])


def compare(folder: Path, tmp_path: Path) -> None:
  """Check that our logits of a checkpoint, and transformers' logits of its export, equal transformers' original logits."""
  np.savez(tmp_path / "in.npz", input_ids=IDS)
  with torch.no_grad():
    theirs = reference(folder)(input_ids=torch.tensor(IDS), use_cache=False).logits.numpy()
  ours = forward(folder, tmp_path / "in.npz", "dtype=float32").arrays
  np.testing.assert_allclose(ours["logits"], theirs, rtol=0, atol=1e-4 * max(1.0, np.abs(theirs).max()))
  assert main(["import", str(folder), "--out", str(tmp_path / "imported")]) == 0
  assert main(["export", str(tmp_path / "imported"), "--out", str(tmp_path / "exported"), "--dtype", "float32"]) == 0
  with torch.no_grad():
    again = reference(tmp_path / "exported")(input_ids=torch.tensor(IDS), use_cache=False).logits.numpy()
  np.testing.assert_allclose(again, theirs, rtol=0, atol=1e-5 * max(1.0, np.abs(theirs).max()))


@pytest.mark.slow
@pytest.mark.parametrize("change", [another_head, nothing_but_the_head])
@pytest.mark.parametrize("case", ["gemma3_text", "gemma3_vision", "gemma4_e2b"])
def test_heads_beside_and_instead_of_embeddings(case: str, change, tmp_path: Path):
  compare(rewritten(tmp_path / "model", case, change), tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # DeepSeek with 0 shared experts
@pytest.mark.parametrize(
  ("case", "change"),
  [
    ("gemma4_moe", {"num_experts": 1, "top_k_experts": 1}),
    ("deepseek3", {"n_shared_experts": 0}),
    ("deepseek3", {"norm_topk_prob": None, "rope_interleave": None, "original_max_position_embeddings": 64}),
    ("gemma4_dense", {"eos_token_id": [1, 5000], "bos_token_id": 5000}),
  ],
)
def test_what_is_unusual_and_valid(case: str, change: dict, tmp_path: Path):
  config = json.loads((copy_golden(case, tmp_path / "model") / "config.json").read_text())
  config.get("text_config", config).update(change)
  (tmp_path / "model" / "config.json").write_text(json.dumps(config))
  torch.manual_seed(0)
  made = transformers.AutoConfig.from_pretrained(tmp_path / "model")
  transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(tmp_path / "model")
  compare(tmp_path / "model", tmp_path)
