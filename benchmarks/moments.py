"""Compares loss curves of AdamW with moments in fewer bits and in float32, on the same data.

  python benchmarks/moments.py [MODEL] [key=value ...]

Prints for each format the mean loss of the last 20 steps, its relative difference from float32 moments, the largest difference
of any mean of 20 steps, and the bytes of the optimizer's state for each parameter.
"""

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from maxtext_like.analysis.failed_step import FailedStep
from maxtext_like.config.load import load_config
from maxtext_like.training.run.run import train
from maxtext_like.training.sinks.metrics import METRICS, read
from maxtext_like.training.step.program import make_program

WORDS = ["steps=200", "max_target_length=64", "per_device_batch_size=8", "learning_rate=2e-3", "enable_checkpointing=false"]
WORDS += ["enable_tensorboard=false", "numerics_every=0", "finite_check_steps=0"]
KINDS = {
  "float32": ["mu_dtype=float32"],
  "bfloat16": ["mu_dtype=bfloat16", "nu_dtype=bfloat16"],
  "dynamic8": ["mu_dtype=dynamic8", "nu_dtype=dynamic8"],
}
WINDOW = 20


def curve(model: str, words: list[str], folder: str, name: str) -> np.ndarray:
  """Trains a run and returns the loss of every step."""
  with Path(folder, f"{name}.log").open("w") as log:
    train(load_config(model, [*words, f"output_dir={folder}", f"run_name={name}"]), FailedStep, log)
  return np.array([row["loss"] for row in read(Path(folder, name, METRICS))])


def main(model: str = "gemma4-tiny", *words: str) -> None:
  plain = None
  print(f"{'moments':<10} {'loss':>8} {'of float32':>11} {'largest':>9} {'bytes':>7}")
  with tempfile.TemporaryDirectory() as folder:
    for name, own in KINDS.items():
      given = [*WORDS, *words, *own]
      program = make_program(load_config(model, given).config)
      state = program.abstract_state["opt_state"]
      size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / program.size
      means = np.convolve(curve(model, given, folder, name), np.ones(WINDOW) / WINDOW, "valid")
      plain = means if plain is None else plain
      away = means / plain - 1
      print(f"{name:<10} {means[-1]:8.4f} {away[-1]:+11.2%} {np.abs(away).max():9.2%} {size:7.2f}", flush=True)


if __name__ == "__main__":
  if "=" in "".join(sys.argv[1:2]):
    sys.argv.insert(1, "gemma4-tiny")
  main(*sys.argv[1:])
