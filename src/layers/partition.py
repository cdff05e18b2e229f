"""Where activations lie on the mesh in use; marks for the inside of shard_map. How arrays are split is in rules.py."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from maxtext_like.layers.rules import Rules

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


def by_token(rules: Rules, function: Callable[..., Any], shared: Any, *arrays: jax.Array) -> Any:
  """function(shared, *arrays), run by every device on its own tokens.

  For what the partitioner does not split by itself: it gathers all tokens for a top_k (not on TPU).

  Args:
    rules: how tokens lie on the mesh in use.
    function: of arrays [B, T, ...] to a pytree of such arrays; each token's result depends on that token alone.
    shared: a pytree that all devices have.
    arrays: [B, T, ...].
  """
  mesh = jax.sharding.get_abstract_mesh()
  tokens = PartitionSpec() if mesh.empty else rules.spec(arrays[0].shape[:2], ("batch", "sequence"), mesh)
  axes = [a for entry in tokens if entry for a in ((entry,) if isinstance(entry, str) else entry)]
  if not axes:
    return function(shared, *arrays)
  own = lambda shared, *arrays: function(jax.tree.map(lambda w: vary(w, axes), shared), *arrays)
  specs = (PartitionSpec(), *(tokens,) * len(arrays))
  return jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=tokens)(shared, *arrays)
