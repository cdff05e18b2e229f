"""Norms of parameter trees, kept apart by layer: one pass over the arrays gives the global norm and says where it broke."""

from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.decoder import Decoder
from maxtext_like.models.naming import path_keys, row_names

Tree = Any


def row_squares(tree: Tree) -> jax.Array:
  """The sum of squares of every layer's array, float32 [R]: a stacked leaf gives one number for each of its rows.

  A number that is not finite means a NaN or infinity in that array, or entries beyond 1e19, whose squares overflow: no
  update survives either.
  """
  parts = []
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    squares = jnp.square(x.astype(jnp.float32))
    stacked = path_keys(path)[0].startswith("stack_")
    parts.append(jnp.sum(squares, axis=tuple(range(1, x.ndim))) if stacked else jnp.sum(squares)[None])
  return jnp.concatenate(parts)


def row_labels(decoder: Decoder, tree: Tree) -> list[str]:
  """The parameter names behind the entries of ``row_squares``, as ``layers.7.mlp.down``."""
  return [name for path, _ in jax.tree_util.tree_leaves_with_path(tree) for name in row_names(decoder, path_keys(path))]
