"""A grouped product as a loop over tiles of rows. Each tile is multiplied only by the matrix of its group.

The loop body is compiled once for any number of groups, and runs on every platform. A tile that extends beyond its group writes
rows of the next group. The tiles of that group come later and overwrite them.

M rows, D summed, F columns, G groups, R rows of a tile.
"""

import math

import jax
import jax.numpy as jnp

from maxtext_like.layers.kernels.grouped_matmul.derivative import differentiable
from maxtext_like.layers.kernels.grouped_matmul.registry import Case, GroupedKernel
from maxtext_like.layers.partition import vary_alike

_FEWEST, _MOST = 8, 256


def tile_rows(rows: int, groups: int) -> int:
  """Return R, a power of two. It is at most a fifth of the mean group, so that partial tiles add about a tenth to the work."""
  return 2 ** int(math.log2(min(max(rows / (5 * groups), _FEWEST), _MOST)))


def _tiles(sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Return the first row of each group [G], its first tile [G], and the total number of tiles."""
  # Tiles are numbered group by group.
  ends, counts = jnp.cumsum(sizes), -(-sizes // rows)
  last = jnp.cumsum(counts)
  return ends - sizes, last - counts, last[-1]


def _group_of(tile: jax.Array, first_tiles: jax.Array) -> jax.Array:
  """Return the group of a tile: the last non-empty one that begins at this tile or before it."""
  return jnp.searchsorted(first_tiles, tile, side="right") - 1


def product(x_MD: jax.Array, w_GDF: jax.Array, sizes: jax.Array, precision: jax.lax.PrecisionLike = None) -> jax.Array:
  """Return x[m] @ w[group of m] for every row m.

  Args:
    x_MD: rows, sorted by group.
    w_GDF: one matrix for each group, in x's dtype.
    sizes: int32 [G], rows of each group; their sum is M.
    precision: precision of each product.

  Returns:
    [M, F] in x's dtype, accumulated in float32.
  """
  return _product(*vary_alike(x_MD, w_GDF), sizes, precision)


def _rows_times_groups(x, w, sizes, precision, *, transposed):
  """Return [M, F]. With ``transposed``, x is [M, F] and the result [M, D]."""
  R = tile_rows(x.shape[0], w.shape[0])
  # Tiles run in order, so that a group's tiles overwrite rows that the previous group's last tile wrote.
  first_rows, first_tiles, tiles = _tiles(sizes, R)
  padded = jnp.pad(x, ((0, R), (0, 0)))  # the last tile may extend beyond the rows

  def one(tile, out):
    # Find the group of the tile and its first row, multiply, and write the result.
    group = _group_of(tile, first_tiles)
    at = first_rows[group] + (tile - first_tiles[group]) * R
    rows, weight = jax.lax.dynamic_slice_in_dim(padded, at, R), jax.lax.dynamic_index_in_dim(w, group, keepdims=False)
    spec = "RF,DF->RD" if transposed else "RD,DF->RF"
    made = jnp.einsum(spec, rows, weight, precision=precision, preferred_element_type=jnp.float32)
    return jax.lax.dynamic_update_slice_in_dim(out, made.astype(x.dtype), at, 0)

  out = jnp.zeros((x.shape[0] + R, w.shape[1] if transposed else w.shape[2]), x.dtype)
  out, _ = vary_alike(out, x)
  return jax.lax.fori_loop(0, tiles, one, out)[: x.shape[0]]


def _groups_of_rows(x, g, sizes, precision):
  """Compute the gradient of the matrices, float32 [G, D, F]: x.T @ g over the rows of each group."""
  R = tile_rows(x.shape[0], sizes.shape[0])
  first_rows, first_tiles, tiles = _tiles(sizes, R)
  ends = first_rows + sizes
  x, g = (jnp.pad(y, ((0, R), (0, 0))) for y in (x, g))

  def one(tile, dw):
    # Find the group of the tile and its first row.
    group = _group_of(tile, first_tiles)
    at = first_rows[group] + (tile - first_tiles[group]) * R
    # Set rows of other groups to zero.
    own = at + jnp.arange(R) < ends[group]
    rows = jnp.where(own[:, None], jax.lax.dynamic_slice_in_dim(x, at, R), 0)
    made = jnp.einsum(
      "RD,RF->DF", rows, jnp.where(own[:, None], jax.lax.dynamic_slice_in_dim(g, at, R), 0),
      precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
    before = jax.lax.dynamic_index_in_dim(dw, group, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(dw, before + made, group, 0)

  dw, _ = vary_alike(jnp.zeros((sizes.shape[0], x.shape[1], g.shape[1]), jnp.float32), x)
  return jax.lax.fori_loop(0, tiles, one, dw)


_product = differentiable(_rows_times_groups, _groups_of_rows)


def _avoided(case: Case) -> str:
  return "a GPU is idle between the tiles" if case.platform == "gpu" else ""


KERNEL = GroupedKernel(name="tiles", refuses=lambda case: [], avoided=_avoided, run=product)
