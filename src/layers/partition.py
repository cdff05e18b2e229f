"""Where activations lie on the mesh in use; marks for the inside of shard_map. How arrays are split is in rules.py."""

from collections.abc import Iterable

import jax
from jax.sharding import PartitionSpec

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def on_every_device(x: jax.Array) -> jax.Array:
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
