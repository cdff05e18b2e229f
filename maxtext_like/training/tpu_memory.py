"""What a TPU chip holds when most is in use, by arithmetic on shapes and shardings: the terms that its compiled programs show.

Beside ``memory.estimate``: arrays lie in tiles, weights that are split come whole a layer at a time, and the largest gradient
is whole before it is scattered. docs/compile.md has the sums beside what libtpu laid out.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.partition import axes_of
from maxtext_like.layers.rules import GATHERED
from maxtext_like.layers.tiles import ROWS, filled, numbers
from maxtext_like.models.adapter import model_path
from maxtext_like.models.naming import path_keys
from maxtext_like.training.memory import MemoryEstimate
from maxtext_like.training.program import TrainProgram

TABLE = "table"
"""The part of ``Fetched`` that makes logits."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
  """A weight that is split over devices which multiply by all of it; of a stacked one, one layer.

  Attributes:
    part: "stack_0/7/layer_3/mlp": of what it is, the row between; or ``TABLE``.
    axes: mesh axes that it is split over, and fetched from.
    ways: their devices.
    numbers: of the whole.
    bytes: of it in ``dtype``, or as it is stored where that is no floating point.
    arriving: bytes in which it comes where the parts fill no tiles and are put together once they are here; else 0.
    trained: it has a gradient.
    experts: a kernel multiplies it, and makes its gradient.
  """

  part: str
  axes: tuple[str, ...]
  ways: int
  numbers: int
  bytes: int
  arriving: int
  trained: bool
  experts: bool


def fetched(program: TrainProgram) -> list[Fetched]:
  """The weights that lie split to save memory alone, or over devices that have rows of their own."""
  mesh, params = program.model.mesh, program.abstract_state["params"]
  item = jnp.dtype(program.config.precision.dtype).itemsize
  head = "embedding" if program.model.decoder.cfg.tied else "head"
  trained = jax.tree_util.tree_leaves_with_path(program.selection.split(params)[0])
  taught = {model_path(path_keys(path)) for path, _ in trained}
  found = []
  declared = jax.tree.leaves(program.spec)
  for (path, x), p in zip(jax.tree_util.tree_leaves_with_path(params), declared, strict=True):
    keys, entries = path_keys(path), dict(enumerate(x.sharding.spec))
    split = [i for i, entry in entries.items() if "fsdp" in axes_of(entry) or (p.axes[i] in GATHERED and axes_of(entry))]
    stacked = keys[0].startswith("stack_")
    axes = axes_of(entries[split[0]]) if split else ()
    ways = math.prod(mesh.shape[axis] for axis in axes)
    if ways == 1 or not (stacked or keys[0] == head):
      continue
    shard = x.sharding.shard_shape(x.shape)
    rows, own = x.shape[0] if stacked else 1, shard[split[0]]
    whole = math.prod(shard) * ways // rows
    size = whole * (item if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype.itemsize)
    parts = [f"{keys[0]}/{row}/{keys[1]}/{keys[2]}" for row in range(rows)] if stacked else [TABLE]
    found += [
      Fetched(
        part=part,
        axes=axes,
        ways=ways,
        numbers=whole,
        bytes=size,
        arriving=size * filled(own) // own if own % ROWS else 0,
        trained=keys in taught,
        experts="experts" in keys,
      )
      for part in parts
    ]
  return found


def by_part(weights: list[Fetched]) -> dict[str, int]:
  """Bytes that each part of each layer fetches, and the table."""
  found: dict[str, int] = {}
  for weight in weights:
    found[weight.part] = found.get(weight.part, 0) + weight.bytes
  return found


def in_use(program: TrainProgram, need: MemoryEstimate, kept: int, again: float, weights: list[Fetched]) -> int:
  """Bytes beside a program's arguments at the fullest of four instants.

  In the loss: the table of the logits, whole, and what a piece of them takes. In the backward pass of a layer: the gradients of
  all layers, the layer's activations, and of its fullest part the weights and the largest gradient, before it is scattered.
  Behind it: all gradients, and once more that of the embedding's rows, in float32 and as it is stored; in the update they and
  the steps of all arrays, where the optimizer's rule makes them whole.

  Args:
    program: of the run.
    need: its estimate.
    kept: what the forward pass keeps for the backward pass.
    again: a layer's own activations, computed again.
    weights: ``fetched``.
  """
  read = by_part(weights)
  table = read.pop(TABLE, 0)
  loss = kept + table + max(need.logits, *(w.arriving for w in weights if w.part == TABLE), 0)
  backward = kept + need.gradients + again + need.dequantised
  if read:
    fullest = max(read, key=lambda part: read[part])
    own = [w for w in weights if w.part == fullest]
    backward += read[fullest] + max(w.arriving for w in own) + _gradients(program, [w for w in own if w.trained])
  trained = program.selection.split(program.abstract_state["params"])[0]
  placed = trained if program.adapter is None else program.adapter.replaced(trained)
  behind = need.gradients + _in_both_dtypes(placed.get("embedding", {}), 4)
  if program.step.optimizer.rule.whole and not program.config.training.optimizer_in_backward:
    behind = max(behind, need.gradients + _in_both_dtypes(trained, 0))
  return int(max(loss, backward, behind))


def _in_both_dtypes(arrays: Any, float32: int) -> int:
  """Bytes of a device's part of arrays in float32, and again as they are stored; ``float32``: of a number that is stored so."""
  size = lambda dtype: 4 + (dtype.itemsize if dtype.itemsize < 4 else float32)
  return sum(numbers(x.sharding.shard_shape(x.shape)) * size(x.dtype) for x in jax.tree.leaves(arrays))


def _gradients(program: TrainProgram, weights: list[Fetched]) -> int:
  """Bytes of a part's gradients before they are scattered: one in the dtype that devices add up in, and what kernels make."""
  precision = program.config.precision
  summed = jnp.dtype("float32" if precision.reduction_dtype == "float32" else precision.dtype).itemsize
  one = max((w.numbers * summed for w in weights), default=0)
  made = [w.bytes for w in weights if w.experts]
  if program.model.ways("expert") > 1:  # tokens travel: gradients of the first round, and sums over the rounds behind it
    return one + 2 * sum(made)
  return one + max(made, default=0)
