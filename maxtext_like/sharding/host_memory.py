"""Moves arrays between device memory and pinned host memory, for states that are offloaded to the host.

While a program is traced, the memory of an array is part of its type (``jax.memory.Space``). It is always part of the sharding.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

Tree = Any

KIND = "pinned_host"
"""The ``memory_kind`` of pinned host memory in a sharding."""


def is_traced_on_host(x: Any) -> bool:
  """Returns True if a traced array is in host memory."""
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Tree) -> Tree:
  """Moves traced arrays to the device."""
  return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_traced_on_host(x) else x, tree)


def put_like(tree: Tree, like: Tree) -> Tree:
  """Moves traced arrays to where the corresponding arrays of ``like`` are."""
  return jax.tree.map(lambda x, old: jax.device_put(x, jax.memory.Space.Host) if is_traced_on_host(old) else x, tree, like)


def row(x: jax.Array, i: jax.Array) -> jax.Array:
  """Returns row i of a traced array, on the device."""
  return to_device(jax.lax.dynamic_index_in_dim(x, i, keepdims=False))


def is_on_host(x: Any) -> bool:
  """Returns True if a concrete array, or a shape with a sharding, is in host memory."""
  return getattr(getattr(x, "sharding", None), "memory_kind", None) == KIND


def on_device(x: jax.Array) -> jax.Array:
  """Moves a concrete array to its device.

  Nothing can be computed in host memory. A numpy view of it would also prevent donation of the array to the next step.
  """
  return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def to_numpy(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Copies the arrays in host memory to numpy, one at a time through the device. Returns all arrays by name."""
  return {name: np.array(on_device(x)) if is_on_host(x) else x for name, x in arrays.items()}
