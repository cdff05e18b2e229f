"""Arrays in the memory of a device's host, which the device reads and writes: how they come from there, and go back.

Where an array lies is in its type as a program is traced (``jax.memory.Space``), and in its sharding always.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

Tree = Any

KIND = "pinned_host"
"""What a sharding calls that memory."""


def is_there(x: Any) -> bool:
  """Whether a traced array lies on the host."""
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def fetched(tree: Tree) -> Tree:
  """Traced arrays on the device."""
  return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_there(x) else x, tree)


def returned(tree: Tree, like: Tree) -> Tree:
  """Traced arrays where those of ``like`` lie."""
  return jax.tree.map(lambda x, old: jax.device_put(x, jax.memory.Space.Host) if is_there(old) else x, tree, like)


def row(x: jax.Array, i: jax.Array) -> jax.Array:
  """Row i of a traced array, on the device."""
  return fetched(jax.lax.dynamic_index_in_dim(x, i, keepdims=False))


def lies_there(x: Any) -> bool:
  """Whether an array that is there, or its shape with a sharding, lies on the host."""
  return getattr(getattr(x, "sharding", None), "memory_kind", None) == KIND


def on_device(x: jax.Array) -> jax.Array:
  """An array that is there, on its device: on the host nothing is computed, and numpy would see the memory itself, which then
  could not be given to the next step."""
  return jax.device_put(x, jax.memory.Space.Device) if lies_there(x) else x


def copied(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """The same by name, those on the host copied to numpy, by way of the device and one after the other."""
  return {name: np.array(on_device(x)) if lies_there(x) else x for name, x in arrays.items()}
