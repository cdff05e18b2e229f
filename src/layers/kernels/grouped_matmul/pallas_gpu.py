"""A grouped product as two Pallas kernels for Hopper GPUs: rows times the matrix of their group, and (in
``pallas_gpu_weights.py``) the gradient of the matrices.

Both are persistent: each multiprocessor runs one block of three warpgroups, of which one copies tiles into shared memory (TMA)
and two multiply (wgmma), while results of the tile before are still being written. The products are computed transposed,
columns of the matrices times rows, because a wgmma has 64 numbers on one side and any 8 on the other: so the tiles of rows may
be as long as their group needs. A group's tiles begin at its own first row, wherever that lies. The last one ends where the
group ends: it may repeat rows of the tile before, which come out the same, so nothing has to be masked when it is written. Only
of a group that is smaller than its one tile the last rows are written in parts. What lies beyond an array is read as zeros and
written nowhere: so TMA has it.

Sums are float32. JAX's own kernels of the kind (``jax.experimental.pallas.ops.gpu``: ragged_dot_mgpu, and the transposed one)
multiply whole tiles on both sides of every border, search all groups for each tile, leave rows behind the groups as they were
in memory, and let NaN in the rows of one group into the gradient of the next one's matrix.

M rows, S summed, C columns, G groups, R most rows of a tile, V visits (tiles of rows).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maxtext_like.layers.kernels.grouped_matmul import pallas_gpu_weights
from maxtext_like.layers.kernels.grouped_matmul.hopper import (
  CHUNK,
  DEPTH,
  FEW_REGISTERS,
  REGISTERS,
  Tiles,
  in_turn,
  mosaic,
  other_way,
  pad,
  pass_by,
  persistent,
  swizzled,
  varying_as,
)
from maxtext_like.layers.kernels.grouped_matmul.registry import Case, GroupedKernel
from maxtext_like.layers.kernels.grouped_matmul.row_tiles import row_tiles
from maxtext_like.layers.partition import vary_alike

_ROWS = "gpu_rows_by_group"
"""What the kernel is called in a program."""

_HOPPER = "9.0"
_JAX = (0, 11, 1)  # before, Pallas cannot read or write a swizzled tile the other way round
_FASTEST = Tiles()
_HEIGHT = 32
"""Rows of a result that are written at once."""
_PART = 16
"""Rows that a group's last tile is rounded up to."""


def row_counts(rows: int) -> tuple[int, ...]:
  """The rows that tiles may have, rising to R."""
  return tuple(n for n in (8, *range(_PART, rows + 1, _PART)) if n <= rows)


def rows_worked_on(rows: int, groups: int) -> int:
  """The most rows that are multiplied with matrices: of each group, the 16 that its last tile is rounded up to. The gradient of
  the matrices begins at a multiple of 8 and ends with 16 rows at a time: 11 more of a group in the mean."""
  return rows + groups * (_PART - 1)


def product(
  x_MS: jax.Array,
  w_GSC: jax.Array,
  sizes: jax.Array,
  precision: jax.lax.PrecisionLike = None,
  *,
  tiles: Tiles = _FASTEST,
  interpret: Any = None,
) -> jax.Array:
  """x[m] @ w[group of m] for every row m.

  Args:
    x_MS: rows, bfloat16 or float16; those of group 0 first, then those of group 1, ...
    w_GSC: a matrix for each group, of x's dtype.
    sizes: int32 [G], rows of each group. Rows behind them all are no one's.
    precision: of no effect: products of 16-bit numbers are exact before they are added up.
    tiles: what a block works on.
    interpret: ``plgpu.InterpretGPUParams``, to run on a CPU, slowly: for tests.

  Returns:
    [M, C] in x's dtype, accumulated in float32; zeros for no one's rows.

  Raises:
    ValueError: other dtypes.
  """
  del precision
  if x_MS.dtype not in (jnp.bfloat16, jnp.float16) or w_GSC.dtype != x_MS.dtype:
    raise ValueError(f"pallas_gpu: x is {x_MS.dtype} and w {w_GSC.dtype}; both have to be bfloat16 or float16")
  return _product(*vary_alike(x_MS, w_GSC, sizes), tiles, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(x, w, sizes, tiles, interpret) -> Any:
  return _rows_times_groups(x, w, sizes, tiles, interpret, transposed=False)


def _forward(x, w, sizes, tiles, interpret):
  return _product(x, w, sizes, tiles, interpret), (x, w, sizes)


def _backward(tiles, interpret, saved, g):
  x, w, sizes = saved
  g = g.astype(x.dtype)
  dx = _rows_times_groups(g, w, sizes, tiles, interpret, transposed=True)
  return dx, pallas_gpu_weights.groups_of_rows(x, g, sizes, tiles, interpret), None


_product.defvjp(_forward, _backward)


def _rows_of_64(*shape: int, dtype: Any) -> Any:
  """Such memory for rows that begin anywhere in an array. A copy in tiles of eight rows has to begin at a multiple of eight:
  TMA ends each tile where the array's own ends. So these are copied as rows, and lie in memory as tiles of 64 columns do."""
  plgpu = mosaic()
  return plgpu.SMEM((*shape, DEPTH), dtype, transforms=(plgpu.SwizzleTransform(128),))


def _in_tiles(rows, interpret: Any):
  """Rows of :func:`_rows_of_64` [n, 64], as tiles for wgmma and for registers. The interpreter knows no tiles."""
  if interpret is not None:
    return rows
  untiled = mosaic().TilingTransform((8, DEPTH)).undo(None)
  there = rows.reshape(rows.shape[0] // 8, 1, 8, DEPTH)
  return dataclasses.replace(there, transforms=(*there.transforms, untiled))


def _store_plainly(tile, value) -> None:
  """To shared memory that is not swizzled, of which several rows begin in the same bank: JAX 0.12 wants to be told."""
  if hasattr(mosaic(), "store"):
    mosaic().store(tile, value, optimized=False)
  else:
    tile[...] = value


@functools.partial(jax.jit, static_argnames=("tiles", "interpret", "transposed"))  # layers share what Mosaic makes of it
def _rows_times_groups(x, w, sizes, tiles: Tiles, interpret, *, transposed):
  """[M, C]; with ``transposed`` w is [G, C, S]."""
  plgpu = mosaic()
  rows, columns = x.shape[0], w.shape[1 if transposed else 2]
  x, w = pad(x), pad(w)
  (M, S), (G, C) = x.shape, (w.shape[0], w.shape[1 if transposed else 2])
  counts = row_counts(tiles.rows)
  # A warpgroup's columns; where its share would go beyond the last one it has none.
  own = tiles.columns // 2 if C % (tiles.columns // 2) == 0 else DEPTH
  strips, steps, stages, dtype = pl.cdiv(C, 2 * own), pl.cdiv(S, DEPTH), tiles.stages, x.dtype
  # What is left behind the groups is one more, whose rows become zeros: no step is made for them.
  visits, number = row_tiles(jnp.append(sizes, M - jnp.sum(sizes)), M, counts)

  def kernel(visits, number, x, w, out, x_tiles, w_tiles, out_tiles, few, full, free):
    group_of = jax.lax.axis_index("warpgroup")

    def place(piece):
      visit = jax.lax.div(piece, strips)
      group = visits[0, visit]
      return (
        jnp.minimum(group, G - 1), visits[1, visit], visits[2, visit], visits[3, visit],
        (piece - visit * strips) * (2 * own), jnp.where(group < G, steps, 0),
      )  # fmt: skip

    @pl.when(group_of == 2)
    def copy():
      plgpu.set_max_registers(FEW_REGISTERS, action="decrease")

      def piece(number, before):
        group, row, kind, _, column, todo = place(number)

        def tiles_of(count):
          def step(k, _):
            slot = jax.lax.rem(before + k, stages)

            @pl.when(before + k >= stages)
            def _():
              plgpu.barrier_wait(free.at[slot])

            deep = pl.ds(k * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(x.at[pl.ds(row, count), deep], x_tiles.at[slot, pl.ds(0, count)], full.at[slot])
            for half in range(2):
              at = pl.ds(column + half * own, own)
              source = w.at[group, at, deep] if transposed else w.at[group, deep, at]
              plgpu.copy_gmem_to_smem(source, w_tiles.at[slot, half], full.at[slot])

          jax.lax.fori_loop(0, todo, step, None)

        for i, count in enumerate(counts):
          pl.when(kind == i)(functools.partial(tiles_of, count))
        return todo

      in_turn(number[0] * strips, piece)

    @pl.when(group_of < 2)
    def multiply():
      plgpu.set_max_registers(REGISTERS, action="increase")

      def piece(number, before):
        _, row, kind, valid, column, todo = place(number)
        column = column + group_of * own

        def product_of(count):
          def summed(total):
            def step(k, _):
              slot = jax.lax.rem(before + k, stages)
              plgpu.barrier_wait(full.at[slot])
              left, right = w_tiles.at[slot, group_of], _in_tiles(x_tiles.at[slot, pl.ds(0, count)], interpret)
              plgpu.wgmma(total, left if transposed else other_way(left), other_way(right))
              plgpu.wgmma_wait(1)  # the step before this one is done, and its tiles may be overwritten

              @pl.when(k > 0)
              def _():
                plgpu.barrier_arrive(free.at[jax.lax.rem(before + k - 1, stages)])

            jax.lax.fori_loop(0, todo, step, None)
            return total[...]

          made = pl.run_scoped(summed, plgpu.ACC((own, count), jnp.float32)).astype(dtype)

          @pl.when(todo > 0)
          def _():
            plgpu.barrier_arrive(free.at[jax.lax.rem(before + todo - 1, stages)])

          for i, (a, b) in enumerate([(a, b) for a in range(0, own, CHUNK) for b in range(0, count, _HEIGHT)]):
            n = min(_HEIGHT, count - b)
            part = made[a : a + CHUNK, b : b + n]
            whole = functools.partial(write, part, i, row + b, column + a)
            if b + n < count:
              whole()
            else:
              pl.when(valid == count)(whole)
              pl.when(valid < count)(functools.partial(write_some, part, row + b, column + a, valid - b))

        def write(part, i, row, column):
          tile = out_tiles.at[group_of, i % 3, pl.ds(0, part.shape[1])]
          plgpu.wait_smem_to_gmem(2 if i else 0, wait_read_only=True)
          other_way(_in_tiles(tile, interpret))[...] = part
          plgpu.commit_smem()
          plgpu.copy_smem_to_gmem(tile, out.at[pl.ds(row, part.shape[1]), pl.ds(column, CHUNK)])

        def write_some(part, row, column, valid):
          """The first ``valid`` rows, in copies of 16, 8, 4, 2 and 1."""
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
          _store_plainly(other_way(few.at[group_of, pl.ds(0, part.shape[1])]), part)
          plgpu.commit_smem()
          done: Any = 0
          for n in (16, 8, 4, 2, 1):
            some = valid & n != 0

            @pl.when(some)
            def _(done=done, n=n):
              there = pl.ds(row + done, n), pl.ds(column, CHUNK)
              plgpu.copy_smem_to_gmem(few.at[group_of, pl.ds(done, n)], out.at[there])

            done = done + jnp.where(some, n, 0)

        for i, count in enumerate(counts):
          pl.when((kind == i) & (column < C))(functools.partial(product_of, count))

        pl.when(column >= C)(lambda: pass_by(before, todo, full, free))
        return todo

      in_turn(number[0] * strips, piece)
      plgpu.wait_smem_to_gmem(0)

  out = persistent(
    kernel,
    _ROWS,
    jax.ShapeDtypeStruct((M, C), dtype),
    interpret,
    x_tiles=_rows_of_64(stages, counts[-1], dtype=dtype),
    w_tiles=swizzled(stages, 2, *((own, DEPTH) if transposed else (DEPTH, own)), dtype=dtype),
    out_tiles=_rows_of_64(2, 3, _HEIGHT, dtype=dtype),
    few=plgpu.SMEM((2, _HEIGHT, CHUNK), dtype),
    full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
    free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
  )(visits, number, x, w)
  return varying_as(x, out)[:rows, :columns]


def _refuses(case: Case) -> list[str]:
  reasons = [] if case.platform == "gpu" else [f"it runs on Hopper GPUs, not on {case.platform}"]
  if case.capability not in (None, _HOPPER):
    reasons.append(f"it is for GPUs of compute capability {_HOPPER}, not {case.capability}")
  if case.dtype == "float32":
    reasons.append("it has no float32 operands")
  if jax.__version_info__ < _JAX:
    reasons.append(f"it needs JAX {'.'.join(map(str, _JAX))}, and this is {jax.__version__}")
  return reasons


KERNEL = GroupedKernel(
  name="pallas_gpu",
  refuses=_refuses,
  avoided=lambda case: "",
  run=product,
  called=lambda path, name: _ROWS in path or pallas_gpu_weights.NAME in path,
  rows=rows_worked_on,
  skips=True,
  fused=True,
)
