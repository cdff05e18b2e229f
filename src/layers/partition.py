"""Placement of activations on the current mesh, collectives for shard_map, and constraints that steer XLA's memory use.

sharding_rules.py defines how arrays are split.
"""

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
from maxtext_like.layers.sharding_rules import MeshAxes, Rules, free_axes, free_mesh

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def on_every_device(x: jax.Array) -> jax.Array:
  """Replicate x on every device of the current mesh, so that any process can read it. Return x if no mesh is set."""
  mesh = jax.sharding.get_abstract_mesh()
  return x if mesh.empty else jax.lax.with_sharding_constraint(x, PartitionSpec())


def on_devices(
  function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, *, check_vma: bool = True
) -> Callable[..., Any]:
  """``jax.shard_map`` over all axes of a free mesh that are not yet manual."""
  axes = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
  return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=check_vma)


def axes_of(entry: MeshAxes) -> tuple[str, ...]:
  """Convert an entry of a PartitionSpec to a tuple of mesh axes."""
  return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(x: jax.Array, axes: tuple[str, ...], dimension: int) -> Any:
  """All-gather x along mesh axes inside shard_map, concatenated in one dimension. Its gradient is reduce-scattered in
  float32."""
  return jax.lax.all_gather(x, axes, axis=dimension, tiled=True)


def _gathered_forward(x, axes, dimension):
  return gathered(x, axes, dimension), None


def _gathered_backward(axes, dimension, _, g):
  # The transpose of an all-gather is a reduce-scatter. Add in float32, and round once.
  total = jax.lax.psum_scatter(g.astype(jnp.float32), axes, scatter_dimension=dimension, tiled=True)
  return (total.astype(g.dtype),)


gathered.defvjp(_gathered_forward, _gathered_backward)


@dataclass(frozen=True)
class ShardedWeight:
  """The sharding of a weight that enters shard_map, and the parts of it that are gathered inside.

  Attributes:
    spec: sharding on entry.
    over: for each dimension, the mesh axes over which it is gathered before the product.
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
  ) -> "ShardedWeight":
    """Derive both from the sharding rules.

    Args:
      rules, mesh: sharding rules and the current mesh.
      shape, axes: declaration of the weight.
      own: logical axes that stay split, so that each device keeps its part.
      of_tokens: mesh axes that split tokens. A dimension split over other mesh axes is gathered outside of shard_map, because
        the gathered values would otherwise be typed as varying over these axes.
    """
    # The spec of the rules, with one entry for every dimension.
    split = [*rules.spec(shape, axes, mesh), *(None,) * len(shape)][: len(shape)]
    own, of_tokens = set(own), set(of_tokens)
    # Split on entry: the device's own axes, and those that also split tokens.
    kept = [
      axes_of(e) if a in own else tuple(m for m in axes_of(e) if m in of_tokens) for a, e in zip(axes, split, strict=True)
    ]
    last = max((i for i, entry in enumerate(kept) if entry), default=-1)
    return cls(
      PartitionSpec(*(entry or None for entry in kept[: last + 1])),
      tuple(() if a in own else entry for a, entry in zip(axes, kept, strict=True)),
    )

  def gather(self, weight: Any) -> Any:
    """Gather the parts of the weight that multiply on this device. The gradient is scattered to the sharding of the weight."""
    weight = as_stored(weight)
    for dimension, axes in enumerate(self.over):
      # A dimension without mesh axes is complete on every device.
      if axes:
        weight = gathered(weight, axes, dimension)
    return weight


def shared_sums() -> Literal["none", "weights", "all"]:
  """Return which products may have sums that are added over the devices of the current mesh.

  "weights": gradients of weights, which are sums over rows. "all": other products too, because heads, hidden sizes or positions
  are split. "none": no mesh, or inside shard_map, where code adds partial sums explicitly."""
  mesh = free_mesh()
  # These three axes split only rows and parameters, so only gradients of weights are partial sums.
  split = set() if mesh is None else set(free_axes(mesh))
  return "none" if not split else "weights" if split <= {"data", "fsdp", "expert"} else "all"


def weight_copies() -> int:
  """Return the number of copies of each weight on the current mesh, if every copy is split over devices and has its own rows.

  This is the size of ``data``. It is 1 if copies are not split (by ``fsdp`` or ``expert``), and inside shard_map over
  ``data``."""
  mesh = free_mesh()
  split = () if mesh is None else free_axes(mesh)
  return mesh.shape["data"] if mesh is not None and "data" in split and len(split) > 1 else 1


def by_copy(x: jax.Array) -> jax.Array:
  """Shard the first axis of an array over ``data``, so that each of the ``weight_copies`` has its own entry."""
  return jax.lax.with_sharding_constraint(x, PartitionSpec("data", *(PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)))


def barrier_on_tpus(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Return the arrays. On a mesh of TPUs, add a barrier so that none of them is used before all are computed.

  Without it, XLA for TPUs delays gradients of weights until they are used, and keeps their operands in memory until then. If a
  parameter is read in a different layout at the start and the end of a step, it also keeps the second copy in between."""
  return jax.lax.optimization_barrier(arrays) if free_mesh() is not None and on_tpu() else arrays


def joint_gradients(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return x and a small weight that multiplies it. On one GPU, a barrier makes both gradients available at the same time.

  Without it, XLA delayed the gradients of the adapters of six layers, and kept the cotangents of their hidden units until
  then."""
  return _joint_gradients(x, weight) if on_one_gpu() else (x, weight)


@jax.custom_vjp
def _joint_gradients(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
  return x, weight


_joint_gradients.defvjp(lambda x, weight: ((x, weight), None), lambda _, g: jax.lax.optimization_barrier(g))


def rounded_sum(total: jax.Array, dtype: Any) -> jax.Array:
  """Convert a float32 sum over rows to a dtype. It is rounded once, after all devices have added to it.

  Without the barrier, XLA moves the rounding before the all-reduce and adds rounded partial sums."""
  # On one device there is nothing to add, and the barrier would only prevent fusion.
  # A total that already has the dtype is not rounded.
  barred = free_mesh() is not None and total.dtype != dtype
  return (jax.lax.optimization_barrier(total) if barred else total).astype(dtype)


def adds_up_whole_weights() -> bool:
  """True if devices all-reduce complete gradients of weights along some mesh axis.

  Along ``fsdp`` and ``expert`` they reduce-scatter instead: each device receives a part of the sum, and XLA keeps its dtype."""
  mesh = free_mesh()
  return mesh is not None and not set(free_axes(mesh)) <= {"fsdp", "expert"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _widened(dtype: Any, p: jax.Array) -> Any:
  del dtype
  return p.astype(jnp.float32)


_widened.defvjp(lambda dtype, p: (_widened(dtype, p), None), lambda dtype, _, g: (rounded_sum(g, dtype),))


def in_float32(p: jax.Array) -> jax.Array:
  """Convert a parameter that many rows use to float32. Its gradient is a ``rounded_sum``."""
  widened: Any = _widened(p.dtype, p)
  return widened


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def repeated(x: jax.Array, count: int, axis: int) -> Any:
  """Repeat x along a new axis, which may be split over devices. Its gradient is a ``rounded_sum`` over this axis."""
  shape = (*x.shape[:axis], count, *x.shape[axis:])
  return jnp.broadcast_to(jnp.expand_dims(x, axis), shape)


repeated.defvjp(
  lambda x, count, axis: (repeated(x, count, axis), None),
  lambda count, axis, _, g: (rounded_sum(jnp.sum(g.astype(jnp.float32), axis=axis), g.dtype),),
)


def zero_after(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return a float32 zero for creating an array to add to, and x. The zero is computed together with x.

  XLA merges equal constants. A constant array of zeros would be the same one that other code compares with, for example, and
  would stay in memory from its first use to its last.
  """
  zero, x = jax.lax.optimization_barrier((jnp.zeros((), jnp.float32), x))
  return zero, x


def as_stored(weight: Any) -> Any:
  """Return one layer of a stacked weight in the stack's memory order (``tpu_layout.order``), on TPUs. Its gradient has it too.

  A product may need another order; a kernel needs the declared one. Without the constraint, XLA would copy all layers to that
  order before the loop, keep the copy during the step, and do the same for the gradient. With it, XLA transposes one layer at
  a time. Objects other than arrays, and arrays that the partitioner will split, are returned unchanged.
  """
  mesh = free_mesh()
  if not isinstance(weight, jax.Array) or not on_tpu() or (mesh is not None and mesh.size > 1):
    return weight
  return with_layout_constraint(weight, Layout(tpu_layout.order(weight.shape)))


def as_declared(row: jax.Array) -> jax.Array:
  """Return one layer of a stacked array with its axes in the declared memory order, on one GPU.

  If a product needs another order, XLA would otherwise transpose the complete stack before the loop and keep the copy during
  the loop. With the constraint it transposes one layer at a time."""
  if not on_one_gpu():
    return row
  return with_layout_constraint(row, Layout(tuple(range(row.ndim))))


def rows_of(x: jax.Array) -> Sequence[jax.Array]:
  """Return each layer of a stacked array. On GPUs, their gradients are concatenated before anything else reads them.

  If the update read them separately it would take twice as long, because a kernel that selects one of several arrays for each
  element cannot load several elements at once (gemma3-4b on an H200: 1.85 ms instead of 1.0 for a weight of five layers).
  """
  return _rows_of(x) if on_gpu() and jnp.issubdtype(x.dtype, jnp.floating) and len(x) > 1 else jnp.unstack(x)


@jax.custom_vjp
def _rows_of(x: jax.Array) -> Any:
  return jnp.unstack(x)


_rows_of.defvjp(lambda x: (jnp.unstack(x), None), lambda _, g: (jax.lax.optimization_barrier(jnp.stack(g)),))


def on_gpu() -> bool:
  """True if the devices of the current mesh are GPUs; False if no mesh is set."""
  return _platform() == "gpu"


def on_one_gpu() -> bool:
  """True if the current mesh is a single GPU, or if code inside shard_map runs on each GPU's own part."""
  mesh = free_mesh()
  return on_gpu() and (mesh is None or mesh.size == 1)


def on_one_cpu() -> bool:
  """True if the current mesh is a single CPU device; False if no mesh is set."""
  return _platform() == "cpu" and jax.sharding.get_abstract_mesh().size == 1


def on_tpu() -> bool:
  """True if the devices of the current mesh are TPUs; False if no mesh is set."""
  return _platform() == "tpu"


def _platform() -> str | None:
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  return None if device is None else device.platform


def varying_axes(x: jax.Array) -> frozenset[str]:
  """Return the manual mesh axes over which x may differ between devices; an empty set outside of shard_map."""
  # JAX renamed the attribute from vma to manual_axis_type.
  aval = jax.typeof(x)
  manual = getattr(aval, "manual_axis_type", None)
  return frozenset(manual.varying if manual is not None else getattr(aval, "vma", ()))


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
  """Mark x as varying over manual mesh axes (inside shard_map), so that it can be combined with varying values.

  Its gradient is added over these axes in float32."""
  missing = tuple(sorted(frozenset(axes) - varying_axes(x)))
  varied: Any = _varied(missing, x) if missing else x
  return varied


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _varied(axes: tuple[str, ...], x: jax.Array) -> Any:
  return jax.lax.pcast(x, axes, to="varying")


def _varied_backward(axes: tuple[str, ...], _, g: jax.Array):
  # The transpose of marking as varying is a sum over these axes. 16-bit gradients are added in float32.
  total = jax.lax.psum(g.astype(jnp.float32) if g.dtype.itemsize == 2 else g, axes)
  return ((total if total.dtype == g.dtype else jax.lax.optimization_barrier(total)).astype(g.dtype),)


_varied.defvjp(lambda axes, x: (_varied(axes, x), None), _varied_backward)


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Mark the arrays as varying over all manual axes that any of them varies over.

  Use it for the arguments of a custom derivative. Inside shard_map, a custom derivative returns every gradient as varying. The
  mark adds the gradient of an array that devices share over these devices.
  """
  axes = frozenset().union(*map(varying_axes, arrays))
  return tuple(vary(x, axes) for x in arrays)


def by_token(rules: Rules, function: Callable[..., Any], shared: Any, *arrays: jax.Array) -> Any:
  """Return function(shared, *arrays); each device applies it to its own tokens.

  Use it for operations that the partitioner does not split, such as top_k, for which it gathers all tokens (not on TPUs).

  Args:
    rules: sharding of tokens on the current mesh.
    function: maps arrays [B, T, ...] to a pytree of such arrays. The result of a token must not depend on other tokens.
    shared: a pytree that all devices have.
    arrays: [B, T, ...].
  """
  mesh = free_mesh()
  # Find the mesh axes that split tokens. Without them, call the function directly.
  tokens = PartitionSpec() if mesh is None else rules.spec(arrays[0].shape[:2], ("batch", "sequence"), mesh)
  axes = [a for entry in tokens for a in axes_of(entry)]
  if mesh is None or not axes:
    return function(shared, *arrays)
  # The gradient of ``shared`` is added over devices in the dtype in which it enters, so convert it to float32.
  shared = jax.tree.map(lambda w: in_float32(w) if w.dtype in (jnp.bfloat16, jnp.float16) else w, shared)
  # Inside, mark ``shared`` as varying, so that its gradient is added over the devices that split tokens.
  own = lambda shared, *arrays: function(jax.tree.map(lambda w: vary(w, axes), shared), *arrays)
  specs = (PartitionSpec(), *(tokens,) * len(arrays))
  return on_devices(own, mesh, specs, tokens)(shared, *arrays)


def by_head(
  rules: Rules, attend: Callable[..., jax.Array], q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, *of_rows: jax.Array
) -> jax.Array:
  """Return attend(q, k, v, *of_rows); each device applies it to its own rows and heads. Kernels need this, because the
  partitioner cannot split them.

  If there are fewer key-value heads than devices that split heads, they are copied, so that each device has those of its
  queries. Rows or heads that do not divide among the devices are replicated.

  Args:
    rules: sharding of rows and heads on the current mesh.
    attend: maps complete rows to [B, T, N, V]. Query head n reads key-value head n // (N / K).
    q_BTNH, k_BSKH, v_BSKV: queries, keys, values.
    of_rows: further arrays [B, ...].
  """
  mesh = free_mesh()
  if mesh is None or mesh.size == 1:
    # On one device there is nothing to split.
    return attend(q_BTNH, k_BSKH, v_BSKV, *of_rows)
  # Find how rows and heads are split. Complete rows are needed, so positions are not split.
  B, T, N, _ = q_BTNH.shape
  rows, heads = rules.rows(B, mesh), rules.spec((B, T, N), ("batch", None, "heads"), mesh)
  ways = math.prod(mesh.shape[axis] for axis in axes_of(heads[2])) if len(heads) > 2 else 1
  # Copy key-value heads until they divide among the devices.
  copies = ways // math.gcd(ways, k_BSKH.shape[2])
  if copies > 1:
    k_BSKH, v_BSKV = (jnp.repeat(x, copies, axis=2) for x in (k_BSKH, v_BSKV))
  specs = (heads,) * 3 + (rows,) * len(of_rows)
  # Kernels do not say over which axes their results vary, so JAX cannot check it.
  return on_devices(attend, mesh, specs, heads, check_vma=False)(q_BTNH, k_BSKH, v_BSKV, *of_rows)
