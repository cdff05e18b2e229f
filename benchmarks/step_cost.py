"""What keys cost: step time of a configuration with other values against its own, alternating in one process.

python benchmarks/step_cost.py gemma4-31b num_decoder_layers=6 per_device_batch_size=2 --against flags finite numerics
python benchmarks/step_cost.py gemma4-tiny --against finite numerics --steps 40 --cpu-time

  flags     every float32 key of the precision section on; against all of them off
  gates     the same without float32_gate_product, whose "auto" is off in bfloat16
  finite    finite_check_steps=-1, every step checked; against finite_check_steps=0
  numerics  numerics_every=1; against numerics_every=0

The two programs take turns on the same state, so whatever else the machine does hits both alike. The table has the median
of the paired ratios and the interquartile range. With --cpu-time it is the processor time of this process, which other
programs on the machine do not touch: on shared machines.
"""

import argparse
import statistics
import time

import jax
import numpy as np

from maxtext_like.config.load import load_config
from maxtext_like.training.program import Program, make_program

FLAGS = ("float32_qk_product", "float32_logits", "float32_gate_logits", "float32_weight_sum", "cast_logits_to_fp32")
INDEXER = ("indexer_float32_logits",)
GATE = ("float32_gate_product",)


def values(keys: tuple[str, ...], value: str) -> list[str]:
  return [f"{key}={value}" for key in keys]


def pair(name: str, model: str, words: list[str]) -> tuple[Program, Program]:
  """The programs with and without."""

  def build(*more: str) -> Program:
    return make_program(load_config(model, [*words, *more]).config)

  if name == "finite":
    return build("finite_check_steps=-1"), build("finite_check_steps=0")
  if name == "numerics":
    return build("numerics_every=1"), build("numerics_every=0")
  config = load_config(model, words).config
  keys = [key for key in FLAGS if config.model.num_experts or ("gate_logits" not in key and "weight_sum" not in key)]
  keys += [*INDEXER] * config.model.use_indexer + [*GATE] * (name == "flags")
  return build(*values(tuple(keys), "true")), build(*values(tuple(keys), "false"))


def batch(program: Program) -> dict[str, jax.Array]:
  """Random tokens in rows of two documents."""
  rng = np.random.default_rng(0)
  rows, length = program.global_batch, program.config.training.max_target_length
  tokens = rng.integers(3, program.config.model.vocab_size, (rows, length + 1)).astype(np.int32)
  segments = np.where(np.arange(length) < length // 3, 1, 2).astype(np.int32)
  positions = np.where(segments == 1, np.arange(length), np.arange(length) - length // 3).astype(np.int32)
  everywhere = lambda x: np.ascontiguousarray(np.broadcast_to(x, (rows, length)))
  arrays = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "segments": segments}
  return program.place({name: everywhere(x) for name, x in arrays.items()})


def ratios(on: Program, off: Program, steps: int, clock) -> tuple[list[float], float]:
  """Paired ratios of step times, and the median seconds of a step without."""
  programs = [(p, p.lower_step().compile()) for p in (on, off)]
  state = off.lower_init().compile()(np.uint32(0))
  data = batch(off)
  found, plain = [], []
  for i in range(steps + 2):
    seconds = []
    # Who goes first alternates too.
    for program, step in programs if i % 2 else programs[::-1]:
      check = np.bool_(program.config.training.finite_check_steps == -1)
      start = clock()
      state, metrics = step(state, data, check)
      jax.block_until_ready((state, metrics))
      seconds.append(clock() - start)
    with_it, without = seconds if i % 2 else seconds[::-1]
    if i >= 2:
      found.append(with_it / without)
      plain.append(without)
  return found, statistics.median(plain)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("model")
  parser.add_argument("words", nargs="*", metavar="key=value")
  parser.add_argument("--against", nargs="+", default=["flags", "gates", "finite", "numerics"])
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--cpu-time", action="store_true")
  args = parser.parse_args()
  clock = time.process_time if args.cpu_time else time.perf_counter
  print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {args.model} {' '.join(args.words)}\n")
  print("| key | step without | with / without | middle half |\n|---|---|---|---|")
  for name in args.against:
    found, plain = ratios(*pair(name, args.model, args.words), args.steps, clock)
    low, middle, high = statistics.quantiles(found, n=4)
    print(f"| {name} | {plain * 1e3:.1f} ms | {middle:.4f} | {low:.4f} to {high:.4f} |", flush=True)


if __name__ == "__main__":
  main()
