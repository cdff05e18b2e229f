"""The weights that a device gathers from other devices before it multiplies by them, from shapes and shardings."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxtext_like.layers.param import path_keys
from maxtext_like.layers.partition import axes_of
from maxtext_like.layers.sharding_rules import GATHERED
from maxtext_like.layers.tpu_layout import ROWS, filled
from maxtext_like.models.adapter import model_path
from maxtext_like.training.step.program import TrainProgram

TABLE = "table"
"""The part of ``GatheredWeight`` that computes the logits."""


@dataclass(frozen=True, kw_only=True)
class GatheredWeight:
  """A sharded weight that each device gathers completely before it multiplies by it. For a stacked weight, one layer.

  Attributes:
    part: "stack_0/7/layer_3/mlp", with the row in the second place; or ``TABLE``.
    axes: mesh axes that it is sharded over and gathered from.
    ways: number of devices along these axes.
    numbers: elements of the complete weight.
    bytes: bytes of the complete weight in ``dtype``, or as stored if that is not a floating-point dtype.
    assembly_bytes: bytes of a second copy, if the shards do not fill complete tiles and are assembled after the transfer; or 0.
    trained: True if it has a gradient.
    experts: True if a grouped kernel multiplies it and computes its gradient.
  """

  part: str
  axes: tuple[str, ...]
  ways: int
  numbers: int
  bytes: int
  assembly_bytes: int
  trained: bool
  experts: bool


def gathered_weights(program: TrainProgram) -> list[GatheredWeight]:
  """Return the weights that are sharded only to save memory, or over devices that process different rows."""
  mesh, params = program.model.mesh, program.abstract_state["params"]
  item = jnp.dtype(program.config.precision.dtype).itemsize
  head = "embedding" if program.model.decoder.cfg.tied else "head"
  trained = jax.tree_util.tree_leaves_with_path(program.selection.split(params)[0])
  taught = {model_path(path_keys(path)) for path, _ in trained}
  found = []
  declared = jax.tree.leaves(program.spec)
  for (path, x), p in zip(jax.tree_util.tree_leaves_with_path(params), declared, strict=True):
    keys, entries = path_keys(path), dict(enumerate(x.sharding.spec))
    # A weight is gathered along the axes that only save memory, not along those that split the work.
    split = [i for i, entry in entries.items() if "fsdp" in axes_of(entry) or (p.axes[i] in GATHERED and axes_of(entry))]
    stacked = keys[0].startswith("stack_")
    axes = axes_of(entries[split[0]]) if split else ()
    ways = math.prod(mesh.shape[axis] for axis in axes)
    if ways == 1 or not (stacked or keys[0] == head):
      continue
    # Sizes of the complete weight of one layer, and one entry per layer.
    shard = x.sharding.shard_shape(x.shape)
    rows, own = x.shape[0] if stacked else 1, shard[split[0]]
    whole = math.prod(shard) * ways // rows
    size = whole * (item if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype.itemsize)
    parts = [f"{keys[0]}/{row}/{keys[1]}/{keys[2]}" for row in range(rows)] if stacked else [TABLE]
    found += [
      GatheredWeight(
        part=part,
        axes=axes,
        ways=ways,
        numbers=whole,
        bytes=size,
        assembly_bytes=size * filled(own) // own if own % ROWS else 0,
        trained=keys in taught,
        experts="experts" in keys,
      )
      for part in parts
    ]
  return found


def by_part(weights: list[GatheredWeight]) -> dict[str, int]:
  """Return the bytes that each part of each layer gathers, and those of the table."""
  found: dict[str, int] = {}
  for weight in weights:
    found[weight.part] = found.get(weight.part, 0) + weight.bytes
  return found
