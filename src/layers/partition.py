"""Where activations lie on the mesh in use; marks for the inside of shard_map. How arrays are split is in rules.py."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, PartitionSpec

from maxtext_like.layers import tpu_layout
from maxtext_like.layers.sharding_rules import MeshAxes, Rules, free_axes

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def on_every_device(x: jax.Array) -> jax.Array:
  """x on every device of the mesh in use, so that any process can read it; x itself when no mesh is set."""
  mesh = jax.sharding.get_abstract_mesh()
  return x if mesh.empty else jax.lax.with_sharding_constraint(x, PartitionSpec())


def free_mesh() -> Mesh | None:
  """The mesh in use; None where none is set, and inside shard_map over all of it, where everything is split already."""
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty or all(kind == AxisType.Manual for kind in mesh.axis_types) else mesh


def on_devices(
  function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, *, check_vma: bool = True
) -> Callable[..., Any]:
  """``jax.shard_map`` over all axes of a free mesh that are not manual yet."""
  axes = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
  return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=check_vma)


def axes_of(entry: MeshAxes) -> tuple[str, ...]:
  """An entry of a PartitionSpec as mesh axes."""
  return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(x: jax.Array, axes: tuple[str, ...], dimension: int) -> Any:
  """Inside shard_map: x of all devices along mesh axes, side by side in a dimension. Its gradients are added in float32, and
  each device gets its own part of the sum."""
  return jax.lax.all_gather(x, axes, axis=dimension, tiled=True)


def _gathered_forward(x, axes, dimension):
  return gathered(x, axes, dimension), None


def _gathered_backward(axes, dimension, _, g):
  total = jax.lax.psum_scatter(g.astype(jnp.float32), axes, scatter_dimension=dimension, tiled=True)
  return (total.astype(g.dtype),)


gathered.defvjp(_gathered_forward, _gathered_backward)


@dataclass(frozen=True)
class Held:
  """How a weight enters shard_map, and what is fetched of it there.

  Attributes:
    spec: how it is split.
    over: of each dimension, the mesh axes that it is gathered over before it multiplies.
  """

  spec: PartitionSpec
  over: tuple[tuple[str, ...], ...] = ()

  @classmethod
  def of(
    cls,
    rules: Rules,
    mesh: Mesh,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    own: Iterable[str],
    of_tokens: Iterable[str],
  ) -> "Held":
    """As the rules split it.

    Args:
      rules, mesh: as they are.
      shape, axes: of the weight.
      own: logical axes of which each device keeps its part.
      of_tokens: mesh axes that tokens are split over. What is split over others is gathered outside, as devices along them
        would otherwise count as different.
    """
    split = [*rules.spec(shape, axes, mesh), *(None,) * len(shape)][: len(shape)]
    own, of_tokens = set(own), set(of_tokens)
    kept = [
      axes_of(e) if a in own else tuple(m for m in axes_of(e) if m in of_tokens) for a, e in zip(axes, split, strict=True)
    ]
    last = max((i for i, entry in enumerate(kept) if entry), default=-1)
    return cls(
      PartitionSpec(*(entry or None for entry in kept[: last + 1])),
      tuple(() if a in own else entry for a, entry in zip(axes, kept, strict=True)),
    )

  def gather(self, weight: Any) -> Any:
    """The weight with all that multiplies on this device; its gradient is scattered again as the weight lies."""
    weight = as_stored(weight)
    for dimension, axes in enumerate(self.over):
      if axes:
        weight = gathered(weight, axes, dimension)
    return weight


def shared_sums() -> Literal["none", "weights", "all"]:
  """Which products devices of the mesh in use may share the sum of: those of gradients of weights, over rows; all, where
  heads, hidden sizes or positions are split too. Inside shard_map none: what is added up there says so itself."""
  mesh = free_mesh()
  split = set() if mesh is None else set(free_axes(mesh))
  return "none" if not split else "weights" if split <= {"data", "fsdp", "expert"} else "all"


def weight_copies() -> int:
  """How many copies of a weight there are on the mesh in use, each split over devices (``fsdp``, ``expert``) and with rows of
  its own: the length of ``data``; 1 where a copy is not split, and inside shard_map over ``data``."""
  mesh = free_mesh()
  split = () if mesh is None else free_axes(mesh)
  return mesh.shape["data"] if mesh is not None and "data" in split and len(split) > 1 else 1


def by_copy(x: jax.Array) -> jax.Array:
  """An array whose first axis are the ``weight_copies``, each of which has its own entry."""
  return jax.lax.with_sharding_constraint(x, PartitionSpec("data", *(PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)))


def together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """The arrays, on a mesh of TPUs none of them to be used before all are there. Their compiler puts off what nothing waits
  for, as gradients of weights, and holds what they are made of until then; and of a parameter that is read in another layout
  at both ends of a step it keeps the copy in between."""
  return jax.lax.optimization_barrier(arrays) if free_mesh() is not None and on_tpu() else arrays


def one_by_one(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
  """What a small weight multiplies, and the weight; on one GPU their gradients are there together. Its compiler puts off what
  nothing waits for: the gradients of six layers' adapters, and held the cotangents of their hidden units until then."""
  return _one_by_one(x, weight) if on_one_gpu() else (x, weight)


@jax.custom_vjp
def _one_by_one(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
  return x, weight


_one_by_one.defvjp(lambda x, weight: ((x, weight), None), lambda _, g: jax.lax.optimization_barrier(g))


def rounded_sum(total: jax.Array, dtype: Any) -> jax.Array:
  """A float32 sum over rows in another dtype, rounded once all devices have added to it. Compilers that see the rounding behind
  the sum round each device's part instead, and add up rounded numbers."""
  barred = free_mesh() is not None and total.dtype != dtype
  return (jax.lax.optimization_barrier(total) if barred else total).astype(dtype)


def adds_up_whole_weights() -> bool:
  """Whether devices add up whole gradients of weights, along some axis that does not split them to save memory. Along those
  that do each device takes a part of the sum, and compilers leave its dtype alone."""
  mesh = free_mesh()
  return mesh is not None and not set(free_axes(mesh)) <= {"fsdp", "expert"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _widened(dtype: Any, p: jax.Array) -> Any:
  del dtype
  return p.astype(jnp.float32)


_widened.defvjp(lambda dtype, p: (_widened(dtype, p), None), lambda dtype, _, g: (rounded_sum(g, dtype),))


def in_float32(p: jax.Array) -> jax.Array:
  """A parameter that many rows share, float32; its gradient is a ``rounded_sum``."""
  widened: Any = _widened(p.dtype, p)
  return widened


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def repeated(x: jax.Array, count: int, axis: int) -> Any:
  """x so many times side by side along a new axis, which devices may share; its gradient is a ``rounded_sum`` over that."""
  shape = (*x.shape[:axis], count, *x.shape[axis:])
  return jnp.broadcast_to(jnp.expand_dims(x, axis), shape)


repeated.defvjp(
  lambda x, count, axis: (repeated(x, count, axis), None),
  lambda count, axis, _, g: (rounded_sum(jnp.sum(g.astype(jnp.float32), axis=axis), g.dtype),),
)


def own_zero(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """A float32 zero, of which arrays to add to are made, and x, before which it is not there.

  A constant would be the same as any other: compilers keep one array for all that read zeros of a shape, and who compares with
  zeros elsewhere would read that one, which then lies in memory from the first of them to the last.
  """
  zero, x = jax.lax.optimization_barrier((jnp.zeros((), jnp.float32), x))
  return zero, x


def as_stored(weight: Any) -> Any:
  """One layer of a stacked weight, its gradient too, on TPUs in the order of axes in which the stack lies (``tiles.order``).

  What multiplies it may read another, as a kernel the declared one. The compiler would make a copy of all layers in that order
  before the loop, and keep it for the whole step, and the gradient of all layers beside it; so it turns a layer at a time.
  What is no plain array stays as it is, and what the partitioner is still to split.
  """
  mesh = free_mesh()
  if not isinstance(weight, jax.Array) or not on_tpu() or (mesh is not None and mesh.size > 1):
    return weight
  return with_layout_constraint(weight, Layout(tpu_layout.order(weight.shape)))


def as_declared(row: jax.Array) -> jax.Array:
  """One layer of a stacked array, on one GPU with its axes in the declared order. Where a product reads another, the compiler
  would else turn the whole stack before a loop over it, and keep the copy as long as the loop lasts; so it turns a layer."""
  if not on_one_gpu():
    return row
  return with_layout_constraint(row, Layout(tuple(range(row.ndim))))


def rows_of(x: jax.Array) -> Sequence[jax.Array]:
  """Each layer of a stacked array; on GPUs their gradients are put together before anything reads them.

  An update that read them where they are would take twice as long: a kernel that picks one of several arrays for each number
  copies no more than one number at a time (gemma3-4b on an H200: 1.85 ms instead of 1.0 for a weight of five layers).
  """
  return _rows_of(x) if on_gpu() and jnp.issubdtype(x.dtype, jnp.floating) and len(x) > 1 else jnp.unstack(x)


@jax.custom_vjp
def _rows_of(x: jax.Array) -> Any:
  return jnp.unstack(x)


_rows_of.defvjp(lambda x: (jnp.unstack(x), None), lambda _, g: (jax.lax.optimization_barrier(jnp.stack(g)),))


def on_gpu() -> bool:
  """Whether the devices of the mesh in use are GPUs; False where none is set."""
  return _platform() == "gpu"


def on_one_gpu() -> bool:
  """Whether the mesh in use is a single GPU, or what runs inside shard_map a GPU's own part."""
  mesh = free_mesh()
  return on_gpu() and (mesh is None or mesh.size == 1)


def on_one_cpu() -> bool:
  """Whether the mesh in use is a single CPU device; False where none is set."""
  return _platform() == "cpu" and jax.sharding.get_abstract_mesh().size == 1


def on_tpu() -> bool:
  """Whether the mesh in use is of TPUs."""
  return _platform() == "tpu"


def _platform() -> str | None:
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  return None if device is None else device.platform


def varying_axes(x: jax.Array) -> frozenset[str]:
  """The manual mesh axes over which x may differ between devices; none outside of shard_map."""
  aval = jax.typeof(x)
  manual = getattr(aval, "manual_axis_type", None)
  return frozenset(manual.varying if manual is not None else getattr(aval, "vma", ()))


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
  """x marked as varying over the manual mesh axes (inside shard_map), so that it can stand beside values that vary. Gradients
  of it are added up over these axes in float32."""
  missing = tuple(sorted(frozenset(axes) - varying_axes(x)))
  varied: Any = _varied(missing, x) if missing else x
  return varied


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _varied(axes: tuple[str, ...], x: jax.Array) -> Any:
  return jax.lax.pcast(x, axes, to="varying")


def _varied_backward(axes: tuple[str, ...], _, g: jax.Array):
  total = jax.lax.psum(g.astype(jnp.float32) if g.dtype.itemsize == 2 else g, axes)
  return ((total if total.dtype == g.dtype else jax.lax.optimization_barrier(total)).astype(g.dtype),)


_varied.defvjp(lambda axes, x: (_varied(axes, x), None), _varied_backward)


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
  mesh = free_mesh()
  tokens = PartitionSpec() if mesh is None else rules.spec(arrays[0].shape[:2], ("batch", "sequence"), mesh)
  axes = [a for entry in tokens for a in axes_of(entry)]
  if mesh is None or not axes:
    return function(shared, *arrays)
  # Gradients are added up in the dtype that goes in.
  shared = jax.tree.map(lambda w: in_float32(w) if w.dtype in (jnp.bfloat16, jnp.float16) else w, shared)
  own = lambda shared, *arrays: function(jax.tree.map(lambda w: vary(w, axes), shared), *arrays)
  specs = (PartitionSpec(), *(tokens,) * len(arrays))
  return on_devices(own, mesh, specs, tokens)(shared, *arrays)


def by_head(
  rules: Rules, attend: Callable[..., jax.Array], q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, *of_rows: jax.Array
) -> jax.Array:
  """attend(q, k, v, *of_rows), run by every device on its own rows and heads: for kernels, into which no partitioner looks.

  Key-value heads that are fewer than the devices of the axis are copied, so that each device has those of its queries. Rows or
  heads that do not divide among the devices are worked on by all of them.

  Args:
    rules: how rows and heads lie on the mesh in use.
    attend: of whole rows to [B, T, N, V]; query head n reads key-value head n // (N / K).
    q_BTNH, k_BSKH, v_BSKV: queries, keys, values.
    of_rows: [B, ...].
  """
  mesh = free_mesh()
  if mesh is None or mesh.size == 1:
    return attend(q_BTNH, k_BSKH, v_BSKV, *of_rows)
  B, T, N, _ = q_BTNH.shape
  rows, heads = rules.rows(B, mesh), rules.spec((B, T, N), ("batch", None, "heads"), mesh)
  ways = math.prod(mesh.shape[axis] for axis in axes_of(heads[2])) if len(heads) > 2 else 1
  copies = ways // math.gcd(ways, k_BSKH.shape[2])
  if copies > 1:
    k_BSKH, v_BSKV = (jnp.repeat(x, copies, axis=2) for x in (k_BSKH, v_BSKV))
  specs = (heads,) * 3 + (rows,) * len(of_rows)
  return on_devices(attend, mesh, specs, heads, check_vma=False)(q_BTNH, k_BSKH, v_BSKV, *of_rows)
