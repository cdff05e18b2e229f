"""Counts the bytes that one decode step moves on a GPU, for each instruction of the compiled program. Needs no GPU.

python benchmarks/decode_bytes.py gemma3-4b --rows 64 --capacity 384
python benchmarks/decode_bytes.py gemma3-4b --stacked num_decoder_layers=12      layers in a loop, as on a CPU

XLA compiles for the GPU of ``--topology`` without a GPU (JAX's CUDA libraries are needed). It cannot time kernels to choose
between them, so a real GPU may run other kernels for the same operations. Bytes are those of the operands and results of every
kernel; a slice counts as its own size, and an update in place as the size of the update. A step cannot be faster than its bytes
divided by the bandwidth of the memory.
"""

import argparse
import collections
import re
from typing import Any

FREE = frozenset("parameter constant tuple get-tuple-element bitcast while call conditional after-all iota".split())


def compiled(model: str, words: list[str], rows: int, capacity: int, *, stacked: bool, topology: str) -> str:
  """Returns the compiled program of a decode call as text."""
  import jax
  import jax.numpy as jnp

  from maxtext_like.capacity import aot_gpu
  from maxtext_like.capacity.topologies import assumed_gpu, find_gpus
  from maxtext_like.config.load import load_config
  from maxtext_like.generation import slots
  from maxtext_like.generation.sampling import Sampling
  from maxtext_like.layers.param import abstract
  from maxtext_like.models.build import build_decoder, precision_of

  config = load_config(model, ["dtype=bfloat16", "weight_dtype=bfloat16", *words]).config
  host = find_gpus(topology)
  assert host is not None, topology
  decoder = build_decoder(config.model, precision_of(config.precision), platform="gpu", capability=host.capability)
  place = jax.sharding.SingleDeviceSharding(aot_gpu._devices(host)[0])
  on = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)
  params = abstract(decoder.params())
  params = on(params if stacked else jax.eval_shape(decoder.apart, params))
  state = on(jax.eval_shape(lambda: slots.empty_state(decoder, rows, capacity, apart=not stacked, penalties=False)))
  sampling = Sampling()
  values = on(jax.tree.map(jnp.asarray, sampling.values(decoder.cfg.embedding.vocab_size)))
  number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
  with assumed_gpu():
    traced = slots.decode.trace(decoder, sampling.rule(), params, state, values, number(2), number(), number())
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
  assert text is not None
  return text


def size(arrays: Any) -> int:
  """Returns the bytes of arrays."""
  return sum(array.bytes for array in arrays)


def bytes_of_fusion(program: Any, operation: Any) -> int:
  """Returns the bytes that a fusion reads and writes."""
  inside = program.computations[operation.called[0]]
  by_name, users = {op.name: op for op in inside}, collections.defaultdict(list)
  for op in inside:
    for name in op.operands:
      users[name].append(op)

  def read(op: Any) -> int:
    total = 0
    for user in users[op.name]:
      first = user.operands[0] == op.name
      if user.kind in ("dynamic-slice", "slice", "gather"):
        total += size(user.results) if first else 0
      elif user.kind in ("dynamic-update-slice", "scatter") and first:
        continue  # updated in place
      elif user.kind in ("bitcast", "get-tuple-element"):
        total += read(user)
      else:
        return size(op.results)
    return total

  total = sum(min(read(op), size(op.results)) for op in inside if op.kind == "parameter")
  root = next(op for op in inside if op.root)
  for result in [by_name[name] for name in root.operands] if root.kind == "tuple" else [root]:
    while result.kind == "bitcast":
      result = by_name[result.operands[0]]
    changed = {"dynamic-update-slice": 1, "scatter": 2}.get(result.kind)
    total += size(result.results if changed is None else by_name[result.operands[changed]].results)
  return total


def moved(program: Any) -> list[tuple[int, int, Any]]:
  """Returns (bytes in a step, number of runs in a step, operation) for every kernel in the loop over tokens."""
  found, pending = [], [(program.entry, 0, 0)]
  while pending:
    name, times, depth = pending.pop()
    for op in program.computations[name]:
      if op.kind == "while":
        # The loop over tokens has no known trip count, so one iteration is counted. Loops over layers have a known one.
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', op.text)
        pending.append((op.body, max(times, 1) * (int(known[1]) if known else 1), depth + 1))
      elif op.kind in ("conditional", "call", "async-start"):
        pending += [(called, times, depth) for called in op.called]
      elif op.kind in FREE or op.kind.endswith("-done") or not times:
        continue
      elif op.kind in ("fusion", "fusion-start"):
        found.append((bytes_of_fusion(program, op) * times, times, op))
      elif op.kind == "dynamic-update-slice":
        found.append((2 * size(program.operations[op.operands[1]].results) * times, times, op))
      elif op.kind in ("dynamic-slice", "slice", "gather"):
        found.append((2 * size(op.results) * times, times, op))
      else:
        operands = [program.operations[name].results for name in op.operands if name in program.operations]
        found.append(((size(op.results) + sum(map(size, operands))) * times, times, op))
  return sorted(found, key=lambda row: -row[0])


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("model")
  parser.add_argument("words", nargs="*", metavar="key=value")
  parser.add_argument("--rows", type=int, default=64)
  parser.add_argument("--capacity", type=int, default=384, help="tokens of the longest row")
  parser.add_argument("--stacked", action="store_true", help="stacked parameters and a loop over layers")
  parser.add_argument("--topology", default="h100")
  parser.add_argument("--lines", type=int, default=25)
  args = parser.parse_args()
  from maxtext_like.capacity.compiled_program import read_program

  text = compiled(args.model, args.words, args.rows, args.capacity, stacked=args.stacked, topology=args.topology)
  program = read_program(text)
  groups: dict[tuple[str, str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
  for count, times, op in moved(program):
    path, _ = program.requested_by(op.name)
    scopes = [part for part in path.split("/") if re.search(r"norm|attention|mla|mlp|moe|head|embedding|sampling|slice", part)]
    shape = " ".join(f"{array.dtype}{list(array.shape)}" for array in op.results[:1])
    group = groups[op.kind, "/".join(scopes[-2:]), shape]
    group[0], group[1] = group[0] + count, group[1] + times
  total, kernels = (sum(group[i] for group in groups.values()) for i in (0, 1))
  print(
    f"{total / 1e9:.2f} GB and {kernels} kernels in a step\n\n| GB | kernels | kind | part | result |\n|---|---|---|---|---|"
  )
  for (kind, part, shape), (count, times) in sorted(groups.items(), key=lambda item: -item[1][0])[: args.lines]:
    print(f"| {count / 1e9:.3f} | {times} | {kind} | {part} | {shape} |")


if __name__ == "__main__":
  main()
