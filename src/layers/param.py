"""Declared arrays: a layer declares each array once as a ``Param``; arrays, shardings, masks and stacks are derived from it.

A *spec* below is a nested dict whose leaves are ``Param``.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn.initializers import variance_scaling

Spec = Any  # a nested dict of Param
Rules = Mapping[str, str | tuple[str, ...] | None]  # logical axis -> mesh axis or axes


def fan_in(*in_axes: int) -> Callable:
  """Truncated normal with variance 1 / (product of the input axes' sizes); the axes are those that a product sums over."""

  def initializer(key, shape, dtype):
    ins = tuple(a % len(shape) for a in in_axes)
    outs = tuple(a for a in range(len(shape)) if a not in ins)
    # Every other axis is an output axis for JAX's purposes: fan-in mode reads the input axes only.
    return variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=ins, out_axis=outs)(key, shape, dtype)

  return initializer


def normal(stddev: float) -> Callable:
  """Normal numbers of this standard deviation."""
  return jax.nn.initializers.normal(stddev)


def constant(value: float) -> Callable:
  """The same number everywhere."""
  return lambda key, shape, dtype: jnp.full(shape, value, dtype)


@dataclasses.dataclass(frozen=True)
class Param:
  """One declared array.

  Attributes:
    shape: sizes.
    axes: a logical axis name for each dimension; None is replicated on every device.
    dtype: storage dtype.
    init: function of (key, shape, dtype).
    trainable: False for arrays that gradients never change (buffers, the router bias of DeepSeek).
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  dtype: str = "float32"
  init: Callable = fan_in(0)
  trainable: bool = True

  def __post_init__(self):
    if len(self.shape) != len(self.axes):
      raise ValueError(f"Param needs one axis name for each dimension, got shape {self.shape} and axes {self.axes}")


def _leaf_key(key: jax.Array, path) -> jax.Array:
  return jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))


def init(spec: Spec, key: jax.Array, box: Callable[[Param, jax.Array], Any] = lambda _, x: x):
  """Arrays for a spec.

  Args:
    spec: nested dict of Param.
    key: a JAX PRNG key. A leaf's own key depends on its path alone, so adding a Param moves no other.
    box: called with each Param and its array; what it returns is stored (a face's metadata box).

  Returns:
    The same nested dict with arrays (or boxes) as leaves.
  """

  def leaf(path, p):
    return box(p, p.init(_leaf_key(key, path), p.shape, jnp.dtype(p.dtype)))

  return jax.tree_util.tree_map_with_path(leaf, spec)


def stack(spec: Spec, n: int) -> Spec:
  """The spec of n copies of a layer on a new leading "layers" axis, the form that ``jax.lax.scan`` reads.

  Row i is drawn from its own key, so a deeper stack begins with the same rows.
  """

  def leaf(p: Param) -> Param:
    def rows(key, shape, dtype):
      keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(n))
      return jax.vmap(lambda k: p.init(k, p.shape, dtype))(keys)

    return dataclasses.replace(p, shape=(n, *p.shape), axes=("layers", *p.axes), init=rows)

  return jax.tree.map(leaf, spec)


def abstract(spec: Spec, mesh: jax.sharding.Mesh | None = None, rules: Rules | None = None):
  """``jax.ShapeDtypeStruct`` for every leaf, with its sharding when a mesh is given."""
  if mesh is None:
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.dtype)), spec)
  return jax.tree.map(
    lambda p, s: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.dtype), sharding=s), spec, shardings(spec, mesh, rules)
  )


def partition_spec(p: Param, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, rules: Rules) -> jax.sharding.PartitionSpec:
  """The mesh axes of each dimension of one Param.

  A mesh axis shards one dimension at most (the first that asks for it) and only where it divides the size: a dimension
  that cannot be split evenly is replicated.
  """
  taken: set[str] = set()
  entries = []
  for size, axis in zip(p.shape, p.axes, strict=True):
    wanted = rules.get(axis) if axis else None
    names = tuple(n for n in ((wanted,) if isinstance(wanted, str) else wanted or ()) if n in mesh.shape)
    names = tuple(n for n in names if n not in taken and mesh.shape[n] > 1)
    ways = 1
    for n in names:
      ways *= mesh.shape[n]
    if names and size % ways == 0:
      taken.update(names)
      entries.append(names[0] if len(names) == 1 else names)
    else:
      entries.append(None)
  while entries and entries[-1] is None:
    entries.pop()
  return jax.sharding.PartitionSpec(*entries)


def shardings(spec: Spec, mesh: jax.sharding.Mesh, rules: Rules | None = None):
  """A ``jax.sharding.NamedSharding`` for every leaf. ``rules`` defaults to ``maxtext_like.layers.partition.RULES``."""
  from maxtext_like.layers.partition import RULES

  table = RULES if rules is None else rules
  return jax.tree.map(lambda p: jax.sharding.NamedSharding(mesh, partition_spec(p, mesh, table)), spec)


def count(spec: Spec) -> int:
  """The number of elements of all arrays of a spec."""
  total = 0
  for p in jax.tree.leaves(spec):
    size = 1
    for s in p.shape:
      size *= s
    total += size
  return total
