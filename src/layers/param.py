"""``Param``: the declaration of an array. Initial arrays, shardings, masks and stacks are derived from these declarations.

A *spec* in this file is a nested dict with ``Param`` leaves.
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
from maxtext_like.layers.partition import Mesh, on_devices
from maxtext_like.layers.sharding_rules import RULES, Rules, free_mesh

Spec = Any  # a nested dict of Param

# Rows of at most this many elements get their random bits from one shared program. With one program for each array, the 54
# arrays of gemma3-tiny compile in 18 s instead of 5 s on a CPU, and the 42 of deepseek3.2-tiny in 26 s instead of 7 s. A large
# model has few rows that are this small.
SMALL_ROW = 1 << 17


def _symmetric(bits: jax.Array, bound: float) -> jax.Array:
  """Convert uint32 bits to uniform float32 numbers in the open interval (-bound, bound)."""
  unit = (bits >> 9).astype(jnp.float32) * 2.0**-23 + 2.0**-24
  return (2 * unit - 1) * bound


@dataclasses.dataclass(frozen=True)
class FanIn:
  """Normal numbers truncated at 2 standard deviations, with variance gain ** 2 / (product of the sizes of ``axes``).

  ``axes`` are the axes that a product with this array sums over. Inputs of variance 1 then give a product with standard
  deviation ``gain`` (LeCun et al. 1998). ``parts`` divides the last axis: each (size, factor)
  multiplies the next ``size`` entries by ``factor``. The sizes add up to the axis.
  """

  axes: tuple[int, ...]
  gain: float = 1.0
  parts: tuple[tuple[int, float], ...] = ()

  def __call__(self, bits: jax.Array) -> jax.Array:
    """Return float32 numbers in the shape of the uint32 bits, which is the shape of one row."""
    size = math.prod(bits.shape[a] for a in self.axes)
    # A standard normal distribution truncated at 2 has the standard deviation 0.8796.
    drawn = jax.lax.erf_inv(_symmetric(bits, math.erf(2**0.5))) * (2**0.5 / 0.87962566103423978 * size**-0.5 * self.gain)
    if not self.parts:
      return drawn
    sizes, factors = zip(*self.parts, strict=True)
    return drawn * np.repeat(np.asarray(factors, np.float32), sizes)


@dataclasses.dataclass(frozen=True)
class Normal:
  """Normal numbers with a fixed standard deviation."""

  stddev: float

  def __call__(self, bits: jax.Array) -> jax.Array:
    """Return float32 numbers in the shape of the uint32 bits."""
    return jax.lax.erf_inv(_symmetric(bits, 1.0)) * (2**0.5 * self.stddev)


@dataclasses.dataclass(frozen=True)
class Constant:
  """The same number for every element."""

  value: float

  def __call__(self, bits: jax.Array) -> jax.Array:
    """Return float32 numbers in the shape of the bits. The values of the bits are not used."""
    return jnp.full(bits.shape, self.value, jnp.float32)


Initializer = Callable[[jax.Array], jax.Array]  # maps uint32 bits in the shape of one row to float32 numbers


def fan_in(*axes: int, gain: float = 1.0, parts: tuple[tuple[int, float], ...] = ()) -> FanIn:
  """Return ``FanIn`` for these axes."""
  return FanIn(axes, gain, parts)


def normal(stddev: float) -> Normal:
  """Return ``Normal`` with this standard deviation."""
  return Normal(stddev)


def constant(value: float) -> Constant:
  """Return ``Constant`` with this value."""
  return Constant(value)


@dataclasses.dataclass(frozen=True)
class Param:
  """One declared array.

  Attributes:
    shape: sizes of the dimensions.
    axes: logical axis name of each dimension. A dimension named None is replicated on every device.
    dtype: storage dtype.
    init: maps random uint32 bits in the shape of the array (of one row, for a stack) to float32 numbers.
    trainable: False for arrays that gradients never change (buffers, the router bias of DeepSeek).
    rows: size of the leading axis of a stack, whose rows are drawn one by one; None for a single array.
    contracts: axes (of one row) that a product with this array sums over. The scales of a quantized weight and the two factors
      of an adapter follow from them. () if no product multiplies by the array. None: the axes of ``init`` if it is a
      ``FanIn``, else ().
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  dtype: str = "float32"
  init: Initializer = fan_in(0)
  trainable: bool = True
  rows: int | None = None
  contracts: tuple[int, ...] | None = None

  def __post_init__(self):
    # A FanIn initializer knows the summed axes.
    if self.contracts is None:
      object.__setattr__(self, "contracts", self.init.axes if isinstance(self.init, FanIn) else ())
    if len(self.shape) != len(self.axes):
      raise ValueError(
        f"Param: shape {self.shape} and axes {self.axes} differ in length\n  fix: give one axis name or None for each dimension"
      )


Store = Callable[[jax.Array], Any]  # maps the array of one row to the arrays that are kept for it


def init(
  spec: Spec,
  key: jax.Array,
  box: Callable[[Param, jax.Array], Any] = lambda _, x: x,
  store: Callable[[tuple[Any, ...], Param], Store | None] = lambda path, p: None,
):
  """Draw the arrays of a spec.

  Args:
    spec: nested dict of Param.
    key: a JAX PRNG key. The key of a leaf depends on its path only, and the key of a row on its leaf and its index. Adding a
      Param therefore changes no other array.
    box: called with each Param and its array; its result is stored. A module wrapper adds its metadata here.
    store: called with the path of a leaf and its Param. It returns a function that converts one row to the arrays to keep, or
      None to keep the row unchanged. Large rows are drawn one at a time.

  Returns:
    A nested dict like ``spec``, with arrays (or boxes) as leaves.
  """
  # Draw the bits of all small leaves with one program.
  leaves, tree = jax.tree_util.tree_flatten_with_path(spec)
  codes = [zlib.crc32(jax.tree_util.keystr(path).encode()) for path, _ in leaves]
  params = [p for _, p in leaves]
  small = [i for i, p in enumerate(params) if not isinstance(p.init, Constant) and _row_size(p) <= SMALL_ROW]
  shared = dict(zip(small, _bits_together(key, [(codes[i], params[i]) for i in small]), strict=True))
  # Large leaves draw their own bits, but the keys of their rows come from one program too.
  large = [i for i, p in enumerate(params) if not isinstance(p.init, Constant) and i not in shared]
  keys = dict(zip(large, _row_keys(key, [(codes[i], params[i]) for i in large]), strict=True))
  # Convert bits to numbers, leaf by leaf.
  arrays = []
  for i, ((path, _), p) in enumerate(zip(leaves, params, strict=True)):
    if isinstance(p.init, Constant):
      arrays.append(jnp.full(p.shape, p.init.value, p.dtype))
      continue
    if (kept := store(path, p)) is not None:
      arrays.append(_stored(kept, p, keys.get(i), shared.get(i)))
      continue
    bits = shared[i] if i in shared else _bits_alone(keys[i], p)
    make = p.init if p.rows is None else jax.vmap(p.init)
    arrays.append(make(bits).astype(p.dtype))
  return jax.tree_util.tree_unflatten(tree, [box(p, x) for p, x in zip(params, arrays, strict=True)])


def _stored(kept: Store, p: Param, keys: jax.Array | None, bits: jax.Array | None) -> Any:
  """Draw the rows of a leaf by their keys, or use its bits if they are drawn already, and apply ``kept`` to each row."""
  make = lambda bits: kept(p.init(bits).astype(p.dtype))
  if bits is not None:
    return make(bits) if p.rows is None else jax.lax.map(make, bits)
  assert keys is not None
  if p.rows is None:
    return make(_bits_alone(keys, p))
  return jax.lax.map(lambda key: make(jax.random.bits(key, p.shape[1:])), keys)


def _row_size(p: Param) -> int:
  return math.prod(p.shape if p.rows is None else p.shape[1:])


def _row_keys(key: jax.Array, leaves: list[tuple[int, Param]]) -> list[jax.Array]:
  """Return for each leaf, passed as (code, Param), its key, or the keys of its rows for a stack.

  Deriving a key takes 200 operations. If each leaf did so, a large part of the program would consist of them. The barriers
  prevent XLA from compiling them into the kernel of every leaf. With a single barrier for all keys, XLA reused less memory on
  CPUs."""
  fold = jax.vmap(jax.random.fold_in)
  counts = [1 if p.rows is None else p.rows for _, p in leaves]
  codes = np.repeat(np.array([code for code, _ in leaves], np.uint32), counts)
  own = fold(jnp.broadcast_to(key, len(codes)), codes)
  # The key of a leaf outside the stacks is not folded with a row.
  rows = fold(own, np.concatenate([np.arange(n, dtype=np.uint32) for n in counts] or [np.zeros(0, np.uint32)]))
  begins = np.cumsum([0, *counts])
  each = zip(leaves, begins.tolist(), counts, strict=False)
  return [jax.lax.optimization_barrier(own[a] if p.rows is None else rows[a : a + n]) for (_, p), a, n in each]


def _bits_alone(keys: jax.Array, p: Param) -> jax.Array:
  """Draw uint32 bits in the shape of one leaf from its key, or from the keys of its rows."""
  if p.rows is None:
    return jax.random.bits(keys, p.shape)
  return jax.vmap(lambda key: jax.random.bits(key, p.shape[1:]))(keys)


def _bits_together(key: jax.Array, leaves: list[tuple[int, Param]]) -> list[jax.Array]:
  """Draw uint32 bits for several leaves, passed as (code, Param). An element depends only on code, row and index."""
  if not leaves:
    return []
  # Sort the leaves by row size, so that rows of one size are consecutive, and derive one key for each row.
  order = sorted(range(len(leaves)), key=lambda i: _row_size(leaves[i][1]))
  rows = [(code, row, _row_size(p)) for code, p in (leaves[i] for i in order) for row in range(p.rows or 1)]
  fold = jax.vmap(jax.random.fold_in)
  row_codes, row_numbers, sizes = (np.array(column, np.uint32) for column in zip(*rows, strict=True))
  row_keys = jax.random.key_data(fold(fold(jnp.broadcast_to(key, len(rows)), row_codes), row_numbers))
  # Repeat the key of a row for each of its elements, and number these elements.
  keys, numbers, begin = [], [], 0
  for size, count in zip(*(x.tolist() for x in np.unique(sizes, return_counts=True)), strict=True):
    mine = row_keys[begin : begin + count, None]
    keys.append(jnp.broadcast_to(mine, (count, size, mine.shape[-1])).reshape(count * size, -1))
    numbers.append(jnp.broadcast_to(jnp.arange(size), (count, size)).reshape(-1))
    begin += count
  every_key = jax.random.wrap_key_data(jnp.concatenate(keys), impl=jax.random.key_impl(key))
  # A folded key is itself an output of the generator: 64 random bits for each element, of which one half is used. The barrier
  # prevents XLA from compiling the last operations of the generator into the kernel of every leaf.
  bits = jax.lax.optimization_barrier(jax.random.key_data(fold(every_key, jnp.concatenate(numbers)))[:, 0])
  # Cut the bits into leaves again.
  parts, begin = {}, 0
  for i in order:
    end = begin + math.prod(leaves[i][1].shape)
    parts[i] = bits[begin:end].reshape(leaves[i][1].shape)
    begin = end
  return [parts[i] for i in range(len(leaves))]


def stack(spec: Spec, n: int) -> Spec:
  """Return the spec of n copies of a layer on a new leading axis "layers", which is the form that ``jax.lax.scan`` reads.

  A stack of more copies starts with the same initial rows.
  """
  return jax.tree.map(lambda p: dataclasses.replace(p, shape=(n, *p.shape), axes=("layers", *p.axes), rows=n), spec)


def abstract(spec: Spec, mesh: Mesh | None = None, rules: Rules = RULES):
  """Return a ``jax.ShapeDtypeStruct`` for every leaf, with its sharding if a mesh is passed."""
  if mesh is None:
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.dtype)), spec)
  return jax.tree.map(
    lambda p, s: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.dtype), sharding=s), spec, shardings(spec, mesh, rules)
  )


def checked(spec: Spec, params):
  """Return ``params`` if they have the names and shapes of the spec.

  Raises:
    ValueError: lists every name that is missing, unknown or has another shape.
  """
  # Compare names and shapes of both trees.
  want = {jax.tree_util.keystr(path): p.shape for path, p in jax.tree_util.tree_leaves_with_path(spec)}
  have = {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
  wrong = [f"{name} has shape {have[name]}, expected {want[name]}" for name in want if have.get(name, want[name]) != want[name]]
  wrong += [f"{name} is missing" for name in want if name not in have]
  wrong += [f"{name} is not a parameter of this layer" for name in have if name not in want]
  if wrong:
    raise ValueError("the parameters do not match the layer: " + "; ".join(wrong))
  return params


def shardings(spec: Spec, mesh: Mesh, rules: Rules = RULES):
  """Return a ``jax.sharding.NamedSharding`` for every leaf."""
  return jax.tree.map(lambda p: jax.sharding.NamedSharding(mesh, rules.spec(p.shape, p.axes, mesh)), spec)


def in_stored_order(arrays, spec: Spec, rules: Rules = RULES):
  """Return arrays with their axes in the memory order that TPU programs use for their arguments (``tpu_layout.order``).

  The arrays, such as gradients, are sharded like the spec. They are returned unchanged if no mesh is set.

  The gradient of a table is in the declared order if rows were added to it. The compiler would then transpose the parameter and
  its optimizer moments for the update, all at the same time. Transposing the gradient instead avoids these copies.
  """
  mesh = free_mesh()
  if mesh is None:
    return arrays

  def ordered(x, p: Param):
    spec = rules.spec(p.shape, p.axes, mesh)
    own = jax.sharding.NamedSharding(mesh, spec).shard_shape(p.shape)
    # Inside shard_map, because the partitioner would gather an array that has a layout constraint.
    return on_devices(lambda x: with_layout_constraint(x, Layout(tpu_layout.order(own))), mesh, spec, spec)(x)

  return jax.tree.map(ordered, arrays, spec)


def path_keys(path: tuple[Any, ...]) -> tuple[str, ...]:
  """Convert a ``jax.tree_util`` path to dict keys."""
  return tuple(str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path)


def count(spec: Spec) -> int:
  """Return the number of elements of all arrays of a spec."""
  return sum(math.prod(p.shape) for p in jax.tree.leaves(spec))
