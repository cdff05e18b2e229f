"""Grouped products in Pallas for TPUs: rows times the matrix of their group, and the gradient of the matrices.

The grid iterates over visits: pairs of a tile of rows and a group that has some of them. A tile in which a group ends is
visited for each of its groups. Such a visit multiplies only the parts of the tile that the group reaches, in one product. Work
is therefore repeated for at most one part at each border between groups. Rows after the last group are not multiplied.

Sums are float32. JAX's own kernel (megablox) multiplies complete tiles at borders. It has no ``matmul_precision``, uses one
tile size for three products, needs a multiple of it as the number of rows, and does not support varying axes of shard_map.

M rows, D summed, F columns, G groups, R rows of a tile, V visits.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxtext_like.layers.kernels.grouped_matmul.derivative import differentiable
from maxtext_like.layers.kernels.grouped_matmul.registry import Case, GroupedKernel
from maxtext_like.layers.partition import vary_alike

_ROWS, _WEIGHTS = "grouped_rows", "grouped_weights"
"""Names of the kernels in a program."""

_LANES = 128
_FEWEST, _MOST = 16, 64
"""Rows of a part. Two bfloat16 rows share one of the eight rows of a register; 256 rows fill the matrix unit."""

_BLOCKS = 20 << 20
"""Bytes of vector memory for the blocks of a kernel, two of each. Intermediate values need vector memory too."""
_VECTOR_MEMORY = 48 << 20


def tile_and_part(rows: int, groups: int) -> tuple[int, int]:
  """Return R, and the rows of a part of a tile with several groups, which is at most a tenth of the mean group."""
  part = 2 ** int(math.log2(min(max(rows / (10 * groups), _FEWEST), _MOST)))
  return 4 * part if part > _FEWEST else 8 * part, part


def rows_worked_on(rows: int, groups: int) -> int:
  """Return the maximum number of rows that are multiplied, for any sizes: all rows, and one part at each border."""
  return rows + (groups - 1) * tile_and_part(rows, groups)[1]


def product(
  x_MD: jax.Array, w_GDF: jax.Array, sizes: jax.Array, precision: jax.lax.PrecisionLike = None, *, interpret: bool = False
) -> jax.Array:
  """Return x[m] @ w[group of m] for every row m.

  Args:
    x_MD: rows, bfloat16 or float32, sorted by group.
    w_GDF: one matrix for each group, in x's dtype.
    sizes: int32 [G], rows of each group. Rows after the last group belong to no group.
    precision: ``jax.lax.Precision`` of float32 products. Products of bfloat16 numbers are exact before they are added.
    interpret: run on any platform, slowly: for tests.

  Returns:
    [M, F] in x's dtype, accumulated in float32; zeros for rows without a group.
  """
  return _product(*vary_alike(x_MD, w_GDF, sizes), jax.lax.Precision(precision), interpret)


def _visits(sizes: jax.Array, rows: int, tile: int, *, empty: bool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """List the visits. Return four int32 [V]: group, tile, and the first and last row (exclusive) of the group in the tile.

  V is the maximum that any sizes need. Visits after the last one repeat its group and tile, without rows.

  Args:
    sizes: [G], rows of all groups to visit.
    rows: M.
    tile: R.
    empty: visit groups without rows too, once.
  """
  ends = jnp.cumsum(sizes)
  starts = ends - sizes
  # A group without rows gets the position where the previous group ended, clipped to the rows.
  first = jnp.minimum(starts, rows - 1) // tile
  counts = jnp.where(sizes > 0, (ends - 1) // tile - first + 1, int(empty))
  behind = jnp.cumsum(counts)
  # Find group, tile and row range of each visit.
  number = jnp.arange(-(-rows // tile) + sizes.shape[0])
  real = number < behind[-1]
  number = jnp.minimum(number, behind[-1] - 1)
  group = jnp.searchsorted(behind, number, side="right")
  at = first[group] + number - (behind - counts)[group]
  begin = jnp.where(real, jnp.clip(starts[group] - at * tile, 0, tile), 0)
  end = jnp.where(real, jnp.clip(ends[group] - at * tile, 0, tile), 0)
  found = (group, at, begin, end)
  return tuple(x.astype(jnp.int32) for x in found)  # pyright: ignore[reportReturnType]


def _dot(a: jax.Array, b: jax.Array, summed: tuple[int, int], precision: jax.lax.Precision) -> jax.Array:
  """Return the float32 product of two matrices over one axis of each.

  Mosaic does not support Precision.HIGH. It is computed as three products of the upper and lower halves of float32 numbers,
  which represent float16 numbers exactly."""
  dims = (((summed[0],), (summed[1],)), ((), ()))

  def dot(a, b, precision=None):
    return jax.lax.dot_general(a, b, dims, precision, preferred_element_type=jnp.float32)

  if a.dtype == jnp.bfloat16:
    return dot(a, b)
  if precision != jax.lax.Precision.HIGH:
    return dot(a, b, precision)
  # Precision.HIGH: split each operand into an upper and a lower bfloat16 half, and leave out the product of the lower halves.
  upper = [x.astype(jnp.bfloat16) for x in (a, b)]
  lower = [(x - u.astype(jnp.float32)).astype(jnp.bfloat16) for x, u in zip((a, b), upper, strict=True)]
  return dot(upper[0], lower[1]) + dot(lower[0], upper[1]) + dot(*upper)


def _own_rows(begin, end, tile: int, part: int, work) -> None:
  """Call work(rows, own) once, inside a kernel, for the parts of the tile that rows ``begin`` to ``end`` reach.

  rows is a slice of the tile. own, bool [rows, 1], is True for rows from ``begin`` to ``end``. Without rows, work is not
  called."""
  first = jax.lax.div(begin, part)  # "//" on signed integers would query the device at hand
  parts = jnp.where(end > begin, jax.lax.div(end + part - 1, part) - first, 0)

  def worked_on(rows: int) -> None:
    start = pl.multiple_of(first * part, part) if rows < tile else 0
    at = start + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    work(pl.ds(start, rows), (at >= begin) & (at < end))

  for count in range(1, tile // part + 1):
    pl.when(parts == count)(functools.partial(worked_on, count * part))


@functools.partial(jax.jit, static_argnames=("precision", "interpret", "transposed"), inline=True)
def _rows_times_groups(x, w, sizes, precision, interpret, *, transposed):
  """Return [M, F]. With ``transposed``, x is [M, F] and the result [M, D]. It is traced once for all equal layers."""
  (M, summed), G = x.shape, w.shape[0]
  columns, item = w.shape[1 if transposed else 2], x.dtype.itemsize
  # Choose tile sizes that fit vector memory, and list the visits.
  R, part = tile_and_part(M, G)
  width = _width(columns, lambda n: 2 * item * (R * summed + summed * n + R * n) <= _BLOCKS)
  # Rows after the last group form one more group, and are set to zero.
  group, at, begin, end = _visits(jnp.append(sizes, M - jnp.sum(sizes)), M, R, empty=False)

  def kernel(group, at, begin, end, x, w, out):
    del at
    v = pl.program_id(1)

    def multiply(rows, own):
      made = _dot(x[rows, :], w[...], (1, 1 if transposed else 0), precision)
      out[rows, :] = jnp.where(own, made, out[rows, :].astype(jnp.float32)).astype(out.dtype)

    # Rows after the last group are set to zero.
    def wipe(rows, own):
      out[rows, :] = jnp.where(own, 0.0, out[rows, :].astype(jnp.float32)).astype(out.dtype)

    # Multiply the rows of real groups, and clear the rows after the last group.
    pl.when(group[v] < G)(lambda: _own_rows(begin[v], end[v], R, part, multiply))
    pl.when(group[v] == G)(lambda: _own_rows(begin[v], end[v], R, R, wipe))

  # The block indices of a visit: its tile of rows, and the matrix of its group.
  of_rows = lambda c, v, group, at, begin, end: (at[v], 0)
  of_group = lambda c, v, group, at, begin, end: (
    (jnp.minimum(group[v], G - 1), c, 0) if transposed else (jnp.minimum(group[v], G - 1), 0, c)
  )
  return pl.pallas_call(
    kernel,
    out_shape=_like(x, (M, columns), x.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(pl.cdiv(columns, width), group.shape[0]),
      in_specs=[
        pl.BlockSpec((R, summed), of_rows),
        pl.BlockSpec((None, width, summed) if transposed else (None, summed, width), of_group),
      ],
      out_specs=pl.BlockSpec((R, width), lambda c, v, group, at, begin, end: (at[v], c)),
    ),
    compiler_params=_parameters("parallel", "arbitrary"),
    cost_estimate=_cost(M, G, summed, columns, item, reads=pl.cdiv(columns, width)),
    interpret=interpret,
    name=_ROWS,
  )(group, at, begin, end, x, w)


def _groups_of_rows(x, g, sizes, precision, interpret):
  """Compute the gradient of the matrices [G, D, F]: x.T @ g over the rows of each group, accumulated in float32."""
  (M, D), F, G, item = x.shape, g.shape[1], sizes.shape[0], x.dtype.itemsize
  R, part = tile_and_part(M, G)
  # Choose tile sizes that fit vector memory, and list the visits. Groups without rows need a visit to write zeros.
  fits = lambda d, f: 2 * item * R * (d + f) + d * f * (4 + 2 * item) <= _BLOCKS
  # Tiles as large as vector memory allows, first for the rows of the matrix, then for its columns.
  high = _width(D, lambda d: fits(d, min(F, 1024)))
  wide = _width(F, lambda f: fits(high, f))
  group, at, begin, end = _visits(sizes, M, R, empty=True)
  last = group.shape[0] - 1

  def kernel(group, at, begin, end, x, g, out, total):
    del at
    v = pl.program_id(2)

    # The first visit of a group clears the sum, and the last one writes it.
    @pl.when((v == 0) | (group[jnp.maximum(v - 1, 0)] != group[v]))
    def _():
      total[...] = jnp.zeros_like(total)

    def add(rows, own):
      # Rows of other groups may be NaN, so they are set to zero before the product.
      left, right = (jnp.where(own, y[rows, :].astype(jnp.float32), 0.0).astype(y.dtype) for y in (x, g))
      total[...] += _dot(left, right, (0, 0), precision)

    _own_rows(begin[v], end[v], R, part, add)

    # The last visit of a group writes the sum.
    @pl.when((v == last) | (group[jnp.minimum(v + 1, last)] != group[v]))
    def _():
      out[...] = total[...].astype(out.dtype)

  return pl.pallas_call(
    kernel,
    out_shape=_like(x, (G, D, F), x.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(pl.cdiv(D, high), pl.cdiv(F, wide), group.shape[0]),
      in_specs=[
        pl.BlockSpec((R, high), lambda d, f, v, group, at, begin, end: (at[v], d)),
        pl.BlockSpec((R, wide), lambda d, f, v, group, at, begin, end: (at[v], f)),
      ],
      out_specs=pl.BlockSpec((None, high, wide), lambda d, f, v, group, at, begin, end: (group[v], d, f)),
      scratch_shapes=[pltpu.VMEM((high, wide), jnp.float32)],
    ),
    compiler_params=_parameters("parallel", "parallel", "arbitrary"),
    cost_estimate=_cost(M, G, D, F, item, reads=pl.cdiv(F, wide)),
    interpret=interpret,
    name=_WEIGHTS,
  )(group, at, begin, end, x, g)


def _width(size: int, fits) -> int:
  """Return the columns of a block: all if they fit, else the largest multiple of the lanes, preferably one that divides
  them."""
  if fits(size):
    return size
  # Prefer a divisor, which needs no partial block, unless it is less than half as wide.
  able = [n for n in range(_LANES, size, _LANES) if fits(n)] or [_LANES]
  even = [n for n in able if size % n == 0]
  return even[-1] if even and 2 * even[-1] >= able[-1] else able[-1]


def _like(x, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  """Declare an output that varies over the devices that x varies over."""
  return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _parameters(*dimensions: Any) -> pltpu.CompilerParams:
  return pltpu.CompilerParams(dimension_semantics=dimensions, vmem_limit_bytes=_VECTOR_MEMORY)


def _cost(M: int, G: int, summed: int, columns: int, item: int, *, reads: int) -> pl.CostEstimate:
  """Return the cost estimate that the compiler uses for scheduling. reads: how often the rows are read."""
  moved = (M * summed * reads + M * columns + G * summed * columns) * item
  return pl.CostEstimate(flops=2 * rows_worked_on(M, G) * summed * columns, bytes_accessed=moved, transcendentals=0)


_product = differentiable(_rows_times_groups, _groups_of_rows)


def _refuses(case: Case) -> list[str]:
  reasons = [] if case.platform == "tpu" else [f"it runs on TPUs, not on {case.platform}"]
  # Mosaic does not support float16.
  return reasons + (["TPUs have no grouped float16 product"] if case.dtype == "float16" else [])


KERNEL = GroupedKernel(
  name="pallas_tpu",
  refuses=_refuses,
  avoided=lambda case: "",
  run=product,
  float16="high",
  called=lambda path, name: _ROWS in path or _WEIGHTS in path,
  rows=rows_worked_on,
  skips=True,
  fused=True,
)
