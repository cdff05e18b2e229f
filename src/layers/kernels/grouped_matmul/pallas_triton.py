"""A grouped product as two Pallas kernels for NVIDIA GPUs, by Triton: rows times the matrix of their group, and the gradient of
the matrices.

Each program makes one tile of a result, and reads nothing but what its own group has. A group's tiles begin at its own first
row, and the last one ends where the group ends: it may repeat rows of the tile before, which come out the same. In the gradient
of the matrices, where rows are added up, steps are masked there instead, so no NaN crosses a border. Programs that lie side by
side share rows and a matrix, which the second level of the cache then has. Sums are float32, in an order that shapes and sizes
alone decide: the same arguments give the same bits.

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
from maxtext_like.layers.kernels.grouped_matmul.registry import Case, GroupedKernel
from maxtext_like.layers.kernels.grouped_matmul.row_tiles import row_tiles
from maxtext_like.layers.partition import vary_alike

_ROWS, _WEIGHTS = "triton_rows_by_group", "triton_weights_by_group"
"""What the kernels are called in a program."""

_OLDEST = (8, 0)
"""Compute capability of the first GPUs that multiply bfloat16."""
_FEWEST, _MOST = 16, 128
"""Of rows and of columns of a tile: fewer than 16 no matrix unit multiplies, more than 128 by 128 float32 sums leave no
registers."""
_ROWS_ADDED = 32
"""The most rows of a step of the gradient of the matrices."""


def _triton() -> Any:
  """Pallas by Triton. Who only chooses between kernels shall not wait for its import."""
  from jax.experimental.pallas import triton

  return triton


def tile_rows(rows: int, groups: int) -> int:
  """R, a power of two: at most a fifth of the mean group where that is 16 or more, so that rounding up the last tile adds about
  a tenth to the work."""
  return 2 ** int(math.log2(min(max(rows / (5 * groups), _FEWEST), _MOST)))


def rows_worked_on(rows: int, groups: int) -> int:
  """The most rows that are multiplied with matrices: of each group, those that its last tile is rounded up by. Steps of the
  gradient of the matrices are no longer."""
  return rows + groups * (tile_rows(rows, groups) - 1)


def product(
  x_MS: jax.Array,
  w_GSC: jax.Array,
  sizes: jax.Array,
  precision: jax.lax.PrecisionLike = None,
  *,
  interpret: bool = False,
) -> jax.Array:
  """x[m] @ w[group of m] for every row m.

  Args:
    x_MS: rows, bfloat16 or float16; those of group 0 first, then those of group 1, ...
    w_GSC: a matrix for each group, of x's dtype.
    sizes: int32 [G], rows of each group. Rows behind them all are no one's.
    precision: of no effect: products of 16-bit numbers are exact before they are added up.
    interpret: run on any platform, slowly: for tests.

  Returns:
    [M, C] in x's dtype, accumulated in float32; zeros for no one's rows.

  Raises:
    ValueError: other dtypes.
  """
  del precision
  if x_MS.dtype not in (jnp.bfloat16, jnp.float16) or w_GSC.dtype != x_MS.dtype:
    raise ValueError(f"pallas_triton: x is {x_MS.dtype} and w {w_GSC.dtype}; both have to be bfloat16 or float16")
  return _product(*vary_alike(x_MS, w_GSC, sizes), interpret)


def sums(x_MS: jax.Array, w_GSC: jax.Array, sizes: jax.Array, dtype: Any, *, interpret: bool = False) -> jax.Array:
  """The same in float32 [M, C], as it is added up.

  What is float32, cotangents too, is multiplied as 16-bit numbers, float16 ones with a power of two for each row and matrix, or
  for each group where rows are added up: so it keeps float32's range.

  Args:
    x_MS, w_GSC: as of ``product``, each float32 or of ``dtype``.
    sizes, interpret: as of ``product``.
    dtype: bfloat16 or float16, that they are multiplied in.

  Raises:
    ValueError: other dtypes.
  """
  dtype = jnp.dtype(dtype)
  if dtype not in (jnp.bfloat16, jnp.float16) or not {x_MS.dtype, w_GSC.dtype} <= {dtype, jnp.dtype("float32")}:
    raise ValueError(f"pallas_triton: x is {x_MS.dtype} and w {w_GSC.dtype}: there are no sums of {dtype} products of them")
  return _sums(*vary_alike(x_MS, w_GSC, sizes), dtype, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x, w, sizes, interpret) -> Any:
  return _rows_times_groups(x, w, sizes, interpret, transposed=False)


def _forward(x, w, sizes, interpret):
  return _product(x, w, sizes, interpret), (x, w, sizes)


def _backward(interpret, saved, g):
  x, w, sizes = saved
  g = g.astype(x.dtype)
  dx = _rows_times_groups(g, w, sizes, interpret, transposed=True)
  return dx, _groups_of_rows(x, g, sizes, interpret), None


_product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _sums(x, w, sizes, dtype, interpret) -> Any:
  return _wide_rows_times_groups(x, w, sizes, dtype, interpret, transposed=False)


def _sums_forward(x, w, sizes, dtype, interpret):
  return _sums(x, w, sizes, dtype, interpret), (x, w, sizes)


def _sums_backward(dtype, interpret, saved, g):
  x, w, sizes = saved
  dx = _wide_rows_times_groups(g, w, sizes, dtype, interpret, transposed=True)
  rows, unit = by_row(x, dtype)
  g, of_group = by_group(g * unit, sizes, dtype)  # a row adds to the sum what x and g have together
  return dx.astype(x.dtype), _groups_of_rows(rows, g, sizes, interpret, of_group, dtype=w.dtype), None


_sums.defvjp(_sums_forward, _sums_backward)


def _wide_rows_times_groups(x, w, sizes, dtype, interpret, *, transposed):
  """As ``_rows_times_groups``, in float32, of operands that keep their range."""
  rows, unit = by_row(x, dtype)
  matrices, of_group = by_row(w.reshape(w.shape[0], -1), dtype)
  made = _rows_times_groups(rows, matrices.reshape(w.shape), sizes, interpret, transposed=transposed, dtype=jnp.float32) * unit
  if w.dtype == dtype:
    return made
  return made * jnp.repeat(of_group, sizes, axis=0, total_repeat_length=x.shape[0])  # those of no one are zeros


def _tile(size: int) -> int:
  """Numbers of an axis in a tile, a power of two as Triton wants it; the last tile is masked."""
  return min(max(pl.next_power_of_2(size), _FEWEST), _MOST)


def _below(start: Any, count: int, end: Any) -> jax.Array:
  """bool [count]: which of the numbers from ``start`` on are below ``end``."""
  return start + jax.lax.broadcasted_iota(jnp.int32, (count,), 0) < end


def _load(array: Any, at: tuple[Any, ...], own: jax.Array, inside: jax.Array) -> jax.Array:
  """A tile of two axes, with zeros where a row or a column is not to be read. What is there may be anything, and nothing times
  that is not nothing."""
  return _triton().load(array.at[at], mask=own[:, None] & inside[None, :], other=0.0)


def _split(piece: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Quotient and rest."""
  number = jax.lax.div(piece, jnp.int32(count))  # of signed numbers "//" asks the machine at hand for its kind
  return number, piece - number * count


@functools.partial(jax.jit, static_argnames=("interpret", "transposed", "dtype"))  # layers share what Triton makes of it
def _rows_times_groups(x, w, sizes, interpret, *, transposed, dtype=None):
  """[M, C] in a dtype, None: x's; with ``transposed`` w is [G, C, S]."""
  plgpu = _triton()
  (M, S), (G, C) = x.shape, (w.shape[0], w.shape[1 if transposed else 2])
  R, width = tile_rows(M, G), _tile(C)
  depth, stages = (32, 4) if R == _MOST else (64, 3)  # 64 to 72 KiB of shared memory, of which the smallest GPUs give 99
  depth = min(depth, _tile(S))
  across, steps = pl.cdiv(C, width), pl.cdiv(S, depth)
  # What is left behind the groups is one more, whose rows become zeros: no step is made for them.
  visits, number = row_tiles(jnp.append(sizes, M - jnp.sum(sizes)), M, (R,))

  def kernel(visits, number, x, w, out):
    # Tiles of the same rows lie side by side.
    visit, column = _split(pl.program_id(0), across)
    column = column * width

    @pl.when(visit < number[0])
    def _():
      group, row, valid = visits[0, visit], visits[1, visit], visits[3, visit]
      own, inside = _below(0, R, valid), _below(column, width, C)

      def step(k, total):
        deep, there = pl.ds(k * depth, depth), _below(k * depth, depth, S)
        rows = _load(x, (pl.ds(row, R), deep), own, there)
        if transposed:
          matrix = _load(w, (group, pl.ds(column, width), deep), inside, there)
        else:
          matrix = _load(w, (group, deep, pl.ds(column, width)), there, inside)
        return total + plgpu.dot(rows, matrix, trans_b=transposed)

      todo = (group < G).astype(jnp.int32) * steps  # JAX 0.11 makes a bool of a choice between two constants
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
  """The gradient of the weights [G, S, C] in a dtype, None: x's. x.T @ g over the rows of each group, added up in float32,
  times the group's of the units, float32 [G], None: 1."""
  plgpu = _triton()
  (M, S), C, G = x.shape, g.shape[1], sizes.shape[0]
  count = min(tile_rows(M, G), _ROWS_ADDED)
  high, wide = _tile(S), _tile(C)
  down, across = pl.cdiv(S, high), pl.cdiv(C, wide)
  ends = jnp.cumsum(sizes)
  spans = jnp.stack([ends - sizes, ends]).astype(jnp.int32)
  units = () if unit is None else (unit,)

  def kernel(spans, *rest):
    *units, x, g, out = rest
    group, piece = _split(pl.program_id(0), down * across)
    d, c = _split(piece, across)
    d, c = d * high, c * wide
    begin, end = spans[0, group], spans[1, group]
    of_x, of_g = _below(d, high, S), _below(c, wide, C)

    def step(k, total):
      at = begin + k * count
      own, rows = _below(at, count, end), pl.ds(at, count)
      left, right = _load(x, (rows, pl.ds(d, high)), own, of_x), _load(g, (rows, pl.ds(c, wide)), own, of_g)
      return total + plgpu.dot(left, right, trans_a=True)

    todo = jax.lax.div(end - begin + (count - 1), jnp.int32(count))
    total = jax.lax.fori_loop(0, todo, step, jnp.zeros((high, wide), jnp.float32))
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
  """A result, None: of x's dtype, which varies over the devices that x varies over."""
  return jax.ShapeDtypeStruct(shape, dtype or x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _refuses(case: Case) -> list[str]:
  reasons = [] if case.platform == "gpu" else [f"it runs on NVIDIA GPUs, not on {case.platform}"]
  if case.capability is not None:
    known = re.fullmatch(r"(\d+)\.(\d+)", case.capability)  # other makers' GPUs have names there
    if known is None or (int(known[1]), int(known[2])) < _OLDEST:
      reasons.append(f"it is for GPUs of compute capability {'.'.join(map(str, _OLDEST))} or higher, not {case.capability}")
  if case.dtype == "float32":
    reasons.append("it has no float32 operands")
  if importlib.util.find_spec("jax.experimental.pallas.triton") is None:  # deprecated since JAX 0.11
    reasons.append(f"JAX {jax.__version__} has no Pallas by Triton")
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
