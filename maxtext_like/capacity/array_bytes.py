"""Bytes of one device's part of trees of shapes."""

import math
from collections.abc import Callable
from typing import Any

import jax

from maxtext_like.sharding.host_memory import is_on_host

Numbers = Callable[[tuple[int, ...]], int]
"""Returns the number of elements whose memory an array of this shape takes."""


def bytes_of(tree: Any, numbers: Numbers = math.prod) -> int:
  """Return the bytes of one device's part of a tree of shapes."""
  total = 0
  for x in jax.tree.leaves(tree):
    sharding = getattr(x, "sharding", None)
    shape = sharding.shard_shape(x.shape) if sharding is not None else x.shape
    total += numbers(shape) * x.dtype.itemsize
  return total


def by_place(tree: Any) -> tuple[list[Any], list[Any]]:
  """Return the arrays of a tree of shapes in two lists: those on the device, and those in host memory."""
  found: tuple[list[Any], list[Any]] = ([], [])
  for x in jax.tree.leaves(tree):
    found[is_on_host(x)].append(x)
  return found


def bytes_as(dtype: Any, tree: Any, numbers: Numbers = math.prod) -> int:
  """Return the bytes of one device's part of a tree of shapes in another dtype."""
  return bytes_of(as_dtype(tree, dtype), numbers)


def as_dtype(tree: Any, dtype: Any) -> Any:
  """Return the same shapes in another dtype."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), tree)
