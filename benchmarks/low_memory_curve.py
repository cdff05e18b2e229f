"""Loss curves of training in little memory against AdamW in float32 on the same data, each at the best of its learning rates.

  . gpu/env.sh; python benchmarks/low_memory_curve.py gemma3-4b per_device_batch_size=1 max_target_length=2048
  python benchmarks/low_memory_curve.py gemma4-tiny max_target_length=64 per_device_batch_size=8 --rates 8e-3 --seeds 4 \
    --only float32 adamw --clip exact running layer                                 a CPU: what clipping costs

In little memory, as gpu/one_h200.yml has it: bfloat16 weights with stochastic rounding, each layer updated in the backward
pass, by Adafactor or by AdamW with moments in float32 or in 8 bits. All see the same tokens in the same order and get as many
tries. Prints a row for each as it ends: the mean loss of the last 20 steps over all seeds, with its standard error, that of
steps 101 to 120, the peak of the device's memory so far in this process, and seconds; then the distance of each one's best from
AdamW's in float32, at the end and the largest of any mean of 20 steps.
"""

import argparse
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from moments import WINDOW, curve

WORDS = ["steps=200", "enable_checkpointing=false", "enable_tensorboard=false", "resume=false", "finite_check_steps=2"]
KINDS = {
  "float32": ["weight_dtype=float32", "opt_type=adamw", "remat_policy=full"],
  "adafactor": ["gpu/one_h200.yml"],
  "adamw": ["gpu/one_h200.yml", "opt_type=adamw"],
  "dynamic8": ["gpu/one_h200.yml", "opt_type=adamw", "mu_dtype=dynamic8", "nu_dtype=dynamic8"],
}
RATES = (1e-4, 3e-4, 1e-3)


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("words", nargs="+", metavar="MODEL key=value")
  parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="learning rates that all get")
  parser.add_argument("--only", nargs="+", choices=KINDS, default=["float32", "adafactor", "dynamic8"])
  parser.add_argument("--seeds", type=int, default=1, help="so many runs of each, seeds 0, 1, ...")
  parser.add_argument("--clip", nargs="+", help="what trains in little memory does so once with each of these values of clip")
  options = parser.parse_intermixed_args()
  model, *words = options.words
  kinds = {name: KINDS[name] for name in options.only}
  if options.clip:
    low = {f"{name}, clip={c}": [*own, f"clip={c}"] for name, own in kinds.items() if name != "float32" for c in options.clip}
    kinds = {name: own for name, own in kinds.items() if name == "float32"} | low
  best: dict[str, np.ndarray] = {}
  print("| training | learning rate | loss | steps 101 to 120 | peak GiB | seconds |\n|---|---|---|---|---|---|", flush=True)
  with tempfile.TemporaryDirectory() as folder:
    for rate in options.rates:
      for name, own in kinds.items():
        begin, runs = time.monotonic(), []
        for seed in range(options.seeds):
          given = [*own, *WORDS, *words, f"learning_rate={rate}", *([f"seed={seed}"] if options.seeds > 1 else [])]
          losses = curve(model, given, folder, f"{len(list(Path(folder).iterdir()))}")
          runs.append(np.convolve(losses, np.ones(WINDOW) / WINDOW, "valid"))
        means = np.mean(runs, axis=0)
        if name not in best or not means[-1] >= best[name][-1]:
          best[name] = means
        error = f" +- {np.std([run[-1] for run in runs], ddof=1) / len(runs) ** 0.5:.4f}" if len(runs) > 1 else ""
        middle = f"{means[100]:.4f}" if len(means) > 100 else "-"
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        memory = "-" if peak is None else f"{peak / 2**30:.2f}"
        cells = f"{means[-1]:.4f}{error} | {middle} | {memory} | {time.monotonic() - begin:.0f}"
        print(f"| {name} | {rate:g} | {cells} |", flush=True)
  for name in [name for name in kinds if name != "float32" and "float32" in best]:
    away = best[name] / best["float32"] - 1
    print(f"\n{name}: {away[-1]:+.2%} of AdamW in float32 at the end, at most {np.abs(away).max():.2%} away from it", end="")
  print()


if __name__ == "__main__":
  main()
