"""Compares training steps with and without offload to the host's memory on one GPU.

. gpu/env.sh; python benchmarks/offload.py                        the rows of Qwen3; about 3 minutes on an H200
python benchmarks/offload.py --only gemma4-31b                    all of gemma4-31b on one GPU; about 5 minutes
python benchmarks/offload.py --only moments                       offload of the optimizer state, for Qwen3 and gemma4-31b
python benchmarks/offload.py --model qwen3-tiny max_target_length=64 remat_policy=full     a quick try on a CPU; saves no memory

Each line is a separate process. The lines of a row have the same model, batch and seed, and differ in one key only. Tokens are
random, with three packed documents in each row. Steps run back to back, and the time of a step is the median of several groups
after the first two steps. "peak" is the peak memory of the device's allocator, "host" the memory of the program on the host. A
program that does not fit the device according to the compiler is not run. "loss" is that of the last step, which is the same
for the lines of a row, except for the effect of kernels that XLA chooses by timing.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
  """A configuration: its name for --only, words of ``train``, and the values of the key that differs, one for each line."""

  name: str
  words: tuple[str, ...]
  offloads: tuple[str, ...] = ("remat_offload=none", "remat_offload=layer_inputs")


def _moments(name: str, *words: str) -> Row:
  key = "optimizer_memory_host_offload"
  eight_bits = ("opt_type=adamw", "mu_dtype=dynamic8", "nu_dtype=dynamic8")
  return Row(f"moments, {name}", (*words, *eight_bits), (f"{key}=false", f"{key}=true"))


_QWEN = ("qwen3-8b", "num_decoder_layers=32", "max_target_length=4096", "remat_policy=full")
_GEMMA = ("gemma4-31b", "gpu/one_h200.yml", "max_target_length=4096")
ROWS = (
  Row("qwen3-8b, 32 layers, 8 rows", (*_QWEN, "per_device_batch_size=8")),
  Row("qwen3-8b, 32 layers, 14 rows", (*_QWEN, "per_device_batch_size=14")),
  Row("gemma4-31b, 4 rows", (*_GEMMA, "per_device_batch_size=4")),
  _moments("qwen3-8b, 2 rows", "qwen3-8b", "gpu/one_h200.yml", "max_target_length=4096", "per_device_batch_size=2"),
  _moments("gemma4-31b, 1 row", *_GEMMA, "per_device_batch_size=1"),
)
HEADER = "| run | offload | step | tokens/s | peak GiB | host GiB | loss |\n|---|---|---|---|---|---|---|"


def measured(words: list[str], offload: str, steps: int, groups: int) -> dict[str, Any]:
  """Measures one line in this process."""
  import jax
  import numpy as np
  from peer import GIB, resident, timed
  from step_cost import DRAWN, batch, require_updates

  from maxtext_like.config.load import load_config
  from maxtext_like.sharding.mesh import make_mesh
  from maxtext_like.training.step.program import make_program

  config = load_config(words[0], [*words[1:], offload]).config
  device = jax.local_devices()[0]
  program = make_program(config, mesh=make_mesh(config.mesh, [device]))
  compiled = program.lower_step().compile()
  said = compiled.memory_analysis()
  needed = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes + said.temp_size_in_bytes
  limit = (device.memory_stats() or {}).get("bytes_limit")
  found = {
    "host_gib": (said.host_temp_size_in_bytes + said.host_argument_size_in_bytes) / GIB,
    "device": device.device_kind,
    "jax": jax.__version__,
  }
  if limit is not None and needed > limit:
    return found | {"needed_gib": needed / GIB, "limit_gib": limit / GIB}
  state: Any = program.lower_init().compile()(np.uint32(0))
  data, known = batch(program, 3), DRAWN
  taken: list[dict[str, Any]] = []

  def step() -> Any:
    nonlocal state, known
    state, metrics = compiled(state, data, known)
    known = metrics["magnitude_bound"]
    taken.append({name: metrics[name] for name in ("decided", "skipped")})  # kept on the device, so nothing waits for them
    return metrics

  found |= timed(step, lambda metrics: float(jax.block_until_ready(metrics)["loss"]), steps, groups)
  require_updates(taken[-steps * groups :])
  peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
  tokens = program.global_batch * config.training.max_target_length
  return found | {"tokens_per_second": tokens / found["seconds"], "peak_gib": resident() if peak is None else peak / GIB}


def line(name: str, offload: str, found: dict[str, Any]) -> str:
  """Returns a row of the table."""
  if "failed" in found:
    cells = [f"failed: {found['failed'][:160]}", *["-"] * 4]
  elif "needed_gib" in found:
    said = f"does not fit: {found['needed_gib']:.2f} of {found['limit_gib']:.2f} GiB"
    cells = [said, "-", "-", f"{found['host_gib']:.2f}", "-"]
  else:
    cells = [f"{1e3 * found['seconds']:,.0f} ms", f"{found['tokens_per_second']:,.0f}", f"{found['peak_gib']:.2f}"]
    cells += [f"{found['host_gib']:.2f}", f"{found['loss']:.6f}"]
  return f"| {name} | {offload} | {' | '.join(cells)} |"


def main() -> None:
  """Prints the table."""
  if sys.argv[1:2] == ["--alone"]:
    print(json.dumps(measured(**json.loads(sys.argv[2]))))
    return
  from peer import apart

  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--only", default="qwen3-8b", help="rows whose name begins so")
  parser.add_argument("--model", help="in the place of all rows: a model, with the values of the rest of the line")
  parser.add_argument("--steps", type=int, default=1, help="of a group")
  parser.add_argument("--groups", type=int, default=3)
  options, words = parser.parse_known_args()
  if words and not options.model:
    parser.error(f"{words[0]} without --model")
  rows = (
    [Row(options.model, (options.model, *words))] if options.model else [r for r in ROWS if r.name.startswith(options.only)]
  )
  if not rows:
    parser.error(f"--only {options.only}: the rows are {', '.join(repr(row.name) for row in ROWS)}")
  print(HEADER, flush=True)
  devices = set()
  for row in rows:
    for offload in row.offloads:
      given = {"words": row.words, "offload": offload, "steps": options.steps, "groups": options.groups}
      found = apart([sys.executable, __file__, "--alone", json.dumps(given)])
      print(line(row.name, offload, found), flush=True)
      if "failed" in found:
        print(found["said"], file=sys.stderr)
      else:
        devices.add(f"{found['device']}, jax {found['jax']}")
  print(f"\n{'; '.join(sorted(devices))}")


if __name__ == "__main__":
  main()
