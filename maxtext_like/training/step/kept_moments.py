"""Optimizer state of a run that resumes with other trained parameters: stored moments are kept, missing ones start at zero.

A restored state has ``jax.ShapeDtypeStruct`` for each moment that the checkpoint lacks, because its run did not train it.
"""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from maxtext_like.checkpoint.compatibility import MOMENTS
from maxtext_like.sharding import host_memory
from maxtext_like.training.optimizers.adamw import AdamW
from maxtext_like.training.optimizers.dynamic8 import Blocks
from maxtext_like.training.optimizers.optimizer import Optimizer

Tree = Any


def is_missing(x: Any) -> bool:
  """Return True if a leaf of a restored state was not in the checkpoint."""
  return isinstance(x, jax.ShapeDtypeStruct)


def summary(stored: Mapping[str, Any], state: Tree, optimizer: Optimizer) -> str | None:
  """Return a line about the optimizer state that a resumed run keeps; None if the same parameters are trained.

  Args:
    stored: the leaves of the checkpoint by name.
    state: restored state of the run.
    optimizer: optimizer of the run.
  """
  # Compare the stored names with the leaves that this run has.
  leaves = jax.tree.leaves(state[MOMENTS])
  new = sum(map(is_missing, leaves))
  kept = len(leaves) - new
  dropped = sum(name.startswith(f"{MOMENTS}.") for name in stored) - kept
  if not (new or dropped):
    return None
  rule = optimizer.rule
  # New moments lower Adam's common step count, see ``_shortened``.
  count = f"; Adam's step count continues from {rule.memory} or less" if new and isinstance(rule, AdamW) else ""
  return (
    f"note    optimizer state: {kept} arrays kept, {new} start at zero (not trained so far), {dropped} dropped (not trained "
    f"from here on){count}"
  )


def completed(state: Tree, params: Tree, optimizer: Optimizer) -> Tree:
  """Fill in zeros for the moments that were not in the checkpoint.

  Args:
    state: optimizer state, with ``jax.ShapeDtypeStruct`` (and its sharding) for each missing moment.
    params: the trained parameters (None elsewhere).
    optimizer: optimizer of the run.
  """
  leaves, structure = jax.tree.flatten(state)
  missing = [i for i, x in enumerate(leaves) if is_missing(x)]
  if not missing:
    return state

  # Initialize only the missing leaves, on the devices where they belong.
  def begun(params: Tree) -> list[jax.Array]:
    first = jax.tree.leaves(optimizer.init(params))
    return [first[i] for i in missing]

  for i, x in zip(missing, jax.jit(begun, out_shardings=[leaves[i].sharding for i in missing])(params), strict=True):
    leaves[i] = x
  # Adam's step count must fit the new moments too.
  whole = jax.tree.unflatten(structure, leaves)
  rule = optimizer.rule
  if not isinstance(rule, AdamW):
    return whole
  is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)
  return jax.tree.map(lambda node: _shortened(node, rule) if is_adam(node) else node, whole, is_leaf=is_adam)


def _shortened(state: Any, rule: AdamW) -> Any:
  """Limit the count of an ``optax.ScaleByAdamState`` to ``rule.memory``, with unchanged estimates of both moments.

  Adam has one count for all parameters and divides moments by 1 - b ** count, because they start at zero. New moments with an
  old count are divided by 1: with adam_b2=0.999 the first updates of these parameters would be 6 times too large. With the
  lower count they are within 12 % of the correct size. The old moments are rescaled and give the same updates as before.
  """
  # Nothing to do if the count is low anyway.
  count = int(state.count)
  fewer = min(count, rule.memory)
  if fewer == count:
    return state

  # Keep m / (1 - b ** count) the same with the smaller count. Moments in 8 bits are rescaled by their block scales.
  def scaled(moments: Tree, b: float) -> Tree:
    factor = (1 - b**fewer) / (1 - b**count)
    is_stored = lambda x: isinstance(x, Blocks)
    return jax.tree.map(
      lambda x: x._replace(scale=_times(x.scale, factor)) if is_stored(x) else _times(x, factor), moments, is_leaf=is_stored
    )

  lower = jax.device_put(jax.numpy.asarray(fewer, state.count.dtype), state.count.sharding)
  return state._replace(count=lower, mu=scaled(state.mu, rule.b1), nu=scaled(state.nu, rule.b2))


def _times(x: jax.Array, factor: float) -> jax.Array:
  """Multiply an array by a number. Memory kind and dtype stay the same."""
  product = (host_memory.on_device(x).astype("float32") * factor).astype(x.dtype)
  return jax.device_put(product, x.sharding)
