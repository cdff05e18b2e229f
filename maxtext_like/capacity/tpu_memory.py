"""The peak memory of a TPU chip, computed from shapes and shardings with the terms that its compiled programs show.

In addition to ``memory.estimate``: arrays are padded to tiles, sharded weights are gathered one layer at a time, and the
largest gradient is complete before it is scattered. docs/results/memory.md compares the results with libtpu's layouts.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.capacity.gathered_weights import TABLE, GatheredWeight, by_part
from maxtext_like.capacity.memory import MemoryEstimate
from maxtext_like.layers.partition import axes_of
from maxtext_like.layers.tpu_layout import as_declared, numbers, order
from maxtext_like.training.step.program import TrainProgram


def in_use(program: TrainProgram, need: MemoryEstimate, kept: int, again: float, weights: list[GatheredWeight]) -> int:
  """Return the bytes in use, in addition to a program's arguments, at the largest of four phases.

  The phases are:
  - the loss: the complete table of the logits, and the memory of a chunk of them. If positions are sharded, also the table's
    complete float32 gradient and the sum that it is added to;
  - the backward pass of a layer: the gradients of all layers, the layer's activations, and for its largest part the weights and
    the largest gradient before it is scattered;
  - after the layers: all gradients, the gradient of the embedding's rows once more in float32 and as stored, and that of
    another table (``_rows_added``);
  - the update: the gradients and the updates of all arrays, if the optimizer's rule needs complete arrays and the updates are
    checked.

  A loop over microbatches also holds a transposed copy of a table whose layout differs from the order in which its rows are
  read.

  Args:
    program: program of the run.
    need: its estimate.
    kept: activations kept for the backward pass.
    again: a layer's own activations, which are recomputed.
    weights: ``gathered_weights``.
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
  # The phases of the docstring; the largest one counts.
  loss = kept + table + max(need.logits, *(w.assembly_bytes for w in weights if w.part == TABLE), 0)
  backward = kept + need.gradients + again + need.dequantized
  if read:
    fullest = max(read, key=lambda part: read[part])
    own = [w for w in weights if w.part == fullest]
    backward += read[fullest] + max(w.assembly_bytes for w in own) + _gradients(program, [w for w in own if w.trained])
  rows = _rows_added(program, placed.get("ple", {}).get("table"))
  behind = need.gradients + _in_both_dtypes(placed.get("embedding", {}), 4) + rows
  if program.step.optimizer.rule.whole and program.step.checked and not program.config.training.optimizer_in_backward:
    behind = max(behind, need.gradients + _in_both_dtypes(trained, 0) + rows)
  return int(max(loss, backward, behind))


def _own(table: jax.ShapeDtypeStruct) -> tuple[int, ...]:
  assert table.sharding is not None
  return table.sharding.shard_shape(table.shape)


def _is_turned(table: jax.ShapeDtypeStruct) -> bool:
  """Return True if the table's layout differs from the declared order, in which its rows are read and added."""
  return order(_own(table)) != tuple(range(table.ndim))


def _rows_added(program: TrainProgram, table: jax.ShapeDtypeStruct | None) -> int:
  """Return the bytes of the gradient of a table that is only looked up, in addition to the stored gradient. It is float32 until
  it is transposed or rounded. If other devices add to it, a second copy exists after the sum until it is rounded."""
  if table is None:
    return 0
  narrow = max(0, 4 - table.dtype.itemsize)
  model, rules = program.model, program.model.decoder.cfg.rules
  split = {axis for entry in table.sharding.spec for axis in axes_of(entry)}
  summed = {*rules.mesh_axes("batch", model.mesh), *rules.mesh_axes("sequence", model.mesh)} - split
  added = 4 * as_declared(_own(table)) if narrow or summed or _is_turned(table) else 0
  return added + (narrow * numbers(_own(table)) if summed else 0)


def _in_both_dtypes(arrays: Any, float32: int) -> int:
  """Return the bytes of a device's part of arrays in float32 plus as stored; ``float32`` is the extra size of an element that
  is stored as float32."""
  size = lambda dtype: 4 + (dtype.itemsize if dtype.itemsize < 4 else float32)
  return sum(numbers(x.sharding.shard_shape(x.shape)) * size(x.dtype) for x in jax.tree.leaves(arrays))


def _gradients(program: TrainProgram, weights: list[GatheredWeight]) -> int:
  """Return the bytes of a part's gradients before they are scattered: one in the dtype of the reduction, and those that kernels
  compute."""
  precision = program.config.precision
  summed = jnp.dtype("float32" if precision.reduction_dtype == "float32" else precision.dtype).itemsize
  one = max((w.numbers * summed for w in weights), default=0)
  made = [w.bytes for w in weights if w.experts]
  # tokens are exchanged: gradients of the first round, and their sums over the other rounds
  if program.model.ways("expert") > 1:
    return one + 2 * sum(made)
  return one + max(made, default=0)
