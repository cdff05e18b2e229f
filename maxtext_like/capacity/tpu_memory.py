"""What a TPU chip holds when most is in use, by arithmetic on shapes and shardings: the terms that its compiled programs show.

Beside ``memory.estimate``: arrays lie in tiles, weights that are split come whole a layer at a time, and the largest gradient
is whole before it is scattered. docs/results/memory.md has the sums beside what libtpu laid out.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.capacity.gathered_weights import TABLE, Fetched, by_part
from maxtext_like.capacity.memory import MemoryEstimate
from maxtext_like.layers.partition import axes_of
from maxtext_like.layers.tpu_layout import as_declared, numbers, order
from maxtext_like.training.step.program import TrainProgram


def in_use(program: TrainProgram, need: MemoryEstimate, kept: int, again: float, weights: list[Fetched]) -> int:
  """Bytes beside a program's arguments at the fullest of four instants.

  In the loss: the table of the logits, whole, and what a piece of them takes; where positions are split, also the table's
  gradient, whole in float32, and what it is added to. In the backward pass of a layer: the gradients of
  all layers, the layer's activations, and of its fullest part the weights and the largest gradient, before it is scattered.
  Behind it: all gradients, and once more that of the embedding's rows, in float32 and as it is stored, and what another
  table's takes (``_rows_added``); in the update they and the steps of all arrays, where the optimizer's rule needs them whole
  and they are looked at.
  A loop over microbatches holds a table turned that lies in another order than its rows are read in.

  Args:
    program: of the run.
    need: its estimate.
    kept: what the forward pass keeps for the backward pass.
    again: a layer's own activations, computed again.
    weights: ``fetched``.
  """
  trained = program.selection.split(program.abstract_state["params"])[0]
  placed = trained if program.adapter is None else program.adapter.replaced(trained)
  read = by_part(weights)
  table = read.pop(TABLE, 0)
  if program.model.ways("sequence") > 1:
    table += sum(4 * (w.numbers + w.numbers // w.ways) for w in weights if w.part == TABLE and w.trained)
  by_rows = program.abstract_state["params"].get("ple", {}).get("table")
  if by_rows is not None and _is_turned(by_rows) and program.config.training.gradient_accumulation_steps > 1:
    kept += as_declared(_own(by_rows)) * by_rows.dtype.itemsize
  loss = kept + table + max(need.logits, *(w.arriving for w in weights if w.part == TABLE), 0)
  backward = kept + need.gradients + again + need.dequantised
  if read:
    fullest = max(read, key=lambda part: read[part])
    own = [w for w in weights if w.part == fullest]
    backward += read[fullest] + max(w.arriving for w in own) + _gradients(program, [w for w in own if w.trained])
  rows = _rows_added(program, placed.get("ple", {}).get("table"))
  behind = need.gradients + _in_both_dtypes(placed.get("embedding", {}), 4) + rows
  if program.step.optimizer.rule.whole and program.step.careful and not program.config.training.optimizer_in_backward:
    behind = max(behind, need.gradients + _in_both_dtypes(trained, 0) + rows)
  return int(max(loss, backward, behind))


def _own(table: jax.ShapeDtypeStruct) -> tuple[int, ...]:
  assert table.sharding is not None
  return table.sharding.shard_shape(table.shape)


def _is_turned(table: jax.ShapeDtypeStruct) -> bool:
  """Rows are read and added in the declared order, and the table lies in another."""
  return order(_own(table)) != tuple(range(table.ndim))


def _rows_added(program: TrainProgram, table: jax.ShapeDtypeStruct | None) -> int:
  """Bytes of the gradient of a table whose rows are read and no more, beside the gradient as it is stored: float32, until it is
  turned or rounded, and where other devices add to it once more behind the sum, until it is rounded."""
  if table is None:
    return 0
  narrow = max(0, 4 - table.dtype.itemsize)
  model, rules = program.model, program.model.decoder.cfg.rules
  split = {axis for entry in table.sharding.spec for axis in axes_of(entry)}
  summed = {*rules.mesh_axes("batch", model.mesh), *rules.mesh_axes("sequence", model.mesh)} - split
  added = 4 * as_declared(_own(table)) if narrow or summed or _is_turned(table) else 0
  return added + (narrow * numbers(_own(table)) if summed else 0)


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
