"""Runs every recipe on this device: a few steps of real models at reduced depth, from random weights.

  python benchmarks/recipes.py [--seconds 270] [--steps 12] [--length 1024] [--models NAME ...] [--recipes NAME ...]
  python benchmarks/recipes.py --workers 6        6 runs at a time; speeds are not printed, because the runs share the device

Prints a row for each run: the first and the last loss or the reason of a failure, tokens per second, and the peak memory of the
device. The speed is the median of all steps except the first two, because a single step of a few ms may have waited for the
host. No run starts after --seconds. Runs that share the device allocate memory as they need it. A run that fails while others
run is repeated alone at the end.
Exits with 1 if a run failed. On a CPU: --models gemma3-tiny --length 128.
"""

import argparse
import concurrent.futures
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("lora", "qlora", "full", "pretraining")
# Keys that make a model fit on one device with an optimizer in float32: full width, and one or two groups of layers.
MODELS: dict[str, tuple[str, ...]] = {
  "gemma3-4b": ("num_decoder_layers=6",),
  "gemma4-e2b": ("num_decoder_layers=10", "num_kv_shared_layers=5"),
  "gemma4-31b": ("num_decoder_layers=6",),
  "qwen3-0.6b": ("num_decoder_layers=6",),
  "gemma4-26b": ("num_decoder_layers=6",),
  "qwen3-30b-a3b": ("num_decoder_layers=4",),
  "gemma3-12b": ("num_decoder_layers=6",),
  "gemma3-27b": ("num_decoder_layers=6",),
  "gemma4-e4b": ("num_decoder_layers=12", "num_kv_shared_layers=6"),
  "qwen3-8b": ("num_decoder_layers=6",),
  "deepseek3-671b": ("num_decoder_layers=4", "num_experts=16", "n_routing_groups=8"),
  "deepseek3.2-671b": ("num_decoder_layers=4", "num_experts=16", "n_routing_groups=8"),
}


@dataclass(frozen=True)
class Runs:
  """Settings of all runs.

  Attributes:
    steps, length: updates of a run, and tokens of a row.
    out: output directory of the runs.
    until: time in seconds of ``time.monotonic`` after which no run starts.
  """

  steps: int
  length: int
  out: str
  until: float

  def row(self, model: str, recipe: str, *, alone: bool) -> tuple[str, bool | None]:
    """Returns a row of the table, and whether the run succeeded; None if it was not started.

    Args:
      model, recipe: the model and the recipe of the run.
      alone: True if no other run uses the device. The run may then allocate all memory at once, and its speed is printed.
    """
    if time.monotonic() > self.until:
      return f"| {model} | {recipe} | not begun: the time is over | | | |", None
    name = f"{model}-{recipe}"
    keys = [
      f"steps={self.steps}",
      f"max_target_length={self.length}",
      "gradient_accumulation_steps=1",
      "eval_interval=0",
      "keep_best=false",
    ]
    keys += [f"output_dir={self.out}", f"run_name={name}", "resume=false", "enable_checkpointing=false"]
    keys += ["dataset_documents_max=200"]
    words = [sys.executable, "train.py", model, f"recipes/{recipe}.yml", *MODELS.get(model, ()), *keys]
    shared = {} if alone else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ | shared)
    if done.returncode:
      return f"| {model} | {recipe} | exit code {done.returncode}: {reason(done.stderr)} | | | |", False
    rows = [json.loads(line) for line in (Path(self.out) / name / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[0], rows[-1]
    peak = last.get("memory_peak_gb")
    memory = "-" if peak is None else f"{peak:.1f} GB"
    speed = f"{statistics.median(row['tokens_per_second'] for row in rows[2:] or rows):,.0f}" if alone else "-"
    return f"| {model} | {recipe} | {first['loss']:.3f} | {last['loss']:.3f} | {speed} | {memory} |", True


def reason(stderr: str) -> str:
  """Returns the line of the output that says why a run failed: the first error, or the last line if there is none."""
  lines = [line.strip() for line in stderr.splitlines() if line.strip()]
  return next((line for line in lines if re.match(r"[\w.]*error\b", line, re.IGNORECASE)), lines[-1] if lines else "-")[:160]


def main() -> int:
  """Prints the table."""
  parser = argparse.ArgumentParser(description="A few steps of every recipe over real models at reduced depth.")
  parser.add_argument("--seconds", type=float, default=270)
  parser.add_argument("--steps", type=int, default=12)
  parser.add_argument("--length", type=int, default=1024)
  parser.add_argument("--models", nargs="*", default=list(MODELS))
  parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=RECIPES)
  parser.add_argument("--workers", type=int, default=1, help="runs at a time")
  options = parser.parse_args()
  # Every model runs with one recipe before any model runs with a second one, so that all recipes and models come early.
  turns = [[(m, RECIPES[(i + turn) % len(RECIPES)]) for i, m in enumerate(options.models)] for turn in range(len(RECIPES))]
  cells = [(model, recipe) for turn in turns for model, recipe in turn if recipe in options.recipes]
  alone, again, well = options.workers == 1, [], True
  print("| model | recipe | first loss | last loss | tokens/s | memory |\n|---|---|---|---|---|---|", flush=True)
  with tempfile.TemporaryDirectory() as out:
    runs = Runs(options.steps, options.length, out, time.monotonic() + options.seconds)
    pool = concurrent.futures.ThreadPoolExecutor(options.workers)
    try:
      begun = {pool.submit(runs.row, *cell, alone=alone): cell for cell in cells}
      for done in concurrent.futures.as_completed(begun):
        row, ended_well = done.result()
        if ended_well is False and not alone:
          again.append((begun[done], row))
        else:
          print(row, flush=True)
          well = well and ended_well is not False
    finally:
      pool.shutdown(cancel_futures=True)
    for cell, first in again:
      row, ended_well = runs.row(*cell, alone=True)
      print(first if ended_well is None else row, flush=True)
      well = well and ended_well is True
  return 0 if well else 1


if __name__ == "__main__":
  sys.exit(main())
