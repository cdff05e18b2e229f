"""The mesh of a run: its devices in a grid whose axes are named in the ``mesh:`` section.

Where there are several slices, every axis is made of a part over slices (``dcn_*``) and one inside them (``ici_*``), the slices
outside: what neighbours along an axis send each other leaves a slice as seldom as can be.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from maxtext_like.config.parallelism import MeshConfig
from maxtext_like.errors import UserError
from maxtext_like.layers.partition import Mesh
from maxtext_like.layers.sharding_rules import MESH_AXES, Rules


def abstract_mesh(config: MeshConfig, devices: int, slices: int | None = None) -> AbstractMesh:
  """A mesh of so many devices that are not there, and of so many slices where they are TPUs.

  Raises:
    UserError: the axes do not multiply to the number of devices, or slices.
  """
  try:
    sizes = config.axis_sizes(devices, slices)
  except ValueError as error:
    raise UserError(str(error)) from error
  return AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def use_mesh(mesh: Mesh) -> AbstractContextManager[Any]:
  """The context in which programs are traced and lowered for a mesh."""
  return jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
  """The mesh of all devices, or of the given ones.

  TPUs know which slice they belong to. Other devices do not: as many slices as the ``dcn_*`` keys say are cut from their list,
  in which those of a process follow each other.

  Args:
    config: sizes of the axes, -1 for what the others leave.
    devices: jax devices, or those of a topology; default: every device of the run.

  Raises:
    UserError: the axes do not multiply to the number of devices, or slices.
  """
  devices = jax.devices() if devices is None else list(devices)
  slices = len({getattr(d, "slice_index", 0) for d in devices}) if devices[0].platform == "tpu" else None
  try:
    dcn, ici = (tuple(sizes.values()) for sizes in config.over_networks(len(devices), slices))
  except ValueError as error:
    raise UserError(str(error)) from error
  kinds = (AxisType.Auto,) * len(MESH_AXES)
  return jax.sharding.Mesh(_grid(devices, dcn, ici), MESH_AXES, axis_types=kinds)


def _grid(devices: list[Any], dcn: tuple[int, ...], ici: tuple[int, ...]) -> np.ndarray:
  """The devices, of shape dcn * ici; where the network is a torus, neighbours in the grid are neighbours in it."""
  if devices[0].platform != "tpu" or set(devices) < set(jax.devices()):  # some of a slice's devices make no torus
    blocks = np.asarray(devices).reshape(*dcn, *ici)
    pairs = [axis + part for axis in range(len(ici)) for part in (0, len(ici))]
    return blocks.transpose(pairs).reshape([a * b for a, b in zip(dcn, ici, strict=True)])

  def torus(split: bool) -> np.ndarray:
    if math.prod(dcn) > 1:
      return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=split)
    return mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=split)

  try:
    return torus(False)
  except NotImplementedError:  # an axis that is a part of one of the torus's
    return torus(True)


def in_words(sizes: Mapping[str, int]) -> str:
  """ "data 2 x fsdp 4": the axes of a mesh with their devices; the less usual ones where they have several."""
  return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis in ("data", "fsdp"))


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
  """How a batch [B, T] lies on the mesh: its sequences over every axis that the rules give to "batch"."""
  return NamedSharding(mesh, PartitionSpec(rules.batch))


def replicated(mesh: Mesh) -> NamedSharding:
  """The same array on every device."""
  return NamedSharding(mesh, PartitionSpec())
