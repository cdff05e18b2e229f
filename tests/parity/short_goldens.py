#!/usr/bin/env python3
"""Makes the golden cases of Qwen3, tests/golden/qwen3 and qwen3_moe: transformers' results for tiny random models.

  python tests/parity/short_goldens.py        (needs the extra parity; replaces the folders)

All sizes are different. Every run (base; rpad: padding on the right; packed: documents separated by positions; longpos:
positions far above 0) has fp32.RUN.logits and loss. The other outputs are

  fp32.base.hidden.*           embedding, every layer, last norm
  fp32.base.router.layerNN.*   softmax scores, chosen experts and their weights
  fp32.base.rope.inv_freq      the rotary table
  fp32.base.grad.*             of some weights, and grad_global_norm of all
  bf16.base.*, fp16.base.*     the same in 16 bits: logits, loss, first and last hidden state, chosen experts
  greedy                       [B, N] tokens after the first ``PROMPT`` of each row

meta.json has the versions and the smallest margins of choices (experts, greedy tokens).
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tests.parity import reference
from tests.parity.draw import IGNORED, Case, Config
from tests.parity.modules import torch, transformers

OUT = Path(__file__).resolve().parents[1] / "golden"
ROWS, LENGTH, PROMPT, GREEDY = 2, 26, 9, 14
RUNS = ("base", "rpad", "packed", "longpos")
MARGIN = 2e-3  # smallest accepted margin of a choice, far above float32's rounding errors
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DENSE: Config = {
  "architectures": ["Qwen3ForCausalLM"],
  "model_type": "qwen3",
  "attention_bias": False,
  "bos_token_id": 2,
  "eos_token_id": 1,
  "head_dim": 12,
  "hidden_act": "silu",
  "hidden_size": 40,
  "intermediate_size": 56,
  "max_position_embeddings": 40960,
  "num_attention_heads": 6,
  "num_hidden_layers": 3,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-6,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": None,
  "tie_word_embeddings": True,
  "torch_dtype": "bfloat16",
  "use_sliding_window": False,
  "vocab_size": 144,
}
MODELS: dict[str, Config] = {
  "qwen3": DENSE,
  "qwen3_moe": DENSE
  | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": False,
  },
}
GRADIENTS = (
  *("embed_tokens", "layers.0.self_attn.q_proj", "layers.0.input_layernorm", "layers.1.self_attn.q_norm"),
  *("layers.1.self_attn.k_norm", "layers.1.self_attn.k_proj", "layers.1.self_attn.o_proj", "layers.2.post_attention_layernorm"),
  *("layers.2.mlp.gate_proj", "layers.2.mlp.gate.weight", "layers.2.mlp.experts.gate_up_proj", "model.norm", "lm_head"),
)


def main() -> None:
  for seed, name in enumerate(MODELS):
    for salt in range(50):
      margins = make(name, seed, salt)
      if min(margins.values()) >= MARGIN:
        break
    else:
      raise RuntimeError(f"{name}: no weights found whose choices are further apart than {MARGIN}")
    size = sum(file.stat().st_size for file in (OUT / name).rglob("*") if file.is_file())
    print(f"{name}: {size // 1024} KB; {margins}; weights {salt}", flush=True)


def make(name: str, seed: int, salt: int) -> dict[str, float]:
  """Writes a case and returns the smallest margins of its choices."""
  folder = OUT / name
  shutil.rmtree(folder, ignore_errors=True)
  (folder / "checkpoint").mkdir(parents=True)
  case = Case(family=name, seed=seed, config=MODELS[name], stored="bfloat16", length=LENGTH, rows=ROWS, salt=salt)
  model = reference.make(case, folder / "checkpoint")
  inputs = make_inputs(np.random.default_rng(seed))
  margins: dict[str, float] = {}
  outputs: dict[str, np.ndarray] = {"fp32.base.rope.inv_freq": model.model.rotary_emb.inv_freq.numpy()}
  for run in RUNS:
    with routing(model) as routed:
      found = reference.run(model, arrays_of(inputs, run), gradients=run == "base")
    kept = {"logits": found["logits"], "loss": found["loss"]}
    if run == "base":
      kept |= {key: value for key, value in found.items() if key.startswith("hidden.")} | router_arrays(routed)
      gradients = {key: value for key, value in found.items() if key.startswith("grad.")}
      kept |= {key: value for key, value in gradients.items() if any(part in key for part in GRADIENTS)}
      kept["grad_global_norm"] = np.sqrt(sum(np.square(value).sum() for value in gradients.values()))
    margins |= {f"{run}.layer{i}": expert_margin(scores, k) for i, (scores, k) in enumerate(choices(routed))}
    outputs |= {f"fp32.{run}.{key}": value for key, value in kept.items()}
  outputs["greedy"], margins["greedy"] = greedy(model, inputs["input_ids"])
  for short, dtype in DTYPES.items():
    with routing(model.to(dtype)) as routed:
      found = reference.run(model, arrays_of(inputs, "base"), gradients=False)
    kept = {key: found[key] for key in ("logits", "loss", "hidden.embed", "hidden.final_norm")}
    kept |= {key: value for key, value in router_arrays(routed).items() if key.endswith("topk_idx")}
    outputs |= {f"{short}.base.{key}": value for key, value in kept.items()}
  np.savez_compressed(folder / "inputs.npz", allow_pickle=False, **inputs)
  narrow = {key: value.astype(np.int32 if value.dtype.kind == "i" else np.float32) for key, value in outputs.items()}
  np.savez_compressed(folder / "outputs.npz", allow_pickle=False, **narrow)
  with tempfile.TemporaryDirectory() as saved:
    reference.load(folder / "checkpoint").save_pretrained(saved)
    shutil.copyfile(Path(saved) / "config.json", folder / "config_as_saved_by_transformers.json")
  versions = {"torch": torch.__version__, "transformers": transformers.__version__}
  meta = {"made_by": "tests/parity/short_goldens.py", **versions, "runs": RUNS, "margins": margins, "prompt": PROMPT}
  (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
  return margins


def make_inputs(rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Returns the arrays that all runs of a case share."""
  ids = rng.integers(3, 144, (ROWS, LENGTH))
  labels = ids.copy()
  labels[0, [3, 23]] = labels[1, 12] = IGNORED
  mask, segments, positions = np.ones_like(ids), np.ones_like(ids), np.zeros_like(ids)
  mask[1, 21:] = 0
  for row, ends in enumerate(((7, 15), (8, 16))):
    for number, (start, end) in enumerate(zip((0, *ends), (*ends, LENGTH), strict=True)):
      segments[row, start:end], positions[row, start:end] = number + 1, np.arange(end - start)
  return {
    "input_ids": ids,
    "labels": labels,
    "rpad_attention_mask": mask,
    "packed_position_ids": positions,
    "packed_segment_ids": segments,
    "longpos_position_ids": np.arange(LENGTH)[None] + np.array([[1000], [30000]]),
  }


def arrays_of(inputs: dict[str, np.ndarray], run: str) -> dict[str, np.ndarray]:
  """Returns the model's inputs in a run. tests.models.test_golden makes the same inputs for our model."""
  arrays, labels = {"input_ids": inputs["input_ids"]}, inputs["labels"].copy()
  if run == "rpad":
    arrays["attention_mask"] = inputs["rpad_attention_mask"]
    labels[arrays["attention_mask"] == 0] = IGNORED
  if run in ("packed", "longpos"):
    arrays["position_ids"] = inputs[f"{run}_position_ids"]
  if run == "packed":
    labels[:, 1:][np.diff(inputs["packed_segment_ids"], axis=1) != 0] = IGNORED
  return arrays | {"labels": labels}


@contextlib.contextmanager
def routing(model: Any) -> Iterator[dict[int, tuple[Any, Any, Any]]]:
  """Records (logits, weights, experts) of every layer with experts during a forward pass."""
  found: dict[int, tuple[Any, Any, Any]] = {}
  gates = {i: layer.mlp.gate for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
  handles = [gate.register_forward_hook(lambda _, __, out, i=i: found.update({i: out})) for i, gate in gates.items()]
  try:
    yield found
  finally:
    for handle in handles:
      handle.remove()


def router_arrays(routed: dict[int, tuple[Any, Any, Any]]) -> dict[str, np.ndarray]:
  """Returns the router's outputs under the names of ``maxtext-like forward``."""
  found = {}
  for i, (logits, weights, experts) in routed.items():
    values = {"scores": torch.softmax(logits.float(), -1), "topk_weights": weights.float(), "topk_idx": experts}
    found |= {f"router.layer{i:02}.{key}": value.detach().numpy() for key, value in values.items()}
  return found


def choices(routed: dict[int, tuple[Any, Any, Any]]) -> list[tuple[np.ndarray, int]]:
  """Returns (logits, number of chosen experts) of every layer with experts."""
  return [(logits.detach().numpy(), experts.shape[-1]) for logits, _, experts in routed.values()]


def expert_margin(logits: np.ndarray, chosen: int) -> float:
  """Returns the smallest difference between the logits of the last chosen expert and of the next one."""
  ordered = -np.sort(-logits, axis=-1)
  return float((ordered[..., chosen - 1] - ordered[..., chosen]).min())


def greedy(model: Any, ids: np.ndarray) -> tuple[np.ndarray, float]:
  """Returns the greedy tokens after each prompt, and the smallest difference between the two largest logits."""
  prompt = torch.tensor(ids[:, :PROMPT])
  with torch.no_grad():
    made = model.generate(
      input_ids=prompt,
      attention_mask=torch.ones_like(prompt),
      do_sample=False,
      max_new_tokens=GREEDY,
      min_new_tokens=GREEDY,
      eos_token_id=[],
      pad_token_id=0,
    )
    logits = model(input_ids=made, use_cache=False).logits[:, PROMPT - 1 : -1].numpy()
  ordered = np.sort(logits, axis=-1)
  return made[:, PROMPT:].numpy(), float((ordered[..., -1] - ordered[..., -2]).min())


if __name__ == "__main__":
  main()
