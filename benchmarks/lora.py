"""Measures memory and speed of LoRA on each form of quantized base weights, on one device.

python benchmarks/lora.py gemma3-4b gemma4-31b:bfloat16,nf4 --out lora.json
python benchmarks/lora.py gemma3-4b:bfloat16,nf4,int8 gemma4-31b:nf4 gemma4-26b:nf4 --against peft       compared with peft
python benchmarks/lora.py gemma4-tiny --words max_target_length=128 --steps 3 --against peft --python TORCH/bin/python

A model is a name or a file, with the forms after a colon (default: all). Ratios compare each form with the first one. Weights
are drawn and quantized layer by layer, and the adapter is trained on random tokens: 1 row of 2048, rank 16 on all linear maps,
AdamW. Weights that are not quantized are bfloat16. Every form runs in a separate process, so that its peak memory can be
measured: "drawn" is the peak after drawing the weights, "peak" that of everything. Tokens per second are for the median time of
--steps steps.

``--against peft`` measures the same fine-tune with transformers, peft and bitsandbytes after each row, in the Python of
--python (see benchmarks/peer.py). It prints their tokens per second and peak memory, and our speed divided by theirs as
"times". peft adapts the same weights where it can, and bitsandbytes leaves fused experts in bfloat16. The row names such
differences.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from typing import Any

FORMS = ("bfloat16", "nf4", "int8", "fp8_block")
PEER_FORMS = FORMS[:3]
WORDS = ("per_device_batch_size=1", "max_target_length=2048", "lora_rank=16", "lora_alpha=32", "weight_dtype=bfloat16")


def measure(model: str, form: str, words: list[str], steps: int) -> dict[str, Any]:
  """Measures one form of a model in this process."""
  import jax
  import numpy as np
  from peer import GIB
  from step_cost import DRAWN, require_updates

  from maxtext_like.capacity.memory import estimate
  from maxtext_like.config.load import load_config
  from maxtext_like.models.naming import ADAPTER
  from maxtext_like.sharding.mesh import make_mesh
  from maxtext_like.training.step.program import make_program

  config = load_config(model, [*WORDS, f"base_weights={form}", "learning_rate=1e-4", "warmup_steps_fraction=0", *words]).config
  device = jax.local_devices()[0]
  program = make_program(config, mesh=make_mesh(config.mesh, [device]))
  peak = lambda: (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / GIB
  begin = time.perf_counter()
  state = jax.block_until_ready(program.lower_init().compile()(np.uint32(0)))
  drawn, seconds = peak(), time.perf_counter() - begin
  begin = time.perf_counter()
  step = program.lower_step().compile()
  compiled = time.perf_counter() - begin
  rng = np.random.default_rng(0)
  rows, length = program.global_batch, config.training.max_target_length
  tokens = rng.integers(3, config.model.vocab_size, (rows, length + 1)).astype(np.int32)
  ones = np.ones((rows, length), np.int32)
  arrays = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": ones, "positions": ones * np.arange(length)}
  batch = program.place({name: np.ascontiguousarray(x, np.int32) for name, x in arrays.items()})
  known = DRAWN  # without known bounds a step updates nothing
  times, losses, taken = [], [], []
  for _ in range(steps + 2):
    begin = time.perf_counter()
    state, metrics = step(state, batch, known)
    known = metrics["magnitude_bound"]
    losses.append(float(metrics["loss"]))  # waits for the step
    times.append(time.perf_counter() - begin)
    taken.append(metrics)
  require_updates(taken[2:])
  assert losses[-1] != losses[0], "no step moved the adapter: what was timed is not training"
  seconds_a_step = statistics.median(times[2:])
  memory = step.memory_analysis()
  return {
    "model": model,
    "form": form,
    "device": device.device_kind,
    "tokens_per_second": rows * length / seconds_a_step,
    "step_seconds": seconds_a_step,
    "drawn_gib": drawn,
    "peak_gib": peak(),
    "program_gib": (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / GIB,
    "estimate_gib": estimate(program).total / GIB,
    "init_seconds": seconds,
    "compile_seconds": compiled,
    "trained": sum(x.size for x in jax.tree.leaves(state["params"][ADAPTER])),
    "losses": losses,
  }


def against_peft(model: str, form: str, words: list[str], steps: int, python: str) -> dict[str, Any]:
  """Measures the same fine-tune with transformers, peft and bitsandbytes, in a separate process.

  Returns:
    The result of ``peer.adapter``, with the weights that have an adapter here and none there as "without"; or the reason of a
    failure as "failed".
  """
  from peer import ask, write_config

  from maxtext_like.checkpoint.huggingface.peft_targets import find_targets
  from maxtext_like.config.load import load_config
  from maxtext_like.sharding.mesh import abstract_mesh
  from maxtext_like.training.step.program import make_program

  if form not in PEER_FORMS:
    return {"failed": "bitsandbytes has no such form"}
  config = load_config(model, [*WORDS, *words]).config
  # The mesh is abstract, because this process must not take memory from the processes that measure.
  program = make_program(config, mesh=abstract_mesh(config.mesh, 1), platform="gpu")
  assert program.adapter is not None, "lora_rank is among WORDS"
  found = find_targets(program.adapter, program.model.decoder, config.model.decoder_block, nested=False)
  given = {
    "shape": [round(config.training.per_device_batch_size), config.training.max_target_length],
    "form": form, "rank": config.adapter.lora_rank, "alpha": config.adapter.alpha, "steps": steps,
    "modules": sorted({m.target for m in found.maps if not m.as_parameter}),
    "parameters": sorted({*found.experts, *(m.target for m in found.maps if m.as_parameter)}),
  }  # fmt: skip
  with tempfile.TemporaryDirectory() as directory:
    write_config(config.model, "bfloat16", directory)
    return ask(python, "adapter", given | {"directory": directory}) | {"without": [*found.without_dora, *found.unwritten]}


def cells(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
  """Returns the cells of a row about the other side."""
  if "failed" in theirs:
    return f" {'-':>9} {'-':>9} {'-':>6}  {theirs['failed'][:160]}"
  times = f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f}" if "failed" not in ours else "-"
  notes = []
  if theirs["unquantized"]:
    notes.append(f"{', '.join(theirs['unquantized'])} in bfloat16")
  if theirs["without"]:
    notes.append(f"{theirs['maps']} maps; nothing added to {', '.join(theirs['without'])}")
  return f" {theirs['tokens_per_second']:9.0f} {theirs['peak_gib']:9.2f} {times:>6}  {'; '.join(notes)}"


def main() -> None:
  """Measures the models and forms of the command line, and prints a line for each form."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("models", nargs="+", metavar="MODEL[:FORM,...]")
  parser.add_argument("--words", nargs="*", default=[], metavar="KEY=VALUE", help="laid over the model's configuration")
  parser.add_argument("--steps", type=int, default=8)
  parser.add_argument("--against", choices=["peft"], help="the other side, beside each row")
  parser.add_argument("--python", default=sys.executable, help="that has torch, transformers, peft and bitsandbytes")
  parser.add_argument("--out", help="a JSON file of everything")
  parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.alone:
    model, _, form = options.models[0].partition(":")
    print(json.dumps(measure(model, form, options.words, options.steps)))
    return
  from peer import apart

  rows: list[dict[str, Any]] = []
  print(
    "model           form        tokens/s   ratio   peak GiB  drawn GiB  XLA's GiB  estimate  init s  compile s  last loss"
    + ("    peft's  peak GiB  times" if options.against else "")
  )
  for entry in options.models:
    model, _, named = entry.partition(":")
    first = None
    for form in named.split(",") if named else FORMS:
      words = ["--words", *options.words] if options.words else []
      row = apart([sys.executable, __file__, f"{model}:{form}", "--alone", "--steps", str(options.steps), *words])
      row |= {"model": model, "form": form}
      if "failed" in row:
        line = f"{model:<15} {form:<10} failed: {row['failed'][:300]}"
      else:
        first = first or row["tokens_per_second"]
        ratio = row["tokens_per_second"] / first
        line = (
          f"{model:<15} {form:<10} {row['tokens_per_second']:9.0f} {ratio:7.2f} {row['peak_gib']:10.2f}"
          f" {row['drawn_gib']:10.2f} {row['program_gib']:10.2f} {row['estimate_gib']:9.2f} {row['init_seconds']:7.0f}"
          f" {row['compile_seconds']:10.0f} {row['losses'][-1]:10.3f}"
        )
      if options.against:
        row["peft"] = against_peft(model, form, options.words, options.steps, options.python)
        line += cells(row, row["peft"])
      print(line, flush=True)
      rows.append(row)
      if options.out:  # keeps measured rows if a later one is interrupted
        with open(options.out, "w", encoding="utf-8") as file:
          json.dump(rows, file, indent=1)


if __name__ == "__main__":
  main()
