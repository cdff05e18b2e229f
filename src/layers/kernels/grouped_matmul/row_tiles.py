"""The list of tiles of rows for the grouped kernels of GPUs.

M rows, G groups, R maximum rows of a tile, V visits (tiles of rows).
"""

import jax
import jax.numpy as jnp


def row_tiles(sizes: jax.Array, rows: int, counts: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """Cut the rows of each group into tiles.

  Args:
    sizes: [G], rows of all groups; their sum is M.
    rows: M.
    counts: numbers of rows that a tile can have, in increasing order.

  Returns:
    int32 [4, V]: for each tile its group, its first row, the index of its number of rows in ``counts``, and how many of these
    rows belong to its group (all, unless the group is smaller than the tile); and int32 [1], the number of tiles. V is the
    maximum that any sizes need.
  """
  R, able = counts[-1], jnp.asarray(counts, jnp.int32)
  # Number of tiles of each group: complete ones, and one for the rest.
  ends = jnp.cumsum(sizes)
  whole, rest = sizes // R, sizes % R
  # The smallest tile that holds the remaining rows. Comparing with all entries of so short a list takes one small kernel; a
  # binary search is a loop of several.
  last = jnp.searchsorted(able, rest, method="compare_all")
  number = whole + (rest > 0)
  behind = jnp.cumsum(number)
  # Find the group of each visit, and the index of the tile in the group.
  visit = jnp.arange(rows // R + sizes.shape[0])
  group = jnp.minimum(jnp.searchsorted(behind, visit, side="right", method="compare_all"), sizes.shape[0] - 1)
  within = visit - (behind - number)[group]
  # The last tile ends with its group, so it may start before the end of the previous tile.
  size, is_whole = sizes[group], within < whole[group]
  kind = jnp.where(is_whole, len(counts) - 1, last[group])
  start = jnp.where(is_whole, within * R, jnp.maximum(size - able[kind], 0))
  found = (group, (ends - sizes)[group] + start, kind, jnp.minimum(able[kind], size))
  return jnp.stack(found).astype(jnp.int32), behind[-1:].astype(jnp.int32)
