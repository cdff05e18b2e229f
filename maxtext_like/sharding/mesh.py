"""The mesh of a run: its devices in a grid whose axes are named in the ``mesh:`` section."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxtext_like.config.schema import MeshConfig
from maxtext_like.errors import UserError
from maxtext_like.layers.partition import MESH_AXES, RULES


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
  """The mesh of all devices, or of the given ones.

  Args:
    config: sizes of the axes, -1 for what the others leave.
    devices: jax devices; default: every device of the run.

  Raises:
    UserError: the axes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  try:
    sizes = config.axis_sizes(len(devices))
  except ValueError as error:
    raise UserError(str(error)) from error
  shape = tuple(sizes[axis] for axis in MESH_AXES)
  kinds = (AxisType.Auto,) * len(shape)
  if len(devices) > 1 and len(devices) == len(jax.devices()):
    # Neighbours in the mesh are neighbours in the network (a torus on TPU).
    return jax.make_mesh(shape, MESH_AXES, axis_types=kinds, devices=devices)
  return Mesh(np.asarray(devices).reshape(shape), MESH_AXES, axis_types=kinds)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """How a batch [B, T] lies on the mesh: rows over every axis that the table gives to "batch"."""
  axes = RULES["batch"]
  return NamedSharding(mesh, PartitionSpec(axes))


def replicated(mesh: Mesh) -> NamedSharding:
  """The same array on every device."""
  return NamedSharding(mesh, PartitionSpec())
