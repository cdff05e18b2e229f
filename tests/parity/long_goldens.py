#!/usr/bin/env python3
"""Makes tests/golden/long: transformers' results for rows longer than one tile of attention (512 queries).

  python tests/parity/long_goldens.py        (needs the extra parity; replaces the folder)

Each case is one checkpoint and several runs: with sliding windows near the edges of tiles (512) and of lanes (128), padding
on the left and on the right, and packed documents that end at the edges of tiles. The outputs of each run are

  fp32.RUN.logits   [P, V]  at the positions ``positions`` of inputs.npz, most of them near an edge
  fp32.RUN.probe    [T]     the last hidden state of every position, projected on ``probe`` of inputs.npz
  fp32.RUN.loss             over labels near the edges only: so few that one wrong key changes it visibly
  fp32.RUN.grad.*           of some weights, in the runs that meta.json names

Do not compare positions that are padding. meta.json has the versions, the runs with their windows, and the largest change of
the results of each run when every weight changes by a rounding error.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tests.models.test_golden_long import arrays_of
from tests.parity import reference
from tests.parity.draw import IGNORED, Case, Config
from tests.parity.modules import torch, transformers

OUT = Path(__file__).resolve().parents[1] / "golden" / "long"
LENGTH = 1100  # two tiles and a part
STEADY = 3e-5  # largest accepted change by rounding: a third of the tolerance of the goldens
NEAR = (0, 128, 511, 512, 513, 600, 640, 1023, 1024, 1025, 1099)
GEMMA: Config = {
  "vocab_size": 32,
  "hidden_size": 16,
  "intermediate_size": 16,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "max_position_embeddings": 2048,
  "layer_types": ["sliding_attention", "full_attention"],
  "num_hidden_layers": 2,
  "sliding_window": 512,
}
GEMMA4: Config = GEMMA | {
  "model_type": "gemma4_text",
  "global_head_dim": 12,
  "hidden_size_per_layer_input": 0,
  "final_logit_softcapping": 30.0,
}
DEEPSEEK: Config = {
  "vocab_size": 32,
  "hidden_size": 16,
  "intermediate_size": 16,
  "moe_intermediate_size": 8,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "num_key_value_heads": 2,
  "n_routed_experts": 4,
  "n_shared_experts": 1,
  "n_group": 2,
  "topk_group": 1,
  "num_experts_per_tok": 2,
  "first_k_dense_replace": 1,
  "q_lora_rank": 12,
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 8,
  "qk_rope_head_dim": 4,
  "v_head_dim": 6,
  "max_position_embeddings": 4096,
  "rope_theta": 10000.0,
  "rope_scaling": {
    "type": "yarn",
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 512,
  },
}
MODELS: dict[str, Config] = {
  "gemma3": GEMMA
  | {
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 8,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
  },
  "gemma4": GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
  "gemma4_shared": GEMMA4
  | {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "head_dim": 4,
    "global_head_dim": 4,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 16,  # wide enough that its norm does not magnify rounding errors
    "vocab_size_per_layer_input": 32,
  },
  "deepseek3": {"model_type": "deepseek_v3", **DEEPSEEK},
  "deepseek32": {"model_type": "deepseek_v32", **DEEPSEEK, "index_n_heads": 16, "index_head_dim": 8, "index_topk": 8},
}
# The sliding windows of each case's runs. Models that are not listed have no sliding window.
WINDOWS = {"gemma3": (127, 128, 129, 130, 511, 512, 513, 640), "gemma4": (129, 512, 513), "gemma4_shared": (129, 513)}
ROWS = ("left", "right", "packed")


def main() -> None:
  for seed, name in enumerate(MODELS):
    for salt in range(20):
      moved = make(name, seed, salt)
      if moved <= STEADY:
        break
    else:
      raise RuntimeError(f"{name}: no weights found whose results rounding moves by less than {STEADY}")
    size = sum(file.stat().st_size for file in (OUT / name).rglob("*") if file.is_file())
    print(f"{name}: {size // 1024} KB; rounding moves results by at most {moved:.1g}; weights {salt}", flush=True)


def make(name: str, seed: int, salt: int) -> float:
  """Writes a case. Returns the largest change of its results when every weight changes by a rounding error.

  Returns early, without the outputs, if a run changes by more than ``STEADY``.
  """
  folder = OUT / name
  shutil.rmtree(folder, ignore_errors=True)
  (folder / "checkpoint").mkdir(parents=True)
  case = Case(family=name, seed=seed, config=MODELS[name], stored="bfloat16", length=LENGTH, rows=1, salt=salt)
  reference.make(case, folder / "checkpoint")
  inputs = make_inputs(np.random.default_rng(seed), MODELS[name]["hidden_size"])
  runs, moved, outputs = make_runs(name), {}, {}
  for run, about in runs.items():
    model, arrays = with_window(folder / "checkpoint", about["window"]), arrays_of(inputs, about["rows"])
    found = reference.run(model, arrays, gradients=about["gradients"])
    seen = arrays.get("attention_mask", np.ones((1, LENGTH)))[0] == 1
    moved[run] = max(
      float(np.abs(other[key] - found[key])[0, seen].max())
      for other in (reference.nudged(model, arrays, size=1e-7, seed=n, gradients=False) for n in range(2))
      for key in ("logits", "hidden.final_norm")
    )
    if moved[run] > STEADY:
      return moved[run]
    outputs |= {f"fp32.{run}.{key}": value for key, value in stored(found, inputs, about["gradients"]).items()}
  np.savez_compressed(folder / "inputs.npz", allow_pickle=False, **inputs)
  np.savez_compressed(folder / "outputs.npz", allow_pickle=False, **outputs)
  versions = {"torch": torch.__version__, "transformers": transformers.__version__}
  meta = {"made_by": "tests/parity/long_goldens.py", **versions, "runs": runs, "moved_by_rounding": moved}
  (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
  return max(moved.values())


def make_inputs(rng: np.random.Generator, width: int) -> dict[str, np.ndarray]:
  """Returns the arrays that all runs of a case share. ``width`` is the size of the hidden states."""
  ids = rng.integers(1, 32, (1, LENGTH))
  near = np.unique(np.clip([n + d for n in NEAR for d in (-1, 0, 1)], 0, LENGTH - 1))
  labels = np.full((1, LENGTH), IGNORED)
  labels[:, near] = ids[:, near]
  left, right = np.ones((1, LENGTH), np.int64), np.ones((1, LENGTH), np.int64)
  left[:, :530] = 0  # more than a tile
  right[:, 1060:] = 0
  edges = (100, 511, 513, 1024)
  packed = np.concatenate([np.arange(b - a) for a, b in zip((0, *edges), (*edges, LENGTH), strict=True)])[None]
  return {
    "input_ids": ids,
    "labels": labels,
    "left_attention_mask": left,
    "right_attention_mask": right,
    "packed_position_ids": packed,
    "positions": near,
    "probe": rng.standard_normal(width).astype(np.float32) / 4,
  }


def make_runs(name: str) -> dict[str, dict]:
  """Returns the window, the kind of rows and whether gradients are stored, for every run of a case."""
  windows = WINDOWS.get(name, ())
  runs: dict[str, dict] = {f"w{window}": {"window": window, "rows": "plain", "gradients": window == 513} for window in windows}
  if not windows:
    runs["base"] = {"window": None, "rows": "plain", "gradients": True}
  for rows in ROWS:
    runs[rows] = {"window": 513 if windows else None, "rows": rows, "gradients": rows == "packed"}
  return runs


def with_window(checkpoint: Path, window: int | None):
  """Loads a checkpoint with transformers, with another sliding window unless ``window`` is None."""
  if window is None:
    return reference.load(checkpoint)
  with tempfile.TemporaryDirectory() as folder:
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text()) | {"sliding_window": window}
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return reference.load(Path(folder))


def stored(found: dict[str, np.ndarray], inputs: dict[str, np.ndarray], gradients: bool) -> dict[str, np.ndarray]:
  """Returns the outputs of a run that are stored."""
  kept = {
    "logits": found["logits"][0, inputs["positions"]],
    "probe": found["hidden.final_norm"][0] @ inputs["probe"].astype(np.float64),
    "loss": found["loss"],
  }
  if gradients:
    kept |= {name: found[name] for name in found if name.startswith("grad.") and ("attn" in name or "embed_tokens" in name)}
  return {name: array.astype(np.float32) for name, array in kept.items()}


if __name__ == "__main__":
  main()
