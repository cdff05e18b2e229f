"""The list of tiles of rows that the kernels of GPUs work through.

M rows, G groups, R most rows of a tile, V visits (tiles of rows).
"""

import jax
import jax.numpy as jnp


def row_tiles(sizes: jax.Array, rows: int, counts: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """The tiles of rows: int32 [4, V], of each its group, its first row, which of ``counts`` it has, and how many of those are
  its group's (all, but in a group that is smaller); and int32 [1], how many tiles there are. V is the most that any sizes need.

  Args:
    sizes: [G], of all groups; their sum is M.
    rows: M.
    counts: of a tile's rows, rising.
  """
  R, able = counts[-1], jnp.asarray(counts, jnp.int32)
  ends = jnp.cumsum(sizes)
  whole, rest = sizes // R, sizes % R
  last = jnp.searchsorted(able, rest)  # the smallest that holds the rest
  number = whole + (rest > 0)
  behind = jnp.cumsum(number)
  visit = jnp.arange(rows // R + sizes.shape[0])
  group = jnp.minimum(jnp.searchsorted(behind, visit, side="right"), sizes.shape[0] - 1)
  within = visit - (behind - number)[group]
  size, is_whole = sizes[group], within < whole[group]
  kind = jnp.where(is_whole, len(counts) - 1, last[group])
  start = jnp.where(is_whole, within * R, jnp.maximum(size - able[kind], 0))
  found = (group, (ends - sizes)[group] + start, kind, jnp.minimum(able[kind], size))
  return jnp.stack(found).astype(jnp.int32), behind[-1:].astype(jnp.int32)
