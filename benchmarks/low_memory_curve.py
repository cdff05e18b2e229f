"""Loss curves of training in little memory against AdamW in float32 on the same data, each at the best of its learning rates.

  . gpu/env.sh; python benchmarks/low_memory_curve.py gemma3-4b per_device_batch_size=1 max_target_length=2048
  python benchmarks/low_memory_curve.py gemma4-tiny --rates 1e-3 2e-3 4e-3          a CPU, for a look

In little memory, as gpu/one_h200.yml has it: bfloat16 weights with stochastic rounding, each layer updated in the backward
pass, by Adafactor or by AdamW with moments in 8 bits. All see the same tokens in the same order and get as many tries. Prints a
row for each run as it ends: the mean loss of the last 20 steps, the peak of the device's memory so far in this process, and
seconds; then the distance of each one's best from AdamW's in float32, at the end and the largest of any mean of 20 steps.
"""

import argparse
import tempfile
import time

import jax
import numpy as np
from moments import WINDOW, curve

WORDS = ["steps=200", "enable_checkpointing=false", "enable_tensorboard=false", "resume=false", "finite_check_steps=2"]
KINDS = {
  "float32": ["weight_dtype=float32", "opt_type=adamw", "remat_policy=full"],
  "adafactor": ["gpu/one_h200.yml"],
  "dynamic8": ["gpu/one_h200.yml", "opt_type=adamw", "mu_dtype=dynamic8", "nu_dtype=dynamic8"],
}
RATES = (1e-4, 3e-4, 1e-3)


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("words", nargs="+", metavar="MODEL key=value")
  parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="learning rates that all get")
  parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
  options = parser.parse_intermixed_args()
  model, *words = options.words
  best: dict[str, np.ndarray] = {}
  print("| training | learning rate | loss | peak GiB | seconds |\n|---|---|---|---|---|", flush=True)
  with tempfile.TemporaryDirectory() as folder:
    for rate in options.rates:
      for name in options.only:
        begin, run, own = time.monotonic(), f"{name}-{rate:g}", KINDS[name]
        losses = curve(model, [*own, *WORDS, *words, f"learning_rate={rate}"], folder, run)
        means = np.convolve(losses, np.ones(WINDOW) / WINDOW, "valid")
        if name not in best or not means[-1] >= best[name][-1]:
          best[name] = means
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        memory = "-" if peak is None else f"{peak / 2**30:.2f}"
        print(f"| {name} | {rate:g} | {means[-1]:.4f} | {memory} | {time.monotonic() - begin:.0f} |", flush=True)
  for name in [name for name in options.only if name != "float32" and "float32" in best]:
    away = best[name] / best["float32"] - 1
    print(f"\n{name}: {away[-1]:+.2%} of AdamW in float32 at the end, at most {np.abs(away).max():.2%} away from it", end="")
  print()


if __name__ == "__main__":
  main()
