"""Compares loss curves of low-memory training with AdamW in float32 on the same data, each at its best learning rate.

  python benchmarks/low_memory_curve.py gemma3-4b per_device_batch_size=2 max_target_length=4096 num_vocab_tiling=8 \
    --rates 1e-4 2e-4 --seeds 4 --devices 4                                         four GPUs, one run on each at a time
  python benchmarks/low_memory_curve.py gemma4-tiny max_target_length=64 per_device_batch_size=8 --rates 8e-3 --seeds 4 \
    --only float32 adamw --clip exact running layer                                 a CPU: what clipping costs

Low-memory training uses gpu/one_h200.yml: each layer is updated in the backward pass, and weights are bfloat16 with stochastic
rounding. The optimizer is Adafactor with momentum of low rank or none (adafactor-plain), or AdamW with moments in float32
(adamw) or in 8 bits (dynamic8), which may have weights in float16 or float32. All kinds see the same tokens in the same order
and get the same learning rates and seeds. Each run is a separate process with its own device, and prints a row when it ends:
the mean loss of the last 20 steps, that of steps 101 to 120, the peak memory of its device and its seconds. The last lines
compare each kind at its best rate with AdamW in float32 at the same seed: mean and standard error of the difference at the end.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxtext_like.errors import UserError

WORDS = ["steps=200", "enable_checkpointing=false", "enable_tensorboard=false", "resume=false", "finite_check_steps=2"]
DYNAMIC8 = ["gpu/one_h200.yml", "opt_type=adamw", "mu_dtype=dynamic8", "nu_dtype=dynamic8"]
KINDS = {
  "float32": ["weight_dtype=float32", "opt_type=adamw", "remat_policy=full"],
  "adafactor": ["gpu/one_h200.yml"],
  "adafactor-plain": ["gpu/one_h200.yml", "adafactor_momentum_rank=0"],
  "adamw": ["gpu/one_h200.yml", "opt_type=adamw", "mu_dtype=float32"],
  "dynamic8": DYNAMIC8,
  "dynamic8-float16": [*DYNAMIC8, "weight_dtype=float16"],
  "dynamic8-float32": [*DYNAMIC8, "weight_dtype=float32", "stochastic_rounding=false"],
}
RATES = (1e-4, 3e-4, 1e-3)
HEAD = "| training | learning rate | seed | loss | steps 101 to 120 | peak GiB | seconds |"


class Run(NamedTuple):
  """One curve: the kind of training, the learning rate and the seed."""

  kind: str
  rate: float
  seed: int


def ended(losses: list[float]) -> float:
  """Returns the loss at the end, the mean of the last 20 steps."""
  return float(np.mean(losses[-20:]))


def row(run: Run, losses: list[float], peak: float | None, seconds: float) -> str:
  """Returns a row of the table."""
  middle = f"{np.mean(losses[100:120]):.4f}" if len(losses) >= 120 else "-"
  memory = "-" if peak is None else f"{peak:.2f}"
  return f"| {run.kind} | {run.rate:g} | {run.seed} | {ended(losses):.4f} | {middle} | {memory} | {seconds:.0f} |"


def distances(ends: dict[Run, float]) -> list[str]:
  """Returns a line for each kind: the difference between its best end and the best end of float32, with the same seeds."""
  lines, best = [], {}
  for kind in dict.fromkeys(run.kind for run in ends):
    by_rate: dict[float, dict[int, float]] = {}
    for run, end in ends.items():
      if run.kind == kind:
        by_rate.setdefault(run.rate, {})[run.seed] = end
    rate = min(by_rate, key=lambda rate, of=by_rate: np.mean([*of[rate].values()]))
    best[kind] = rate, by_rate[rate]
  if "float32" not in best:
    return []
  _, plain = best.pop("float32")
  for kind, (rate, of_seed) in best.items():
    away = np.array([of_seed[seed] / plain[seed] - 1 for seed in of_seed if seed in plain])
    if not away.size:
      lines.append(f"{kind}, at its best rate, {rate:g}: no seed that AdamW in float32 came to the end of")
      continue
    error = f" +- {np.std(away, ddof=1) / len(away) ** 0.5:.2%}" if len(away) > 1 else ""
    lines.append(f"{kind}, at its best rate, {rate:g}: {np.mean(away):+.2%}{error} of AdamW in float32, {len(away)} seeds")
  return lines


def alone(result: str, model: str, *words: str) -> None:
  """Trains one curve in this process and writes it to the file ``result``."""
  import jax
  from moments import curve

  with tempfile.TemporaryDirectory() as folder:
    losses = curve(model, list(words), folder, "run").tolist()
  peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
  Path(result).write_text(json.dumps({"losses": losses, "peak": None if peak is None else peak / 2**30}))


def in_process(given: list[str], device: int | None) -> tuple[list[float], float | None]:
  """Returns (losses, peak GiB or None) of a curve, trained in a process that sees only this GPU, or all devices if None.

  Raises:
    UserError: the process failed.
  """
  from recipes import reason

  with tempfile.TemporaryDirectory() as folder:
    result = Path(folder, "curve.json")
    own = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
    command = [sys.executable, __file__, "--alone", str(result), *given]
    process = subprocess.run(command, env=os.environ | own, stderr=subprocess.PIPE, text=True)
    if process.returncode:
      raise UserError(reason(process.stderr))
    found = json.loads(result.read_text())
  return found["losses"], found["peak"]


def main() -> int:
  """Prints the table. Returns 1 if a run failed."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("words", nargs="+", metavar="MODEL key=value")
  parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="learning rates that all get")
  parser.add_argument("--only", nargs="+", choices=KINDS, default=["float32", "adafactor", "dynamic8"])
  parser.add_argument("--seeds", type=int, default=1, help="so many runs of each, seeds 0, 1, ...")
  parser.add_argument("--clip", nargs="+", help="what trains in little memory does so once with each of these values of clip")
  parser.add_argument("--devices", type=int, default=1, help="so many runs at a time, each on a GPU of its own")
  options = parser.parse_intermixed_args()
  model, *words = options.words
  kinds = {name: KINDS[name] for name in options.only}
  if options.clip:
    low = {f"{name}, clip={c}": [*own, f"clip={c}"] for name, own in kinds.items() if name != "float32" for c in options.clip}
    kinds = {name: own for name, own in kinds.items() if name == "float32"} | low
  free: queue.Queue[int | None] = queue.Queue()
  for device in range(options.devices):
    free.put(device if options.devices > 1 else None)

  def one(run: Run) -> tuple[str, float | None]:
    device, begin = free.get(), time.monotonic()
    try:
      rate = [f"learning_rate={run.rate}", f"seed={run.seed}"]
      losses, peak = in_process([model, *kinds[run.kind], *WORDS, *words, *rate], device)
    except UserError as e:
      return f"| {run.kind} | {run.rate:g} | {run.seed} | {e} | | | |", None
    finally:
      free.put(device)
    return row(run, losses, peak, time.monotonic() - begin), ended(losses)

  # Ordered by seed, so that the runs before an interruption can be compared.
  runs = [Run(kind, rate, seed) for seed in range(options.seeds) for rate in options.rates for kind in kinds]
  ends: dict[Run, float] = {}
  print(f"{HEAD}\n|{'---|' * HEAD.count(' | ')}---|", flush=True)
  pool = ThreadPoolExecutor(options.devices)
  try:
    found = {pool.submit(one, run): run for run in runs}
    for done in as_completed(found):
      line, end = done.result()
      print(line, flush=True)
      if end is not None:
        ends[found[done]] = end
  finally:
    pool.shutdown(cancel_futures=True)
  print("", *distances(ends), sep="\n")
  return int(len(ends) < len(runs))


if __name__ == "__main__":
  if sys.argv[1:2] == ["--alone"]:
    alone(*sys.argv[2:])
  else:
    sys.exit(main())
