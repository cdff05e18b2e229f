"""Logical axes to mesh axes, as a value, for parameters and activations alike. Imports no JAX until it is used, so that the
configuration may ask for the names.

B batch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  import jax
  from jax.sharding import PartitionSpec

  from maxtext_like.layers.partition import Mesh

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
"""Of every mesh, from the outside in: neighbours along the last talk most, within every layer."""

MeshAxes = str | tuple[str, ...] | None

GATHERED = ("embed", "q_lora", "kv_lora", "per_layer")
"""Logical axes of parameters that are split to save memory alone."""


@dataclass(frozen=True, kw_only=True)
class Rules:
  """Which mesh axes each logical axis is split over; None: none.

  Attributes:
    batch, sequence: of activations.
    embed, q_lora, kv_lora, per_layer: of parameters, which are gathered over these before they multiply. Experts have taken
      "expert" for themselves by then, all else lies split over it too.
    The others: of parameters, under the names that ``Param.axes`` gives them; activations have some of them too.
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
    """The axes of this mesh, of more than one device, that the partitioner splits a logical axis over.

    Raises:
      ValueError: there is no rule for it.
    """
    if axis is None:
      return ()
    if axis not in LOGICAL_AXES:
      raise ValueError(f"no sharding rule for the logical axis {axis!r}; there are {', '.join(LOGICAL_AXES)}")
    wanted = getattr(self, axis)
    return tuple(a for a in ((wanted,) if isinstance(wanted, str) else wanted or ()) if a in free_axes(mesh))

  def ways(self, axis: str, mesh: "Mesh") -> int:
    """Into how many parts a logical axis is split on this mesh."""
    return math.prod(mesh.shape[a] for a in self.mesh_axes(axis, mesh))

  def spec(self, shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: "Mesh") -> "PartitionSpec":
    """The mesh axes of each dimension of an array.

    A mesh axis splits one dimension at most (the first that asks for it) and only where it divides the size: a dimension
    that cannot be split evenly is replicated, one that is gathered anyway over the first of its axes that divide it.
    """
    from jax.sharding import PartitionSpec

    entries: list[MeshAxes] = []
    for names, even in self._wanted(shape, axes, mesh):
      entries.append((names[0] if len(names) == 1 else names) if names and even else None)
    while entries and entries[-1] is None:
      entries.pop()
    return PartitionSpec(*entries)

  def uneven(self, shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: "Mesh") -> "list[tuple[int, tuple[str, ...]]]":
    """The dimensions that ``spec`` cannot split evenly, each with the mesh axes that it shall be split over."""
    return [(i, names) for i, (names, even) in enumerate(self._wanted(shape, axes, mesh)) if not even]

  def _wanted(
    self, shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: "Mesh"
  ) -> "Iterator[tuple[tuple[str, ...], bool]]":
    """Of every dimension the mesh axes that it is to be split over, and whether they divide it."""
    taken: set[str] = set()
    for size, axis in zip(shape, axes, strict=True):
      names = tuple(a for a in self.mesh_axes(axis, mesh) if a not in taken)
      divides = lambda names, size=size: size % math.prod(mesh.shape[a] for a in names) == 0
      while axis in GATHERED and len(names) > 1 and not divides(names):
        names = names[:-1]
      even = divides(names)
      taken.update(names if even else ())
      yield names, even

  def rows(self, count: int, mesh: "Mesh") -> "PartitionSpec":
    """How arrays [B, ...] of so many sequences are split; of nothing where they are not."""
    return self.spec((count,), ("batch",), mesh)

  def constrain(self, x: "jax.Array", *axes: str | None) -> "jax.Array":
    """An activation, its leading dimensions split over the mesh in use as the rules say; x itself when no mesh is set or
    nothing is split."""
    import jax
    from jax.sharding import PartitionSpec

    mesh = jax.sharding.get_abstract_mesh()
    spec = PartitionSpec() if mesh.empty else self.spec(x.shape[: len(axes)], axes, mesh)
    return jax.lax.with_sharding_constraint(x, spec) if any(spec) else x

  def whole(self, x: "jax.Array", *axes: str | None) -> "jax.Array":
    """What is stored of a weight, before it multiplies: fetched from the devices that it is split over to save memory alone,
    and split further as the rules say. x itself where it is not split so."""
    import jax

    from maxtext_like.layers.partition import free_mesh

    mesh = free_mesh()
    if mesh is None or not any(self.mesh_axes(axis, mesh) for axis in axes if axis in GATHERED):
      return x
    kept = tuple(None if axis in GATHERED else axis for axis in axes)
    return jax.lax.with_sharding_constraint(x, self.spec(x.shape, kept, mesh))

  def share(self, x: "jax.Array", *axes: str | None) -> "jax.Array":
    """As ``constrain``, and x itself inside shard_map and where the last of the axes is not split: for what is shared out
    inside a layer."""
    from maxtext_like.layers.partition import free_mesh

    mesh = free_mesh()
    return x if mesh is None or not self.mesh_axes(axes[-1], mesh) else self.constrain(x, *axes)


def free_axes(mesh: "Mesh") -> tuple[str, ...]:
  """The axes of several devices over which the partitioner splits: all but those of the shard_map that this is inside of."""
  from jax.sharding import AxisType

  kinds = zip(mesh.shape.items(), mesh.axis_types, strict=True)
  return tuple(axis for (axis, size), kind in kinds if size > 1 and kind != AxisType.Manual)


LOGICAL_AXES = tuple(Rules.__dataclass_fields__)
RULES = Rules()
