"""Grouped products in Pallas for Hopper GPUs: rows times the matrix of their group. The gradient of the matrices is in
``pallas_gpu_weights.py``.

Both kernels are persistent: each multiprocessor runs one block of three warpgroups. One copies tiles to shared memory (TMA),
and two multiply (wgmma) while the results of the previous tile are still being written. The products are computed transposed,
columns of the matrices times rows, because one side of a wgmma is always 64, but the other can be any multiple of 8. Tiles can
therefore have the number of rows that their group needs. The first tile of a group begins at its first row, wherever that is.
The last tile ends with the group. It may repeat rows of the previous tile, with the same result, so nothing is masked when it
is written. Only if a group is smaller than its single tile, its last rows are written in parts. Elements beyond the end of an
array are read as zeros and never written, as TMA does.

Sums are float32. JAX's own kernels (``jax.experimental.pallas.ops.gpu``: ragged_dot_mgpu and its transposed form) multiply
complete tiles on both sides of every border, search all groups for each tile, leave rows after the last group uninitialized,
and let a NaN in the rows of one group reach the gradient of the next group's matrix.

M rows, S summed, C columns, G groups, R maximum rows of a tile, V visits (tiles of rows).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maxtext_like.layers.kernels.grouped_matmul import pallas_gpu_weights
from maxtext_like.layers.kernels.grouped_matmul.derivative import differentiable
from maxtext_like.layers.kernels.grouped_matmul.hopper import (
  CHUNK,
  DEPTH,
  FEW_REGISTERS,
  REGISTERS,
  Tiles,
  in_turn,
  other_way,
  pad,
  pass_by,
  persistent,
  swizzled,
  varying_as,
)
from maxtext_like.layers.kernels.grouped_matmul.registry import Case, GroupedKernel
from maxtext_like.layers.kernels.grouped_matmul.row_tiles import row_tiles
from maxtext_like.layers.kernels.mosaic_gpu import mosaic
from maxtext_like.layers.partition import vary_alike

_ROWS = "gpu_rows_by_group"
"""Name of the kernel in a program."""

_HOPPER = "9.0"
_JAX = (0, 11, 1)  # earlier versions of Pallas cannot read or write a swizzled tile transposed
_FASTEST = Tiles()
_HEIGHT = 32
"""Rows of a result that are written at once."""
_FINE = 64
"""The rows of a group's last tile are rounded up to a multiple of 16, or of 32 if there are more than this."""


def row_counts(rows: int) -> tuple[int, ...]:
  """Return the numbers of rows that a tile can have, in increasing order, up to R.

  The kernel has separate code for each of them. Steps of 16 everywhere (17 numbers up to 256) were no faster on an H200, and
  lowering and compiling a kernel took almost twice as long."""
  able = {8, *range(16, _FINE + 1, 16), *range(_FINE + 32, rows, 32)}
  return (*sorted(n for n in able if n < rows), rows)


def rows_worked_on(rows: int, groups: int) -> int:
  """Return the maximum number of rows that are multiplied by matrices: the last tile of each group is rounded up.

  In the gradient of the matrices, a group begins at a multiple of 8 rows and ends with steps of 16: 11 more rows on average."""
  return rows + groups * 15 + min(groups, rows // (_FINE + 1)) * 16


def product(
  x_MS: jax.Array,
  w_GSC: jax.Array,
  sizes: jax.Array,
  precision: jax.lax.PrecisionLike = None,
  *,
  tiles: Tiles = _FASTEST,
  interpret: Any = None,
) -> jax.Array:
  """Return x[m] @ w[group of m] for every row m.

  Args:
    x_MS: rows, bfloat16 or float16, sorted by group.
    w_GSC: one matrix for each group, in x's dtype.
    sizes: int32 [G], rows of each group. Rows after the last group belong to no group.
    precision: no effect, because products of 16-bit numbers are exact before they are added.
    tiles: tile sizes.
    interpret: ``plgpu.InterpretGPUParams``, to run on a CPU, slowly: for tests.

  Returns:
    [M, C] in x's dtype, accumulated in float32; zeros for rows without a group.

  Raises:
    ValueError: x or w has another dtype.
  """
  del precision
  if x_MS.dtype not in (jnp.bfloat16, jnp.float16) or w_GSC.dtype != x_MS.dtype:
    raise ValueError(f"pallas_gpu: x is {x_MS.dtype} and w is {w_GSC.dtype}, but both must be bfloat16 or both float16")
  return _product(*vary_alike(x_MS, w_GSC, sizes), tiles, interpret)


def _rows_of_64(*shape: int, dtype: Any) -> Any:
  """Declare shared memory for rows that begin anywhere in an array.

  A copy in tiles of eight rows must begin at a multiple of eight, because TMA ends each tile where the array ends. These rows
  are therefore copied as rows. Their bytes are in the same order as in tiles of 64 columns."""
  plgpu = mosaic()
  return plgpu.SMEM((*shape, DEPTH), dtype, transforms=(plgpu.SwizzleTransform(128),))


def _in_tiles(rows, interpret: Any):
  """View rows of ``_rows_of_64`` [n, 64] as tiles for wgmma and registers. The interpreter has no tiles."""
  if interpret is not None:
    return rows
  untiled = mosaic().TilingTransform((8, DEPTH)).undo(None)
  there = rows.reshape(rows.shape[0] // 8, 1, 8, DEPTH)
  return dataclasses.replace(there, transforms=(*there.transforms, untiled))


def _store_plainly(tile, value) -> None:
  """Store to shared memory without swizzle, where several rows begin in the same bank. JAX 0.12 requires
  ``optimized=False``."""
  if hasattr(mosaic(), "store"):
    mosaic().store(tile, value, optimized=False)
  else:
    tile[...] = value


@functools.partial(jax.jit, static_argnames=("tiles", "interpret", "transposed"))  # layers share the compiled kernel
def _rows_times_groups(x, w, sizes, tiles: Tiles, interpret, *, transposed):
  """Return [M, C]. With ``transposed``, w is [G, C, S]."""
  plgpu = mosaic()
  rows, columns = x.shape[0], w.shape[1 if transposed else 2]
  x, w = pad(x), pad(w)
  (M, S), (G, C) = x.shape, (w.shape[0], w.shape[1 if transposed else 2])
  counts = row_counts(tiles.rows)
  # Pad the arrays, and divide the columns among the two warpgroups.
  # Columns of a warpgroup. A warpgroup whose columns would begin after the last one has none.
  own = tiles.columns // 2 if C % (tiles.columns // 2) == 0 else DEPTH
  strips, steps, stages, dtype = pl.cdiv(C, 2 * own), pl.cdiv(S, DEPTH), tiles.stages, x.dtype
  # Rows after the last group form one more group. They are set to zero, and no step is computed for them.
  visits, number = row_tiles(jnp.append(sizes, M - jnp.sum(sizes)), M, counts)

  def kernel(visits, number, x, w, out, x_tiles, w_tiles, out_tiles, few, full, free):
    # Locate a piece: group, first row, index of its row count, rows to write, first column, and number of steps.
    group_of = jax.lax.axis_index("warpgroup")

    def place(piece):
      visit = jax.lax.div(piece, strips)
      group = visits[0, visit]
      return (
        jnp.minimum(group, G - 1), visits[1, visit], visits[2, visit], visits[3, visit],
        (piece - visit * strips) * (2 * own), jnp.where(group < G, steps, 0),
      )  # fmt: skip

    # Warpgroup 2 copies the rows and the matrix of each step.
    @pl.when(group_of == 2)
    def copy():
      plgpu.set_max_registers(FEW_REGISTERS, action="decrease")

      def piece(number, before):
        group, row, kind, _, column, todo = place(number)

        def tiles_of(count):
          def step(k, _):
            slot = jax.lax.rem(before + k, stages)

            # Wait until both warpgroups have read the tiles that were in this slot.
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

        # The number of rows of a copy is static, so there is one branch for each of them.
        for i, count in enumerate(counts):
          pl.when(kind == i)(functools.partial(tiles_of, count))
        return todo

      in_turn(number[0] * strips, piece)

    # Warpgroups 0 and 1 multiply, and write the result in parts.
    @pl.when(group_of < 2)
    def multiply():
      plgpu.set_max_registers(REGISTERS, action="increase")

      def piece(number, before):
        _, row, kind, valid, column, todo = place(number)
        column = column + group_of * own

        def product_of(count):
          # Multiply each step as soon as its copies have arrived.
          def summed(total):
            def step(k, _):
              slot = jax.lax.rem(before + k, stages)
              plgpu.barrier_wait(full.at[slot])
              left, right = w_tiles.at[slot, group_of], _in_tiles(x_tiles.at[slot, pl.ds(0, count)], interpret)
              plgpu.wgmma(total, left if transposed else other_way(left), other_way(right))
              plgpu.wgmma_wait(1)  # the previous step is done, so its tiles may be overwritten

              @pl.when(k > 0)
              def _():
                plgpu.barrier_arrive(free.at[jax.lax.rem(before + k - 1, stages)])

            jax.lax.fori_loop(0, todo, step, None)
            return total[...]

          # Sum over all steps in registers, and release the slot of the last one.
          made = pl.run_scoped(summed, plgpu.ACC((own, count), jnp.float32)).astype(dtype)

          @pl.when(todo > 0)
          def _():
            plgpu.barrier_arrive(free.at[jax.lax.rem(before + todo - 1, stages)])

          # Write the result in parts. Only the last rows of a small group need single rows.
          for i, (a, b) in enumerate([(a, b) for a in range(0, own, CHUNK) for b in range(0, count, _HEIGHT)]):
            n = min(_HEIGHT, count - b)
            part = made[a : a + CHUNK, b : b + n]
            whole = functools.partial(write, part, i, row + b, column + a)
            if b + n < count:
              whole()
            else:
              pl.when(valid == count)(whole)
              pl.when(valid < count)(functools.partial(write_some, part, row + b, column + a, valid - b))

        # Three buffers take turns, so that a copy to global memory can run while the next part is written to shared memory.
        def write(part, i, row, column):
          tile = out_tiles.at[group_of, i % 3, pl.ds(0, part.shape[1])]
          plgpu.wait_smem_to_gmem(2 if i else 0, wait_read_only=True)
          other_way(_in_tiles(tile, interpret))[...] = part
          plgpu.commit_smem()
          plgpu.copy_smem_to_gmem(tile, out.at[pl.ds(row, part.shape[1]), pl.ds(column, CHUNK)])

        def write_some(part, row, column, valid):
          """Write the first ``valid`` rows, in copies of 16, 8, 4, 2 and 1."""
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
          _store_plainly(other_way(few.at[group_of, pl.ds(0, part.shape[1])]), part)
          plgpu.commit_smem()
          # The size of a copy is static, so any number of rows is composed of powers of two.
          done: Any = 0
          for n in (16, 8, 4, 2, 1):
            some = valid & n != 0

            @pl.when(some)
            def _(done=done, n=n):
              there = pl.ds(row + done, n), pl.ds(column, CHUNK)
              plgpu.copy_smem_to_gmem(few.at[group_of, pl.ds(done, n)], out.at[there])

            done = done + jnp.where(some, n, 0)

        # One branch for each number of rows, because the shape of a product is static.
        for i, count in enumerate(counts):
          pl.when((kind == i) & (column < C))(functools.partial(product_of, count))

        # A warpgroup without columns must still release the slots, because the copies wait for both.
        pl.when(column >= C)(lambda: pass_by(before, todo, full, free))
        return todo

      in_turn(number[0] * strips, piece)
      plgpu.wait_smem_to_gmem(0)

  # The blocks stay on their processors and take one piece after another.
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


_product = differentiable(_rows_times_groups, pallas_gpu_weights.groups_of_rows)


def _refuses(case: Case) -> list[str]:
  reasons = [] if case.platform == "gpu" else [f"it runs on Hopper GPUs, not on {case.platform}"]
  if case.capability not in (None, _HOPPER):
    reasons.append(f"it needs a GPU of compute capability {_HOPPER}, not {case.capability}")
  if case.dtype == "float32":
    reasons.append("it does not support float32 operands")
  if jax.__version_info__ < _JAX:
    reasons.append(f"it needs JAX {'.'.join(map(str, _JAX))}, but this is {jax.__version__}")
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
