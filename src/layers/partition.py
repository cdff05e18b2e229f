"""Logical axes to mesh axes, as a value; the constraint that layers put on activations; marks for the inside of shard_map.

The mesh has the axes ``data`` (batch) and ``fsdp`` (batch and parameters). Tensor, expert and context axes are other rules:
``dataclasses.replace(RULES, heads="tensor", expert="expert", sequence="context")``.

B batch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

MESH_AXES = ("data", "fsdp")

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Rules:
  """Which mesh axes each logical axis is split over; None: none.

  Attributes:
    batch, sequence: of activations.
    The others: of parameters, under the names that ``Param.axes`` gives them.
  """

  batch: MeshAxes = ("data", "fsdp")
  sequence: MeshAxes = None
  embed: MeshAxes = "fsdp"
  q_lora: MeshAxes = "fsdp"
  kv_lora: MeshAxes = "fsdp"
  per_layer: MeshAxes = "fsdp"
  vocab: MeshAxes = None
  heads: MeshAxes = None
  kv_heads: MeshAxes = None
  head_dim: MeshAxes = None
  mlp: MeshAxes = None
  expert: MeshAxes = None
  layers: MeshAxes = None

  def mesh_axes(self, axis: str | None, mesh: Mesh) -> tuple[str, ...]:
    """The axes of this mesh, of more than one device, that a logical axis is split over.

    Raises:
      ValueError: there is no rule for it.
    """
    if axis is None:
      return ()
    if axis not in Rules.__dataclass_fields__:
      raise ValueError(f"no sharding rule for the logical axis {axis!r}; there are {', '.join(Rules.__dataclass_fields__)}")
    wanted = getattr(self, axis)
    return tuple(a for a in ((wanted,) if isinstance(wanted, str) else wanted or ()) if mesh.shape.get(a, 1) > 1)

  def spec(self, shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: Mesh) -> PartitionSpec:
    """The mesh axes of each dimension of an array.

    A mesh axis splits one dimension at most (the first that asks for it) and only where it divides the size: a dimension
    that cannot be split evenly is replicated.
    """
    taken: set[str] = set()
    entries: list[MeshAxes] = []
    for size, axis in zip(shape, axes, strict=True):
      names = tuple(a for a in self.mesh_axes(axis, mesh) if a not in taken)
      if names and size % math.prod(mesh.shape[a] for a in names) == 0:
        taken.update(names)
        entries.append(names[0] if len(names) == 1 else names)
      else:
        entries.append(None)
    while entries and entries[-1] is None:
      entries.pop()
    return PartitionSpec(*entries)

  def rows(self, count: int, mesh: Mesh) -> PartitionSpec:
    """How arrays [B, ...] of so many sequences are split; of nothing where they are not."""
    return self.spec((count,), ("batch",), mesh)

  def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
    """An activation, its leading dimensions split over the mesh in use as the rules say; x itself when no mesh is set or
    nothing is split."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = PartitionSpec() if mesh.empty else self.spec(x.shape[: len(axes)], axes, mesh)
    return jax.lax.with_sharding_constraint(x, spec) if any(spec) else x


RULES = Rules()


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
