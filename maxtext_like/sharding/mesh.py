"""Builds the device mesh of a run from the ``mesh:`` section.

With several TPU slices, every axis has a part across slices (``dcn_*``) and a part inside them (``ici_*``), with the slices
outermost. Traffic between neighbors along an axis then rarely leaves a slice.
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
from maxtext_like.layers.sharding_rules import MESH_AXES


def abstract_mesh(config: MeshConfig, devices: int, slices: int | None = None) -> AbstractMesh:
  """Returns a mesh without real devices.

  Args:
    config: sizes of the axes.
    devices: number of devices.
    slices: number of TPU slices; None for other devices.

  Raises:
    UserError: the axis sizes do not multiply to the number of devices or slices.
  """
  try:
    sizes = config.axis_sizes(devices, slices)
  except ValueError as error:
    raise UserError(str(error)) from error
  return AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def use_mesh(mesh: Mesh) -> AbstractContextManager[Any]:
  """Returns the context in which programs for a mesh are traced and lowered."""
  return jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
  """Builds the mesh of all devices, or of the given ones.

  TPU devices know their slice. The list of other devices is cut into as many slices as the ``dcn_*`` keys say. The devices of
  one process are consecutive in that list.

  Args:
    config: sizes of the axes; -1 means all devices that the other axes leave.
    devices: JAX devices, or those of a topology; default: every device of the run.

  Raises:
    UserError: the axis sizes do not multiply to the number of devices or slices.
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
  """Returns the devices as an array of shape dcn * ici. On a torus network, neighbors in the array are network neighbors."""
  if devices[0].platform != "tpu" or set(devices) < set(jax.devices()):  # a subset of a slice is not a torus
    blocks = np.asarray(devices).reshape(*dcn, *ici)
    pairs = [axis + part for axis in range(len(ici)) for part in (0, len(ici))]
    return blocks.transpose(pairs).reshape([a * b for a, b in zip(dcn, ici, strict=True)])

  def torus(split: bool) -> np.ndarray:
    if math.prod(dcn) > 1:
      return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=split)
    return mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=split)

  try:
    return torus(False)
  except NotImplementedError:  # an axis covers only a part of a torus axis
    return torus(True)


def in_words(sizes: Mapping[str, int]) -> str:
  """Returns the axis sizes in words: "data 2 x fsdp 4". Axes other than data and fsdp appear only if larger than 1."""
  return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis in ("data", "fsdp"))


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding that copies an array to every device."""
  return NamedSharding(mesh, PartitionSpec())
