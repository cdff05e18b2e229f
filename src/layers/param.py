"""Declared arrays: a layer declares each array once as a ``Param``; arrays, shardings, masks and stacks are derived from it.

A *spec* below is a nested dict whose leaves are ``Param``.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from maxtext_like.layers import tpu_layout
from maxtext_like.layers.partition import Mesh, free_mesh, on_devices
from maxtext_like.layers.sharding_rules import RULES, Rules

Spec = Any  # a nested dict of Param

# Rows of at most this many numbers get their random bits from one program together. With a program each gemma3-tiny's 54 arrays
# compile in 18 s instead of 5 on a CPU, deepseek3.2-tiny's 42 in 26 s instead of 7; a large model has few such rows.
SMALL_ROW = 1 << 17


def _symmetric(bits: jax.Array, bound: float) -> jax.Array:
  """Uniform float32 numbers in (-bound, bound) from uint32 bits, neither end included."""
  unit = (bits >> 9).astype(jnp.float32) * 2.0**-23 + 2.0**-24
  return (2 * unit - 1) * bound


@dataclasses.dataclass(frozen=True)
class FanIn:
  """Normal numbers cut at 2 standard deviations, of variance gain ** 2 / (product of the sizes of ``axes``).

  The axes are those that a product sums over (LeCun et al. 1998): with inputs of variance 1 it has standard deviation ``gain``.
  """

  axes: tuple[int, ...]
  gain: float = 1.0

  def __call__(self, bits: jax.Array) -> jax.Array:
    """float32 numbers of the shape of uint32 bits, the shape of one row."""
    size = math.prod(bits.shape[a] for a in self.axes)
    # Cut at 2, a standard normal number has the standard deviation 0.8796.
    return jax.lax.erf_inv(_symmetric(bits, math.erf(2**0.5))) * (2**0.5 / 0.87962566103423978 * size**-0.5 * self.gain)


@dataclasses.dataclass(frozen=True)
class Normal:
  """Normal numbers of this standard deviation."""

  stddev: float

  def __call__(self, bits: jax.Array) -> jax.Array:
    """float32 numbers of the shape of uint32 bits."""
    return jax.lax.erf_inv(_symmetric(bits, 1.0)) * (2**0.5 * self.stddev)


@dataclasses.dataclass(frozen=True)
class Constant:
  """The same number everywhere."""

  value: float

  def __call__(self, bits: jax.Array) -> jax.Array:
    """float32 numbers of the shape of the bits, which are not looked at."""
    return jnp.full(bits.shape, self.value, jnp.float32)


Initializer = Callable[[jax.Array], jax.Array]  # from uint32 bits of one row's shape to float32 numbers


def fan_in(*axes: int, gain: float = 1.0) -> FanIn:
  """``FanIn`` of these axes."""
  return FanIn(axes, gain)


def normal(stddev: float) -> Normal:
  """``Normal`` of this standard deviation."""
  return Normal(stddev)


def constant(value: float) -> Constant:
  """``Constant`` of this value."""
  return Constant(value)


@dataclasses.dataclass(frozen=True)
class Param:
  """One declared array.

  Attributes:
    shape: sizes.
    axes: a logical axis name for each dimension; None is replicated on every device.
    dtype: storage dtype.
    init: from random uint32 bits of the array's shape (one row's, for a stack) to float32 numbers.
    trainable: False for arrays that gradients never change (buffers, the router bias of DeepSeek).
    rows: size of the leading axis of a stack, whose rows are drawn one by one; None: a single array.
    contracts: axes (of one row) that a product with this array sums over, from which a quantised weight's scales and an
      adapter's two factors follow; () for what multiplies nothing. None: those of a ``FanIn``, and () with another init.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  dtype: str = "float32"
  init: Initializer = fan_in(0)
  trainable: bool = True
  rows: int | None = None
  contracts: tuple[int, ...] | None = None

  def __post_init__(self):
    if self.contracts is None:
      object.__setattr__(self, "contracts", self.init.axes if isinstance(self.init, FanIn) else ())
    if len(self.shape) != len(self.axes):
      raise ValueError(f"Param needs one axis name for each dimension, got shape {self.shape} and axes {self.axes}")


Store = Callable[[jax.Array], Any]


def init(
  spec: Spec,
  key: jax.Array,
  box: Callable[[Param, jax.Array], Any] = lambda _, x: x,
  store: Callable[[tuple[Any, ...], Param], Store | None] = lambda path, p: None,
):
  """Arrays for a spec.

  Args:
    spec: nested dict of Param.
    key: a JAX PRNG key. A leaf's own key depends on its path alone, and a row's on the leaf's and its number, so adding a
      Param moves no other.
    box: called with each Param and its array; what it returns is stored (a face's metadata box).
    store: of the path of a leaf and its Param, what makes of one row (of a stack) the arrays that are kept in its place; None:
      it is kept as it is. One large row at a time is drawn.

  Returns:
    The same nested dict with arrays (or boxes) as leaves.
  """
  leaves, tree = jax.tree_util.tree_flatten_with_path(spec)
  codes = [zlib.crc32(jax.tree_util.keystr(path).encode()) for path, _ in leaves]
  params = [p for _, p in leaves]
  small = [i for i, p in enumerate(params) if not isinstance(p.init, Constant) and _row_size(p) <= SMALL_ROW]
  shared = dict(zip(small, _bits_together(key, [(codes[i], params[i]) for i in small]), strict=True))
  arrays = []
  for i, ((path, p), code) in enumerate(zip(leaves, codes, strict=True)):
    if isinstance(p.init, Constant):
      arrays.append(jnp.full(p.shape, p.init.value, p.dtype))
      continue
    if (kept := store(path, p)) is not None:
      arrays.append(_stored(kept, p, jax.random.fold_in(key, code), shared.get(i)))
      continue
    bits = shared[i] if i in shared else _bits_alone(jax.random.fold_in(key, code), p)
    make = p.init if p.rows is None else jax.vmap(p.init)
    arrays.append(make(bits).astype(p.dtype))
  return jax.tree_util.tree_unflatten(tree, [box(p, x) for p, x in zip(params, arrays, strict=True)])


def _stored(kept: Store, p: Param, key: jax.Array, bits: jax.Array | None) -> Any:
  """What is kept of the rows of a leaf, of its key or, where they are drawn already, its bits."""
  make = lambda bits: kept(p.init(bits).astype(p.dtype))
  if p.rows is None:
    return make(jax.random.bits(key, p.shape) if bits is None else bits)
  if bits is not None:
    return jax.lax.map(make, bits)
  return jax.lax.map(lambda row: make(jax.random.bits(jax.random.fold_in(key, row), p.shape[1:])), jnp.arange(p.rows))


def _row_size(p: Param) -> int:
  return math.prod(p.shape if p.rows is None else p.shape[1:])


def _bits_alone(key: jax.Array, p: Param) -> jax.Array:
  """uint32 bits of one leaf's shape; each row of a stack from its own key."""
  if p.rows is None:
    return jax.random.bits(key, p.shape)
  keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(p.rows))
  return jax.vmap(lambda k: jax.random.bits(k, p.shape[1:]))(keys)


def _bits_together(key: jax.Array, leaves: list[tuple[int, Param]]) -> list[jax.Array]:
  """uint32 bits for several leaves, of (code, Param) each: number n of row r of a leaf is a function of code, r and n."""
  if not leaves:
    return []
  order = sorted(range(len(leaves)), key=lambda i: _row_size(leaves[i][1]))
  rows = [(code, row, _row_size(p)) for code, p in (leaves[i] for i in order) for row in range(p.rows or 1)]
  fold = jax.vmap(jax.random.fold_in)
  row_codes, row_numbers, sizes = (np.array(column, np.uint32) for column in zip(*rows, strict=True))
  row_keys = jax.random.key_data(fold(fold(jnp.broadcast_to(key, len(rows)), row_codes), row_numbers))
  keys, numbers, begin = [], [], 0
  for size, count in zip(*(x.tolist() for x in np.unique(sizes, return_counts=True)), strict=True):
    mine = row_keys[begin : begin + count, None]
    keys.append(jnp.broadcast_to(mine, (count, size, mine.shape[-1])).reshape(count * size, -1))
    numbers.append(jnp.broadcast_to(jnp.arange(size), (count, size)).reshape(-1))
    begin += count
  every_key = jax.random.wrap_key_data(jnp.concatenate(keys), impl=jax.random.key_impl(key))
  # A folded key is itself the output of the generator: 64 random bits for each number, of which one half is used. Without the
  # barrier XLA compiles the generator's end into each leaf's own kernel.
  bits = jax.lax.optimization_barrier(jax.random.key_data(fold(every_key, jnp.concatenate(numbers)))[:, 0])
  parts, begin = {}, 0
  for i in order:
    end = begin + math.prod(leaves[i][1].shape)
    parts[i] = bits[begin:end].reshape(leaves[i][1].shape)
    begin = end
  return [parts[i] for i in range(len(leaves))]


def stack(spec: Spec, n: int) -> Spec:
  """The spec of n copies of a layer on a new leading "layers" axis, the form that ``jax.lax.scan`` reads.

  A deeper stack begins with the same rows.
  """
  return jax.tree.map(lambda p: dataclasses.replace(p, shape=(n, *p.shape), axes=("layers", *p.axes), rows=n), spec)


def abstract(spec: Spec, mesh: Mesh | None = None, rules: Rules = RULES):
  """``jax.ShapeDtypeStruct`` for every leaf, with its sharding when a mesh is given."""
  if mesh is None:
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.dtype)), spec)
  return jax.tree.map(
    lambda p, s: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.dtype), sharding=s), spec, shardings(spec, mesh, rules)
  )


def checked(spec: Spec, params):
  """``params`` itself, if it has the names and shapes of the spec.

  Raises:
    ValueError: lists every name that is missing, unknown or has another shape.
  """
  want = {jax.tree_util.keystr(path): p.shape for path, p in jax.tree_util.tree_leaves_with_path(spec)}
  have = {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
  wrong = [f"{name} has shape {have[name]}, expected {want[name]}" for name in want if have.get(name, want[name]) != want[name]]
  wrong += [f"{name} is missing" for name in want if name not in have]
  wrong += [f"{name} is not a parameter of this layer" for name in have if name not in want]
  if wrong:
    raise ValueError("parameters do not fit the layer: " + "; ".join(wrong))
  return params


def shardings(spec: Spec, mesh: Mesh, rules: Rules = RULES):
  """A ``jax.sharding.NamedSharding`` for every leaf."""
  return jax.tree.map(lambda p: jax.sharding.NamedSharding(mesh, rules.spec(p.shape, p.axes, mesh)), spec)


def in_stored_order(arrays, spec: Spec, rules: Rules = RULES):
  """A tree of arrays that are split as a spec's, such as gradients, with their axes in the order in which the arguments of a
  program for TPUs lie (``tiles.order``); as they are where no mesh is set.

  A gradient of a table lies as declared when rows are added to it. The compiler would turn the parameter, its moments and what
  becomes of them for the update, all of them whole and all at a time; so it turns the gradient.
  """
  mesh = free_mesh()
  if mesh is None:
    return arrays

  def ordered(x, p: Param):
    spec = rules.spec(p.shape, p.axes, mesh)
    own = jax.sharding.NamedSharding(mesh, spec).shard_shape(p.shape)
    # Inside shard_map: the partitioner would gather an array that it is to split itself.
    return on_devices(lambda x: with_layout_constraint(x, Layout(tpu_layout.order(own))), mesh, spec, spec)(x)

  return jax.tree.map(ordered, arrays, spec)


def count(spec: Spec) -> int:
  """The number of elements of all arrays of a spec."""
  return sum(math.prod(p.shape) for p in jax.tree.leaves(spec))
