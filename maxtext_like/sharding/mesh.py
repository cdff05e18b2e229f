"""The mesh of a run: its devices in a grid whose axes are named in the ``mesh:`` section."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from maxtext_like.config.schema import MeshConfig
from maxtext_like.errors import UserError
from maxtext_like.layers.partition import MESH_AXES, Rules

Mesh = jax.sharding.Mesh | AbstractMesh


def abstract_mesh(config: MeshConfig, devices: int) -> AbstractMesh:
  """A mesh of so many devices that are not there.

  Raises:
    UserError: the axes do not multiply to the number of devices.
  """
  try:
    sizes = config.axis_sizes(devices)
  except ValueError as error:
    raise UserError(str(error)) from error
  return AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def use_mesh(mesh: Mesh) -> AbstractContextManager[Any]:
  """The context in which programs are traced and lowered for a mesh."""
  return jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
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
  return jax.sharding.Mesh(np.asarray(devices).reshape(shape), MESH_AXES, axis_types=kinds)


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
  """How a batch [B, T] lies on the mesh: its sequences over every axis that the rules give to "batch"."""
  return NamedSharding(mesh, PartitionSpec(rules.batch))


def replicated(mesh: Mesh) -> NamedSharding:
  """The same array on every device."""
  return NamedSharding(mesh, PartitionSpec())
