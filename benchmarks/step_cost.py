"""Measures the cost of keys and checks: step times of two variants of a configuration, alternating in one process.

python benchmarks/step_cost.py gemma4-31b num_decoder_layers=6 per_device_batch_size=2 --against flags finite numerics
python benchmarks/step_cost.py gemma4-tiny --against finite numerics --steps 40 --cpu-time
python benchmarks/step_cost.py gemma4-31b per_device_batch_size=1 --against finite look --topology v6e-32

  flags     every float32 key of the precision section on, and all of them off
  gates     the same without float32_gate_product, whose "auto" is off in bfloat16
  finite    the default step, which proves every update finite, and one that checks only loss and gradients
  look      the checked form of the step, which checks an update that is not proved finite, and the second step of "finite"
  numerics  numerics_every=1 and numerics_every=0
  dora      lora_dora=true, with a lora_rank among the words, and LoRA (only if named)

The two programs take turns, on the same state if they have the same arrays, so other work on the machine affects both alike.
The table has the median of the paired ratios and the interquartile range. With --cpu-time they are ratios of the processor time
of this process, which other programs do not affect; use it on shared machines. With --topology nothing runs: both programs are
compiled for a TPU slice, and the table has the peak memory of a chip.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.capacity import aot_tpu
from maxtext_like.capacity.topologies import TOPOLOGIES
from maxtext_like.config.load import load_config
from maxtext_like.config.precision_keys import KEYS
from maxtext_like.models import row_norms
from maxtext_like.training.step import train_step
from maxtext_like.training.step.program import TrainProgram, make_program

# Upper bounds of the parameters and moments of an initial state, as from ``TrainProgram.lower_check``. Moments are zeros.
DRAWN = np.array([1e4, 1], np.float32)


def lower(program: TrainProgram, *, proved: bool = True, checked: bool = False, platform: str | None = None) -> Any:
  """Returns the lowered step.

  If ``proved`` is False, the step lacks the proof, sums and flags of updated arrays. With ``optimizer_in_backward`` it lacks
  only the proof.
  """

  def squares(tree):
    rows = [jnp.sum(jnp.square(x.astype(jnp.float32)))[None] for x in jax.tree.leaves(tree)]
    return row_norms.Squares(jnp.concatenate(rows), jnp.zeros(len(rows)))

  with ExitStack() as stack:
    if not proved:
      stack.enter_context(mock.patch.object(train_step, "plain_squares", squares))
      stack.enter_context(mock.patch.object(train_step, "state_peaks", return_value=jnp.zeros(0)))
    return program.lower_step(platform, checked=checked)


def proof(program: TrainProgram) -> TrainProgram:
  """Returns a program that treats every update as certainly finite."""

  own = program.step.optimizer

  class Proved(type(own)):
    def certainly_finite(self, gradient, state, parameter, rate):
      return jnp.ones((), bool), state

  optimizer = Proved(**{f.name: getattr(own, f.name) for f in dataclasses.fields(own)})
  return dataclasses.replace(program, step=dataclasses.replace(program.step, optimizer=optimizer, checked=False))


def pair(name: str, model: str, words: list[str], topology: str | None = None) -> tuple[Any, Any, TrainProgram, TrainProgram]:
  """Returns the lowered steps with and without the key or check, and the programs whose states they take."""

  def build(*more: str) -> TrainProgram:
    config = load_config(model, [*words, *more]).config
    return make_program(config, mesh=aot_tpu.tpu_mesh(TOPOLOGIES[topology], config.mesh) if topology else None)

  platform = "tpu" if topology else None
  if name in ("finite", "look"):
    program = build()
    plain = lower(proof(program), proved=False, platform=platform)
    return lower(program, checked=name == "look", platform=platform), plain, program, program
  on, off = key_pair(name, model, words, build)
  return lower(on, platform=platform), lower(off, platform=platform), on, off


def key_pair(name: str, model: str, words: list[str], build) -> tuple[TrainProgram, TrainProgram]:
  """Returns the programs with and without a key."""
  if name == "numerics":
    return build("numerics_every=1"), build("numerics_every=0")
  if name == "dora":
    return build("lora_dora=true"), build("lora_dora=false")
  config = load_config(model, words).config
  flags = [key for key in KEYS.values() if key.repairs == "forward" and key.safer is True]
  keys = [key.name for key in flags if not key.lacking(config.model, config.vision)]
  if name == "gates":
    keys.remove("float32_gate_product")
  return build(*(f"{key}=true" for key in keys)), build(*(f"{key}=false" for key in keys))


def batch(program: TrainProgram, documents: int = 2) -> dict[str, jax.Array]:
  """Returns random tokens in full rows with a number of documents, of which later ones are longer.

  A program that supports only one document in a row gets one.
  """
  rng = np.random.default_rng(0)
  rows, length = program.global_batch, program.config.training.max_target_length
  tokens = rng.integers(3, program.config.model.vocab_size, (rows, length + 1)).astype(np.int32)
  n = 1 if program.model.decoder.cfg.one_document else documents
  starts = np.array([length * i * (i + 1) // (n * (n + 1)) for i in range(n)])  # two: the second starts at a third
  segments = np.searchsorted(starts, np.arange(length), side="right").astype(np.int32)
  positions = (np.arange(length) - starts[segments - 1]).astype(np.int32)
  everywhere = lambda x: np.ascontiguousarray(np.broadcast_to(x, (rows, length)))
  arrays = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "segments": segments}
  return program.place({name: everywhere(x) for name, x in arrays.items()})


def require_updates(steps: Sequence[Mapping[str, Any]]) -> None:
  """Raises RuntimeError if a step left its update out, because the timed work is not training then.

  It waits for the steps, so call it after they have been timed.

  Args:
    steps: metrics of the steps.
  """
  left_out = [i for i, found in enumerate(steps) if not found["decided"] or found["skipped"]]
  if left_out:
    raise RuntimeError(f"what was timed is not training: {len(left_out)} of {len(steps)} steps left their update out")


def ratios(on: Any, off: Any, with_it: TrainProgram, program: TrainProgram, steps: int, clock) -> tuple[list[float], float]:
  """Returns the paired ratios of step times, and the median seconds of a step without the key or check."""
  start = lambda program: program.lower_init().compile()(np.uint32(0))
  one = jax.tree.structure(with_it.abstract_state) == jax.tree.structure(program.abstract_state)
  states = {"off": start(program)} | ({} if one else {"on": start(with_it)})
  compiled = [(on.compile(), "off" if one else "on"), (off.compile(), "off")]
  data, known = batch(program), dict.fromkeys(states, DRAWN)
  found, plain, taken = [], [], []
  for i in range(steps + 2):
    seconds = []
    # The order of the two alternates too.
    for run, whose in compiled if i % 2 else compiled[::-1]:
      begin = clock()
      states[whose], metrics = run(states[whose], data, known[whose])
      known[whose] = metrics["magnitude_bound"]
      jax.block_until_ready((states[whose], metrics))
      seconds.append(clock() - begin)
      taken.append({name: metrics[name] for name in ("decided", "skipped")})
    added, without = seconds if i % 2 else seconds[::-1]
    if i >= 2:
      found.append(added / without)
      plain.append(without)
  require_updates(taken)
  return found, statistics.median(plain)


def memory_table(args: argparse.Namespace) -> None:
  """Prints the peak memory of both programs for a chip of a slice, according to the compiler."""
  aot_tpu.prepare_environment()
  print(f"jax {jax.__version__}, {args.topology}, {args.model} {' '.join(args.words)}\n")
  print("| key | without | with |\n|---|---|---|")
  for name in args.against:
    lowered = pair(name, args.model, args.words, args.topology)[:2]
    on, off = (x.compile(compiler_options=aot_tpu.xla_flags()).memory_analysis().peak_memory_in_bytes for x in lowered)
    print(f"| {name} | {off / 2**30:.3f} GiB | {on / 2**30:.3f} GiB |", flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("model")
  parser.add_argument("words", nargs="*", metavar="key=value")
  parser.add_argument("--against", nargs="+", default=["flags", "gates", "finite", "look", "numerics"])
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--cpu-time", action="store_true")
  parser.add_argument("--topology", choices=sorted(TOPOLOGIES))
  args = parser.parse_args()
  if args.topology:
    memory_table(args)
    return
  clock = time.process_time if args.cpu_time else time.perf_counter
  print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {args.model} {' '.join(args.words)}\n")
  print("| key | step without | with / without | middle half |\n|---|---|---|---|")
  for name in args.against:
    found, plain = ratios(*pair(name, args.model, args.words), args.steps, clock)
    low, middle, high = statistics.quantiles(found, n=4)
    print(f"| {name} | {plain * 1e3:.1f} ms | {middle:.4f} | {low:.4f} to {high:.4f} |", flush=True)


if __name__ == "__main__":
  main()
