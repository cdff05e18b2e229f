"""Logical axes to mesh axes, in one table; the constraint that layers put on activations; marks for the inside of shard_map.

The mesh has the axes ``data`` (batch) and ``fsdp`` (batch and parameters). Tensor, expert and context axes go into this
same table: ``"heads": "tensor"``, ``"expert": "expert"``, ``"sequence": "context"``.
"""

from collections.abc import Iterable

import jax
from jax.sharding import PartitionSpec

MESH_AXES = ("data", "fsdp")

RULES: dict[str, str | tuple[str, ...] | None] = {
  # Activations.
  "batch": ("data", "fsdp"),
  "sequence": None,
  # Parameters: the first axis of a parameter that maps to a mesh axis takes it.
  "embed": "fsdp",
  "q_lora": "fsdp",
  "kv_lora": "fsdp",
  "per_layer": "fsdp",
  "vocab": None,
  "heads": None,
  "kv_heads": None,
  "head_dim": None,
  "mlp": None,
  "expert": None,
  "layers": None,
}


def batch_axes(mesh) -> tuple[str, ...]:
  """The mesh axes with more than one device over which the batch is split."""
  axes = RULES["batch"]
  return tuple(a for a in (axes or ()) if mesh.shape.get(a, 1) > 1)


def constrain_batch(x: jax.Array) -> jax.Array:
  """x with its leading (batch) dimension split over the mesh in use; x itself when no mesh is set or it does not divide."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  axes = batch_axes(mesh)
  ways = 1
  for a in axes:
    ways *= mesh.shape[a]
  if not axes or x.shape[0] % ways:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(axes))


def whole(x: jax.Array) -> jax.Array:
  """x on every device of the mesh in use, so that any process can read it; x itself when no mesh is set."""
  mesh = jax.sharding.get_abstract_mesh()
  return x if mesh.empty else jax.lax.with_sharding_constraint(x, PartitionSpec())


def varying_axes(x: jax.Array) -> frozenset[str]:
  """The manual mesh axes over which x may differ between devices; none outside of shard_map."""
  aval = jax.typeof(x)
  manual = getattr(aval, "manual_axis_type", None)
  return frozenset(manual.varying if manual is not None else getattr(aval, "vma", ()))


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
  """x marked as varying over the manual mesh axes (inside shard_map), so that it can stand beside values that vary."""
  missing = tuple(sorted(frozenset(axes) - varying_axes(x)))
  return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """The arrays, each varying over the manual axes that any of them varies over.

  For the arguments of a written-out derivative: inside shard_map it returns every gradient as varying, and the mark is what
  adds up over the devices the gradient of an array that all of them share.
  """
  axes = frozenset().union(*map(varying_axes, arrays))
  return tuple(vary(x, axes) for x in arrays)
