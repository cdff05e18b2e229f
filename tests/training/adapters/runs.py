"""Settings and helpers for runs of a tiny model, with and without an adapter."""

import json
from pathlib import Path

from maxtext_like.cli.main import main

WORDS = ["max_target_length=16", "per_device_batch_size=2", "num_decoder_layers=2", "emb_dim=32", "mlp_dim=48"]
WORDS += ["inhomogeneous_layer_cycle_interval=1", "lr_schedule_type=constant", "warmup_steps_fraction=0"]
WORDS += ["dataset=text", "eval_fraction=0", "dtype=float32"]
LORA = ["lora_rank=3", "lora_alpha=6", "lora_modules=[all-linear]", "learning_rate=0.02", "checkpoint_interval=2"]
DORA = [*LORA, "lora_dora=true", "lora_dropout=0.2", "base_weights=int8"]


def train(place: Path, name: str, *words: str) -> int:
  settings = [f"output_dir={place}", f"run_name={name}", f"compilation_cache_dir={place}/cache"]
  settings.append(f"dataset_path={place}/text.txt")
  return main(["train", "gemma3-tiny", *WORDS, *settings, *words])


def losses(place: Path, name: str) -> list[float]:
  return [json.loads(line)["loss"] for line in (place / name / "metrics.jsonl").read_text().splitlines()]
