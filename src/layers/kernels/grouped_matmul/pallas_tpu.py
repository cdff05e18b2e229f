"""A grouped product as two Pallas kernels for TPUs: rows times the matrix of their group, and the gradient of the matrices.

The grid goes over visits: a tile of rows and a group that has some of them, so a tile in which a group ends is visited by each
of its groups. A visit multiplies no whole tile then but the parts of it that the group reaches, at once: work that is done
twice is at most one part at each border between groups. Rows behind the groups are nobody's and multiply nothing.

Sums are float32. JAX's own kernel of the kind (megablox) multiplies whole tiles at borders, knows no ``matmul_precision``, one
tile size for three products, no number of rows but multiples of it, and nothing of shard_map's varying axes.

M rows, D summed, F columns, G groups, R rows of a tile, V visits.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxtext_like.layers.kernels.grouped_matmul.registry import Case, GroupedKernel
from maxtext_like.layers.partition import vary_alike

_ROWS, _WEIGHTS = "grouped_rows", "grouped_weights"
"""What the kernels are called in a program."""

_LANES = 128
_FEWEST, _MOST = 16, 64
"""Rows of a part: two bfloat16 rows share a register's row, of which there are eight; 256 rows fill the matrix unit."""

_BLOCKS = 20 << 20
"""Bytes of vector memory that a kernel's blocks may take, two of each; what it computes on lies there too."""
_VECTOR_MEMORY = 48 << 20


def tile_and_part(rows: int, groups: int) -> tuple[int, int]:
  """R, and the rows of the parts that a tile with several groups is worked on by: at most a tenth of the mean group."""
  part = 2 ** int(math.log2(min(max(rows / (10 * groups), _FEWEST), _MOST)))
  return 4 * part if part > _FEWEST else 8 * part, part


def rows_worked_on(rows: int, groups: int) -> int:
  """The most rows that are multiplied, whatever the sizes are: the rows, and one part at each border between groups."""
  return rows + (groups - 1) * tile_and_part(rows, groups)[1]


def product(
  x_MD: jax.Array, w_GDF: jax.Array, sizes: jax.Array, precision: jax.lax.PrecisionLike = None, *, interpret: bool = False
) -> jax.Array:
  """x[m] @ w[group of m] for every row m.

  Args:
    x_MD: rows, bfloat16 or float32; those of group 0 first, then those of group 1, ...
    w_GDF: a matrix for each group, of x's dtype.
    sizes: int32 [G], rows of each group. Rows behind them all are no one's.
    precision: of float32 products, as ``jax.lax.Precision``; those of bfloat16 are exact before they are added up.
    interpret: run on any platform, slowly: for tests.

  Returns:
    [M, F] in x's dtype, accumulated in float32; zeros for no one's rows.
  """
  return _product(*vary_alike(x_MD, w_GDF, sizes), jax.lax.Precision(precision), interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(x, w, sizes, precision, interpret) -> Any:
  return _rows_times_groups(x, w, sizes, precision, interpret, transposed=False)


def _forward(x, w, sizes, precision, interpret):
  return _product(x, w, sizes, precision, interpret), (x, w, sizes)


def _backward(precision, interpret, saved, g):
  x, w, sizes = saved
  g = g.astype(x.dtype)
  dx = _rows_times_groups(g, w, sizes, precision, interpret, transposed=True)
  return dx, _groups_of_rows(x, g, sizes, precision, interpret, w.dtype), None


_product.defvjp(_forward, _backward)


def _visits(sizes: jax.Array, rows: int, tile: int, *, empty: bool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Of every visit, int32 [V]: its group, its tile, and the rows of the tile that are the group's, from and to.

  V is the most that any sizes need; visits behind the last stay at its group and tile, and have no rows.

  Args:
    sizes: [G], of all groups that are to be visited.
    rows: M.
    tile: R.
    empty: groups without rows are visited too, once.
  """
  ends = jnp.cumsum(sizes)
  starts = ends - sizes
  # A group without rows stays where the one before it ended, within the rows.
  first = jnp.minimum(starts, rows - 1) // tile
  counts = jnp.where(sizes > 0, (ends - 1) // tile - first + 1, int(empty))
  behind = jnp.cumsum(counts)
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
  """The float32 product of two matrices over an axis of each. Mosaic has no Precision.HIGH: three products of the upper and
  the lower halves of float32 numbers, which hold float16 ones exactly."""
  dims = (((summed[0],), (summed[1],)), ((), ()))

  def dot(a, b, precision=None):
    return jax.lax.dot_general(a, b, dims, precision, preferred_element_type=jnp.float32)

  if a.dtype == jnp.bfloat16:
    return dot(a, b)
  if precision != jax.lax.Precision.HIGH:
    return dot(a, b, precision)
  upper = [x.astype(jnp.bfloat16) for x in (a, b)]
  lower = [(x - u.astype(jnp.float32)).astype(jnp.bfloat16) for x, u in zip((a, b), upper, strict=True)]
  return dot(upper[0], lower[1]) + dot(lower[0], upper[1]) + dot(*upper)


def _own_rows(begin, end, tile: int, part: int, work) -> None:
  """Inside a kernel: work(rows, own) once, on the parts of the tile that rows from begin to end reach; rows is a slice of
  the tile, and own bool [rows, 1] says which are between them. Nothing where there are none."""
  first = jax.lax.div(begin, part)  # of signed numbers "//" asks the machine at hand for its kind
  parts = jnp.where(end > begin, jax.lax.div(end + part - 1, part) - first, 0)

  def worked_on(rows: int) -> None:
    start = pl.multiple_of(first * part, part) if rows < tile else 0
    at = start + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    work(pl.ds(start, rows), (at >= begin) & (at < end))

  for count in range(1, tile // part + 1):
    pl.when(parts == count)(functools.partial(worked_on, count * part))


@functools.partial(jax.jit, static_argnames=("precision", "interpret", "transposed"), inline=True)
def _rows_times_groups(x, w, sizes, precision, interpret, *, transposed):
  """[M, F]; with ``transposed`` x is [M, F] and the result [M, D]. Traced once for all layers that are alike."""
  (M, summed), G = x.shape, w.shape[0]
  columns, item = w.shape[1 if transposed else 2], x.dtype.itemsize
  R, part = tile_and_part(M, G)
  width = _width(columns, lambda n: 2 * item * (R * summed + summed * n + R * n) <= _BLOCKS)
  # What is left behind the groups is one more, whose rows become zeros.
  group, at, begin, end = _visits(jnp.append(sizes, M - jnp.sum(sizes)), M, R, empty=False)

  def kernel(group, at, begin, end, x, w, out):
    del at
    v = pl.program_id(1)

    def multiply(rows, own):
      made = _dot(x[rows, :], w[...], (1, 1 if transposed else 0), precision)
      out[rows, :] = jnp.where(own, made, out[rows, :].astype(jnp.float32)).astype(out.dtype)

    def wipe(rows, own):
      out[rows, :] = jnp.where(own, 0.0, out[rows, :].astype(jnp.float32)).astype(out.dtype)

    pl.when(group[v] < G)(lambda: _own_rows(begin[v], end[v], R, part, multiply))
    pl.when(group[v] == G)(lambda: _own_rows(begin[v], end[v], R, R, wipe))

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


def _groups_of_rows(x, g, sizes, precision, interpret, dtype):
  """The gradient of the weights [G, D, F]: x.T @ g over the rows of each group, added up in float32."""
  (M, D), F, G, item = x.shape, g.shape[1], sizes.shape[0], x.dtype.itemsize
  R, part = tile_and_part(M, G)
  fits = lambda d, f: 2 * item * R * (d + f) + d * f * (4 + 2 * jnp.dtype(dtype).itemsize) <= _BLOCKS
  high = _width(D, lambda d: fits(d, min(F, 1024)))
  wide = _width(F, lambda f: fits(high, f))
  group, at, begin, end = _visits(sizes, M, R, empty=True)
  last = group.shape[0] - 1

  def kernel(group, at, begin, end, x, g, out, total):
    del at
    v = pl.program_id(2)

    @pl.when((v == 0) | (group[jnp.maximum(v - 1, 0)] != group[v]))
    def _():
      total[...] = jnp.zeros_like(total)

    def add(rows, own):
      # What is not its own may be anything, and nothing times that is not nothing.
      left, right = (jnp.where(own, y[rows, :].astype(jnp.float32), 0.0).astype(y.dtype) for y in (x, g))
      total[...] += _dot(left, right, (0, 0), precision)

    _own_rows(begin[v], end[v], R, part, add)

    @pl.when((v == last) | (group[jnp.minimum(v + 1, last)] != group[v]))
    def _():
      out[...] = total[...].astype(out.dtype)

  return pl.pallas_call(
    kernel,
    out_shape=_like(x, (G, D, F), dtype),
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
  """Columns of a block: all of them if that fits, else the most whole lanes that do, of a divisor if there is one."""
  if fits(size):
    return size
  able = [n for n in range(_LANES, size, _LANES) if fits(n)] or [_LANES]
  even = [n for n in able if size % n == 0]
  return even[-1] if even and 2 * even[-1] >= able[-1] else able[-1]


def _like(x, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  """An output that varies over the devices that x varies over."""
  return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _parameters(*dimensions: Any) -> pltpu.CompilerParams:
  return pltpu.CompilerParams(dimension_semantics=dimensions, vmem_limit_bytes=_VECTOR_MEMORY)


def _cost(M: int, G: int, summed: int, columns: int, item: int, *, reads: int) -> pl.CostEstimate:
  """What the compiler plans other work around; reads: how often the rows are."""
  moved = (M * summed * reads + M * columns + G * summed * columns) * item
  return pl.CostEstimate(flops=2 * rows_worked_on(M, G) * summed * columns, bytes_accessed=moved, transcendentals=0)


def _refuses(case: Case) -> list[str]:
  reasons = [] if case.platform == "tpu" else [f"it runs on TPUs, not on {case.platform}"]
  # Mosaic has no float16.
  return reasons + (["there is no grouped float16 product on TPU"] if case.dtype == "float16" else [])


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
