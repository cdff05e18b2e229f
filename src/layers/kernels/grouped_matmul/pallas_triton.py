"""Grouped products in Pallas (Triton) for NVIDIA GPUs: rows times the matrix of their group, and the gradient of the matrices.

Each program computes one tile of a result and reads only the data of its group. The first tile of a group begins at its first
row, and the last one ends with the group. It may repeat rows of the previous tile, with the same result. The gradient of the
matrices sums over rows, so steps are masked at the borders instead, and a NaN cannot cross a border. Neighboring programs
share rows and a matrix, which stay in the second-level cache. Sums are float32, in an order that depends only on shapes and
sizes: equal arguments give equal bits.

M rows, S summed, C columns, G groups, R rows of a tile, V visits (tiles of rows).
"""

import functools
import importlib.util
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maxtext_like.layers.kernels.float16_range import by_group, by_row
from maxtext_like.layers.kernels.grouped_matmul.derivative import differentiable
from maxtext_like.layers.kernels.grouped_matmul.registry import Case, GroupedKernel
from maxtext_like.layers.kernels.grouped_matmul.row_tiles import row_tiles
from maxtext_like.layers.partition import vary_alike

_ROWS, _WEIGHTS = "triton_rows_by_group", "triton_weights_by_group"
"""Names of the kernels in a program."""

_OLDEST = (8, 0)
"""Compute capability of the first GPUs with bfloat16 products."""
_FEWEST, _MOST = 16, 128
"""Limits for rows and columns of a tile. Matrix units need at least 16. More than 128 x 128 float32 sums exceed the
registers."""
_ROWS_ADDED = 32
"""Maximum rows of a step of the gradient of the matrices."""


def _triton() -> Any:
  """Import Pallas for Triton on use: choosing between kernels does not need it."""
  from jax.experimental.pallas import triton

  return triton


def tile_rows(rows: int, groups: int) -> int:
  """Return R, a power of two. It is at most a fifth of the mean group if that is 16 or more, so that rounding up the last tile
  adds about a tenth to the work."""
  return 2 ** int(math.log2(min(max(rows / (5 * groups), _FEWEST), _MOST)))


def rows_worked_on(rows: int, groups: int) -> int:
  """Return the maximum number of rows that are multiplied by matrices. The last tile of each group is rounded up.

  The steps of the gradient of the matrices are not longer than these tiles."""
  return rows + groups * (tile_rows(rows, groups) - 1)


def product(
  x_MS: jax.Array,
  w_GSC: jax.Array,
  sizes: jax.Array,
  precision: jax.lax.PrecisionLike = None,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Return x[m] @ w[group of m] for every row m.

  Args:
    x_MS: rows, bfloat16 or float16, sorted by group.
    w_GSC: one matrix for each group, in x's dtype.
    sizes: int32 [G], rows of each group. Rows after the last group belong to no group.
    precision: no effect, because products of 16-bit numbers are exact before they are added.
    interpret: run on any platform, slowly: for tests.

  Returns:
    [M, C] in x's dtype, accumulated in float32; zeros for rows without a group.

  Raises:
    ValueError: x or w has another dtype.
  """
  del precision
  if x_MS.dtype not in (jnp.bfloat16, jnp.float16) or w_GSC.dtype != x_MS.dtype:
    raise ValueError(f"pallas_triton: x is {x_MS.dtype} and w is {w_GSC.dtype}, but both must be bfloat16 or both float16")
  return _product(*vary_alike(x_MS, w_GSC, sizes), interpret)


def sums(x_MS: jax.Array, w_GSC: jax.Array, sizes: jax.Array, dtype: Any, *, interpret: bool = False) -> jax.Array:
  """Return the float32 sums [M, C] of the same product.

  float32 operands and cotangents are multiplied as 16-bit numbers. float16 ones are scaled by a power of two for each row and
  matrix (for each group in the sum over rows), so that they keep the range of float32.

  Args:
    x_MS, w_GSC: as in ``product``, but each may be float32 or ``dtype``.
    sizes, interpret: as in ``product``.
    dtype: dtype of the products, bfloat16 or float16.

  Raises:
    ValueError: x, w or ``dtype`` has another dtype.
  """
  dtype = jnp.dtype(dtype)
  if dtype not in (jnp.bfloat16, jnp.float16) or not {x_MS.dtype, w_GSC.dtype} <= {dtype, jnp.dtype("float32")}:
    raise ValueError(
      f"pallas_triton: x is {x_MS.dtype} and w is {w_GSC.dtype}, but {dtype} sums need a 16-bit dtype, and arrays in it or "
      "in float32"
    )
  return _sums(*vary_alike(x_MS, w_GSC, sizes), dtype, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _sums(x, w, sizes, dtype, interpret) -> Any:
  return _wide_rows_times_groups(x, w, sizes, dtype, interpret, transposed=False)


def _sums_forward(x, w, sizes, dtype, interpret):
  return _sums(x, w, sizes, dtype, interpret), (x, w, sizes)


def _sums_backward(dtype, interpret, saved, g):
  x, w, sizes = saved
  dx = _wide_rows_times_groups(g, w, sizes, dtype, interpret, transposed=True)
  # Scale x by row. The gradient sums over rows, so the cotangent takes over these scales and gets one by group.
  rows, unit = by_row(x, dtype)
  g, of_group = by_group(g * unit, sizes, dtype)  # the product of x and g has the scales of both
  return dx.astype(x.dtype), _groups_of_rows(rows, g, sizes, interpret, of_group, dtype=w.dtype), None


_sums.defvjp(_sums_forward, _sums_backward)


def _wide_rows_times_groups(x, w, sizes, dtype, interpret, *, transposed):
  """Compute ``_rows_times_groups`` in float32, with operands that keep the range of float32."""
  rows, unit = by_row(x, dtype)
  matrices, of_group = by_row(w.reshape(w.shape[0], -1), dtype)
  made = _rows_times_groups(rows, matrices.reshape(w.shape), sizes, interpret, transposed=transposed, dtype=jnp.float32) * unit
  if w.dtype == dtype:
    return made
  return made * jnp.repeat(of_group, sizes, axis=0, total_repeat_length=x.shape[0])  # rows without a group are zeros


def _tile(size: int) -> int:
  """Return the size of a tile along an axis. Triton needs a power of two. The last tile is masked."""
  return min(max(pl.next_power_of_2(size), _FEWEST), _MOST)


def _below(start: Any, count: int, end: Any) -> jax.Array:
  """Return bool [count]: which of the indices start, start + 1, ... are below ``end``."""
  return start + jax.lax.broadcasted_iota(jnp.int32, (count,), 0) < end


def _load(array: Any, at: tuple[Any, ...], own: jax.Array, inside: jax.Array) -> jax.Array:
  """Load a tile of two axes, with zeros for masked rows and columns, because memory there may contain NaN."""
  return _triton().load(array.at[at], mask=own[:, None] & inside[None, :], other=0.0)


def _split(piece: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Return quotient and remainder."""
  number = jax.lax.div(piece, jnp.int32(count))  # "//" on signed integers would query the device at hand
  return number, piece - number * count


@functools.partial(jax.jit, static_argnames=("interpret", "transposed", "dtype"))  # layers share the compiled kernel
def _rows_times_groups(x, w, sizes, interpret, *, transposed, dtype=None):
  """Return [M, C] in ``dtype`` (None: that of x). With ``transposed``, w is [G, C, S]."""
  # Choose tile sizes and list the tiles of rows.
  plgpu = _triton()
  (M, S), (G, C) = x.shape, (w.shape[0], w.shape[1 if transposed else 2])
  R, width = tile_rows(M, G), _tile(C)
  depth, stages = (32, 4) if R == _MOST else (64, 3)  # 64 to 72 KiB of shared memory; the smallest GPUs have 99 KiB
  depth = min(depth, _tile(S))
  across, steps = pl.cdiv(C, width), pl.cdiv(S, depth)
  # Rows after the last group form one more group. They are set to zero, and no step is computed for them.
  visits, number = row_tiles(jnp.append(sizes, M - jnp.sum(sizes)), M, (R,))

  def kernel(visits, number, x, w, out):
    # Tiles with the same rows are neighbors, so that they share the rows in the cache.
    visit, column = _split(pl.program_id(0), across)
    column = column * width

    @pl.when(visit < number[0])
    def _():
      # Each program computes one tile. Programs beyond the last tile do nothing.
      group, row, valid = visits[0, visit], visits[1, visit], visits[3, visit]
      own, inside = _below(0, R, valid), _below(column, width, C)

      # Sum over S in steps of ``depth``, with masks at the edges.
      def step(k, total):
        deep, there = pl.ds(k * depth, depth), _below(k * depth, depth, S)
        rows = _load(x, (pl.ds(row, R), deep), own, there)
        if transposed:
          matrix = _load(w, (group, pl.ds(column, width), deep), inside, there)
        else:
          matrix = _load(w, (group, deep, pl.ds(column, width)), there, inside)
        return total + plgpu.dot(rows, matrix, trans_b=transposed)

      todo = (group < G).astype(jnp.int32) * steps  # JAX 0.11 converts a choice between two constants to a bool
      total = jax.lax.fori_loop(0, todo, step, jnp.zeros((R, width), jnp.float32))
      plgpu.store(out.at[pl.ds(row, R), pl.ds(column, width)], total.astype(out.dtype), mask=own[:, None] & inside[None, :])

  return pl.pallas_call(
    kernel,
    out_shape=_like(x, (M, C), dtype),
    grid=(visits.shape[1] * across,),
    compiler_params=plgpu.CompilerParams(num_warps=8 if R == _MOST else 4, num_stages=stages),
    interpret=interpret,
    name=_ROWS,
  )(visits, number, x, w)


@functools.partial(jax.jit, static_argnames=("interpret", "dtype"))
def _groups_of_rows(x, g, sizes, interpret, unit=None, *, dtype=None):
  """Compute the gradient of the matrices [G, S, C] in ``dtype`` (None: that of x): x.T @ g over the rows of each group,
  accumulated in float32. ``unit``, float32 [G], is a factor for each group; None: 1."""
  plgpu = _triton()
  (M, S), C, G = x.shape, g.shape[1], sizes.shape[0]
  # Choose tile sizes. Each program computes one tile of the gradient of one group.
  count = min(tile_rows(M, G), _ROWS_ADDED)
  high, wide = _tile(S), _tile(C)
  down, across = pl.cdiv(S, high), pl.cdiv(C, wide)
  ends = jnp.cumsum(sizes)
  spans = jnp.stack([ends - sizes, ends]).astype(jnp.int32)
  units = () if unit is None else (unit,)

  def kernel(spans, *rest):
    *units, x, g, out = rest
    group, piece = _split(pl.program_id(0), down * across)
    # Row and column of the tile, and the rows of the group.
    d, c = _split(piece, across)
    d, c = d * high, c * wide
    begin, end = spans[0, group], spans[1, group]
    of_x, of_g = _below(d, high, S), _below(c, wide, C)

    def step(k, total):
      at = begin + k * count
      own, rows = _below(at, count, end), pl.ds(at, count)
      left, right = _load(x, (rows, pl.ds(d, high)), own, of_x), _load(g, (rows, pl.ds(c, wide)), own, of_g)
      return total + plgpu.dot(left, right, trans_a=True)

    # Sum over the rows of the group, in steps of ``count`` rows.
    todo = jax.lax.div(end - begin + (count - 1), jnp.int32(count))
    total = jax.lax.fori_loop(0, todo, step, jnp.zeros((high, wide), jnp.float32))
    # Apply the scale of the group.
    for unit in units:
      total = total * unit[group]
    there = out.at[group, pl.ds(d, high), pl.ds(c, wide)]
    plgpu.store(there, total.astype(out.dtype), mask=of_x[:, None] & of_g[None, :])

  return pl.pallas_call(
    kernel,
    out_shape=_like(x, (G, S, C), dtype),
    grid=(G * down * across,),
    compiler_params=plgpu.CompilerParams(num_warps=8 if high * wide == _MOST**2 else 4, num_stages=4),
    interpret=interpret,
    name=_WEIGHTS,
  )(spans, *units, x, g)


def _like(x, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  """Declare a result in ``dtype`` (None: that of x) that varies over the devices that x varies over."""
  return jax.ShapeDtypeStruct(shape, dtype or x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


_product = differentiable(_rows_times_groups, _groups_of_rows)


def _refuses(case: Case) -> list[str]:
  reasons = [] if case.platform == "gpu" else [f"it runs on NVIDIA GPUs, not on {case.platform}"]
  if case.capability is not None:
    known = re.fullmatch(r"(\d+)\.(\d+)", case.capability)  # for GPUs of other vendors it is a name
    if known is None or (int(known[1]), int(known[2])) < _OLDEST:
      reasons.append(f"it needs a GPU of compute capability {'.'.join(map(str, _OLDEST))} or higher, not {case.capability}")
  if case.dtype == "float32":
    reasons.append("it does not support float32 operands")
  if importlib.util.find_spec("jax.experimental.pallas.triton") is None:  # deprecated since JAX 0.11
    reasons.append(f"JAX {jax.__version__} does not have Pallas for Triton")
  return reasons


KERNEL = GroupedKernel(
  name="pallas_triton",
  refuses=_refuses,
  avoided=lambda case: "",
  run=product,
  run_for_sums=sums,
  called=lambda path, name: _ROWS in path or _WEIGHTS in path,
  rows=rows_worked_on,
  skips=True,
  fused=True,
)
