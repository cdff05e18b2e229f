"""Sharding rules: the mesh axes that split each logical axis, for parameters and activations. JAX is imported only on use, so
that the configuration can read the names.

B batch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  import jax
  from jax.sharding import PartitionSpec

  Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh  # defined in partition.py too, for use at run time

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
"""Axes of every mesh, from the outermost to the innermost. Neighbors along the last axis communicate most, in every layer."""

MeshAxes = str | tuple[str, ...] | None

GATHERED = ("embed", "q_lora", "kv_lora", "per_layer")
"""Logical axes of parameters that are split only to save memory. They are gathered before the product."""


@dataclass(frozen=True, kw_only=True)
class Rules:
  """The mesh axes that split each logical axis; None: not split.

  Attributes:
    batch, sequence: axes of activations.
    embed, q_lora, kv_lora, per_layer: axes of parameters that are gathered before they multiply. The weights of experts are
      split over "expert" by their first axis; all other weights are split over it by these axes.
    others: axes of parameters, with the names in ``Param.axes``. Activations use some of them too.
  """

  batch: MeshAxes = ("data", "fsdp", "expert")
  sequence: MeshAxes = "context"
  embed: MeshAxes = ("fsdp", "expert")
  q_lora: MeshAxes = ("fsdp", "expert")
  kv_lora: MeshAxes = ("fsdp", "expert")
  per_layer: MeshAxes = ("fsdp", "expert")
  vocab: MeshAxes = "tensor"
  heads: MeshAxes = "tensor"
  kv_heads: MeshAxes = "tensor"
  index_heads: MeshAxes = "tensor"
  head_dim: MeshAxes = None
  mlp: MeshAxes = "tensor"
  vision_heads: MeshAxes = "tensor"
  vision_mlp: MeshAxes = "tensor"
  expert: MeshAxes = "expert"
  layers: MeshAxes = None

  def mesh_axes(self, axis: str | None, mesh: "Mesh") -> tuple[str, ...]:
    """Return the mesh axes with more than one device that split a logical axis.

    Raises:
      ValueError: there is no rule for the logical axis.
    """
    # A dimension without a logical axis is never split.
    if axis is None:
      return ()
    if axis not in LOGICAL_AXES:
      raise ValueError(f"sharding: no rule for the logical axis {axis!r}\n  fix: choose from {', '.join(LOGICAL_AXES)}")
    # Skip mesh axes of one device, and those that an enclosing shard_map has split.
    wanted = getattr(self, axis)
    return tuple(a for a in ((wanted,) if isinstance(wanted, str) else wanted or ()) if a in free_axes(mesh))

  def ways(self, axis: str, mesh: "Mesh") -> int:
    """Return the number of parts that a logical axis is split into."""
    return math.prod(mesh.shape[a] for a in self.mesh_axes(axis, mesh))

  def row_parts(self, length: int) -> int:
    """Return the number of parts that rows of ``length`` positions are split into on this mesh; 1 if they do not divide."""
    mesh = free_mesh()
    ways = 1 if mesh is None else self.ways("sequence", mesh)
    # Uneven rows are not split over ``context``.
    return ways if length % ways == 0 else 1

  def spec(self, shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: "Mesh") -> "PartitionSpec":
    """Return the mesh axes of each dimension of an array.

    A mesh axis splits at most one dimension, the first whose rule names it, and only if it divides the size. A dimension that
    cannot be split evenly is replicated. A dimension that is gathered before the product is then split over fewer of its axes.
    """
    from jax.sharding import PartitionSpec

    entries: list[MeshAxes] = []
    for names, even in self._wanted(shape, axes, mesh):
      entries.append((names[0] if len(names) == 1 else names) if names and even else None)
    # Leave out trailing None entries, so that equal shardings have equal specs.
    while entries and entries[-1] is None:
      entries.pop()
    return PartitionSpec(*entries)

  def uneven(self, shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: "Mesh") -> "list[tuple[int, tuple[str, ...]]]":
    """Return the dimensions that ``spec`` cannot split evenly, with the mesh axes that their rules name."""
    return [(i, names) for i, (names, even) in enumerate(self._wanted(shape, axes, mesh)) if not even]

  def _wanted(
    self, shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: "Mesh"
  ) -> "Iterator[tuple[tuple[str, ...], bool]]":
    """Yield for every dimension the mesh axes that its rule names, and whether they divide its size."""
    taken: set[str] = set()
    for size, axis in zip(shape, axes, strict=True):
      names = tuple(a for a in self.mesh_axes(axis, mesh) if a not in taken)
      divides = lambda names, size=size: size % math.prod(mesh.shape[a] for a in names) == 0
      # A gathered dimension may be split over fewer axes; others are all or nothing.
      while axis in GATHERED and len(names) > 1 and not divides(names):
        names = names[:-1]
      even = divides(names)
      # A later dimension cannot use the same mesh axes again.
      taken.update(names if even else ())
      yield names, even

  def rows(self, count: int, mesh: "Mesh") -> "PartitionSpec":
    """Return the spec of arrays [B, ...] with this many rows. It is empty if rows are not split."""
    return self.spec((count,), ("batch",), mesh)

  def constrain(self, x: "jax.Array", *axes: str | None) -> "jax.Array":
    """Split the leading dimensions of an activation over the current mesh. Return x if no mesh is set or nothing is split."""
    import jax
    from jax.sharding import PartitionSpec

    # The current mesh is read here, so that layers need no mesh argument.
    mesh = jax.sharding.get_abstract_mesh()
    spec = PartitionSpec() if mesh.empty else self.spec(x.shape[: len(axes)], axes, mesh)
    return jax.lax.with_sharding_constraint(x, spec) if any(spec) else x

  def whole(self, x: "jax.Array", *axes: str | None) -> "jax.Array":
    """Gather the stored arrays of a weight from the devices that split it only to save memory, before a product. Return x if no
    such axis is split. Other axes stay split as the rules say."""
    import jax

    mesh = free_mesh()
    if mesh is None or not any(self.mesh_axes(axis, mesh) for axis in axes if axis in GATHERED):
      return x
    # Constrain x as if the gathered axes were replicated.
    kept = tuple(None if axis in GATHERED else axis for axis in axes)
    return jax.lax.with_sharding_constraint(x, self.spec(x.shape, kept, mesh))

  def share(self, x: "jax.Array", *axes: str | None) -> "jax.Array":
    """Split an activation inside a layer as ``constrain`` does. Return x inside shard_map, and if the last of the axes is not
    split."""
    mesh = free_mesh()
    return x if mesh is None or not self.mesh_axes(axes[-1], mesh) else self.constrain(x, *axes)


def free_mesh() -> "Mesh | None":
  """Return the current mesh, or None if no mesh is set or if all its axes are manual (inside shard_map)."""
  import jax

  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty or all(kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types) else mesh


def free_axes(mesh: "Mesh") -> tuple[str, ...]:
  """Return the mesh axes of several devices that the partitioner splits over: all except those of an enclosing shard_map."""
  from jax.sharding import AxisType

  kinds = zip(mesh.shape.items(), mesh.axis_types, strict=True)
  return tuple(axis for (axis, size), kind in kinds if size > 1 and kind != AxisType.Manual)


LOGICAL_AXES = tuple(Rules.__dataclass_fields__)
RULES = Rules()
