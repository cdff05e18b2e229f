"""What a TPU chip holds when most is in use, by arithmetic on shapes and shardings: the terms that its compiled programs show.

Beside ``memory.estimate``: arrays lie in tiles, weights that are split come whole a layer at a time, and the largest gradient
is whole before it is scattered. docs/compile.md has the sums beside what libtpu laid out.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.tiles import numbers
from maxtext_like.training.fetched import TABLE, Fetched, by_part
from maxtext_like.training.memory import MemoryEstimate
from maxtext_like.training.program import TrainProgram


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
