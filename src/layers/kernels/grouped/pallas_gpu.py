"""A grouped product as two Pallas kernels for Hopper GPUs: rows times the matrix of their group, and the gradient of the
matrices.

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

from maxtext_like.layers.kernels.grouped.registry import Case, GroupedKernel
from maxtext_like.layers.kernels.grouped.row_tiles import row_tiles
from maxtext_like.layers.partition import vary, vary_alike, varying_axes

_ROWS, _WEIGHTS = "gpu_rows_by_group", "gpu_weights_by_group"
"""What the kernels are called in a program."""

_HOPPER = "9.0"
_BLOCKS = 132
"""Multiprocessors of an H100 or H200 (SXM): blocks of a persistent kernel. On a card with fewer some wait for others."""
_DEPTH = 64
"""What is summed in a step: 16-bit numbers of a row of 128 bytes, the widest swizzle of shared memory."""
_CHUNK, _HEIGHT = 64, 32
"""Columns and rows of a result that are written at once."""
_PART = 16
"""Rows that a group's last tile is rounded up to."""
_REGISTERS, _FEW_REGISTERS = 232, 40
"""Of a thread that multiplies, and of one that copies: 2 * 232 + 40 of them are as many as a multiprocessor has for 128."""


def _mosaic() -> Any:
  """Pallas for NVIDIA GPUs. Its import takes half a second, which who only chooses between kernels shall not wait for."""
  from jax.experimental.pallas import mosaic_gpu

  return mosaic_gpu


def _kernel(body, name: str, out: jax.ShapeDtypeStruct, interpret: Any, **scratch: Any) -> Any:
  """A persistent kernel of three warpgroups: body(*arrays, result, **scratch)."""
  plgpu = _mosaic()
  return plgpu.kernel(
    body,
    out_type=out,
    grid=(_BLOCKS,),
    grid_names=("block",),
    num_threads=3,
    thread_name="warpgroup",
    scratch_types=scratch,
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret,
    kernel_name=name,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """Sizes of what a block works on at a time. The fastest depend on the mean group and on nothing else here.

  Attributes:
    rows: R, a multiple of 16.
    columns: of the two warpgroups together.
    stages: steps whose tiles are in shared memory or on the way there.
    high, wide: of a tile of the gradient of the matrices, of the two warpgroups together: S and C.
    weight_stages: stages of that one.
  """

  rows: int = 256
  columns: int = 128
  stages: int = 4
  high: int = 128
  wide: int = 256
  weight_stages: int = 4


def row_counts(rows: int) -> tuple[int, ...]:
  """The rows that tiles may have, rising to R."""
  return tuple(n for n in (8, *range(_PART, rows + 1, _PART)) if n <= rows)


def rows_worked_on(rows: int, groups: int) -> int:
  """The most rows that are multiplied with matrices: of each group, the 16 that its last tile is rounded up to. The gradient of
  the matrices adds up over whole steps of 64 rows, which begin at a multiple of 8: 35 more of a group in the mean."""
  return rows + groups * (_PART - 1)


def product(
  x_MS: jax.Array,
  w_GSC: jax.Array,
  sizes: jax.Array,
  precision: jax.lax.PrecisionLike = None,
  *,
  tiles: Tiles = Tiles(),
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
  return dx, _groups_of_rows(x, g, sizes, tiles, interpret), None


_product.defvjp(_forward, _backward)


def _swizzled(*shape: int, dtype: Any) -> Any:
  """Shared memory as TMA and wgmma like it; the last axis is a multiple of 64 16-bit numbers."""
  plgpu = _mosaic()
  return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def _rows_of_64(*shape: int, dtype: Any) -> Any:
  """Such memory for rows that begin anywhere in an array. A copy in tiles of eight rows has to begin at a multiple of eight:
  TMA ends each tile where the array's own ends. So these are copied as rows, and lie in memory as tiles of 64 columns do."""
  plgpu = _mosaic()
  return plgpu.SMEM((*shape, _DEPTH), dtype, transforms=(plgpu.SwizzleTransform(128),))


def _in_tiles(rows, interpret: Any):
  """Rows of :func:`_rows_of_64` [n, 64], as tiles for wgmma and for registers. The interpreter knows no tiles."""
  if interpret is not None:
    return rows
  untiled = _mosaic().TilingTransform((8, _DEPTH)).undo(None)
  there = rows.reshape(rows.shape[0] // 8, 1, 8, _DEPTH)
  return dataclasses.replace(there, transforms=(*there.transforms, untiled))


def _in_turn(count: jax.Array, work) -> None:
  """Inside a kernel: work(number of a piece, steps before it) -> its steps, for this block's share of the pieces."""
  block = jax.lax.axis_index("block")
  mine = jax.lax.div(count - block + (_BLOCKS - 1), _BLOCKS)
  jax.lax.fori_loop(0, mine, lambda i, step: step + work(block + i * _BLOCKS, step), jnp.int32(0))


def _turned(tile):
  """A tile of shared memory read, or written, the other way round."""
  return tile.transpose((1, 0))


def _store_plainly(tile, value) -> None:
  """To shared memory that is not swizzled, of which several rows begin in the same bank: JAX 0.12 wants to be told."""
  if hasattr(_mosaic(), "store"):
    _mosaic().store(tile, value, optimized=False)
  else:
    tile[...] = value


def _pass_by(before, todo, full, free) -> None:
  """What a warpgroup does that has no columns in this piece: it holds up no one."""
  stages = full.shape[0]

  def step(k, _):
    slot = jax.lax.rem(before + k, stages)
    _mosaic().barrier_wait(full.at[slot])
    _mosaic().barrier_arrive(free.at[slot])

  jax.lax.fori_loop(0, todo, step, None)


def _pad(x: jax.Array) -> jax.Array:
  """Zeros behind rows up to a multiple of 8, and behind the other axes of 64: so no array ends inside a tile. Sizes of models
  are such; the factors of an adapter are not."""
  rows = x.ndim == 2
  widths = [(0, -x.shape[0] % 8 if rows else 0), *((0, -size % _DEPTH) for size in x.shape[1:])]
  return jnp.pad(x, widths) if any(w for _, w in widths) else x


@functools.partial(jax.jit, static_argnames=("tiles", "interpret", "transposed"))  # layers share what Mosaic makes of it
def _rows_times_groups(x, w, sizes, tiles: Tiles, interpret, *, transposed):
  """[M, C]; with ``transposed`` w is [G, C, S]."""
  plgpu = _mosaic()
  rows, columns = x.shape[0], w.shape[1 if transposed else 2]
  x, w = _pad(x), _pad(w)
  (M, S), (G, C) = x.shape, (w.shape[0], w.shape[1 if transposed else 2])
  counts = row_counts(tiles.rows)
  # A warpgroup's columns; where its share would go beyond the last one it has none.
  own = tiles.columns // 2 if C % (tiles.columns // 2) == 0 else _DEPTH
  strips, steps, stages, dtype = pl.cdiv(C, 2 * own), pl.cdiv(S, _DEPTH), tiles.stages, x.dtype
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
      plgpu.set_max_registers(_FEW_REGISTERS, action="decrease")

      def piece(number, before):
        group, row, kind, _, column, todo = place(number)

        def tiles_of(count):
          def step(k, _):
            slot = jax.lax.rem(before + k, stages)

            @pl.when(before + k >= stages)
            def _():
              plgpu.barrier_wait(free.at[slot])

            deep = pl.ds(k * _DEPTH, _DEPTH)
            plgpu.copy_gmem_to_smem(x.at[pl.ds(row, count), deep], x_tiles.at[slot, pl.ds(0, count)], full.at[slot])
            for half in range(2):
              at = pl.ds(column + half * own, own)
              source = w.at[group, at, deep] if transposed else w.at[group, deep, at]
              plgpu.copy_gmem_to_smem(source, w_tiles.at[slot, half], full.at[slot])

          jax.lax.fori_loop(0, todo, step, None)

        for i, count in enumerate(counts):
          pl.when(kind == i)(functools.partial(tiles_of, count))
        return todo

      _in_turn(number[0] * strips, piece)

    @pl.when(group_of < 2)
    def multiply():
      plgpu.set_max_registers(_REGISTERS, action="increase")

      def piece(number, before):
        _, row, kind, valid, column, todo = place(number)
        column = column + group_of * own

        def product_of(count):
          def summed(total):
            def step(k, _):
              slot = jax.lax.rem(before + k, stages)
              plgpu.barrier_wait(full.at[slot])
              left, right = w_tiles.at[slot, group_of], _in_tiles(x_tiles.at[slot, pl.ds(0, count)], interpret)
              plgpu.wgmma(total, left if transposed else _turned(left), _turned(right))
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

          for i, (a, b) in enumerate([(a, b) for a in range(0, own, _CHUNK) for b in range(0, count, _HEIGHT)]):
            n = min(_HEIGHT, count - b)
            part = made[a : a + _CHUNK, b : b + n]
            whole = functools.partial(write, part, i, row + b, column + a)
            if b + n < count:
              whole()
            else:
              pl.when(valid == count)(whole)
              pl.when(valid < count)(functools.partial(write_some, part, row + b, column + a, valid - b))

        def write(part, i, row, column):
          tile = out_tiles.at[group_of, i % 3, pl.ds(0, part.shape[1])]
          plgpu.wait_smem_to_gmem(2 if i else 0, wait_read_only=True)
          _turned(_in_tiles(tile, interpret))[...] = part
          plgpu.commit_smem()
          plgpu.copy_smem_to_gmem(tile, out.at[pl.ds(row, part.shape[1]), pl.ds(column, _CHUNK)])

        def write_some(part, row, column, valid):
          """The first ``valid`` rows, in copies of 16, 8, 4, 2 and 1."""
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
          _store_plainly(_turned(few.at[group_of, pl.ds(0, part.shape[1])]), part)
          plgpu.commit_smem()
          done: Any = 0
          for n in (16, 8, 4, 2, 1):
            some = valid & n != 0

            @pl.when(some)
            def _(done=done, n=n):
              there = pl.ds(row + done, n), pl.ds(column, _CHUNK)
              plgpu.copy_smem_to_gmem(few.at[group_of, pl.ds(done, n)], out.at[there])

            done = done + jnp.where(some, n, 0)

        for i, count in enumerate(counts):
          pl.when((kind == i) & (column < C))(functools.partial(product_of, count))

        pl.when(column >= C)(lambda: _pass_by(before, todo, full, free))
        return todo

      _in_turn(number[0] * strips, piece)
      plgpu.wait_smem_to_gmem(0)

  out = _kernel(
    kernel,
    _ROWS,
    jax.ShapeDtypeStruct((M, C), dtype),
    interpret,
    x_tiles=_rows_of_64(stages, counts[-1], dtype=dtype),
    w_tiles=_swizzled(stages, 2, *((own, _DEPTH) if transposed else (_DEPTH, own)), dtype=dtype),
    out_tiles=_rows_of_64(2, 3, _HEIGHT, dtype=dtype),
    few=plgpu.SMEM((2, _HEIGHT, _CHUNK), dtype),
    full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
    free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
  )(visits, number, x, w)
  return _varying_as(x, out)[:rows, :columns]


def _varying_as(x, out):
  """A kernel's result, which varies over the devices that x varies over: inside shard_map Pallas does not say so."""
  return vary(out, varying_axes(x))


def _wide(sizes: tuple[int, int], most: int) -> tuple[bool, int]:
  """Of a gradient [S, C]: whether its tiles lie across S instead of C, and how wide they are: more than half of the most, if
  any such width divides the axis; else the last tile of C repeats some of the one before."""
  able = [(n, not across) for n in range(most, most // 2, -_CHUNK) for across in (False, True) if sizes[not across] % n == 0]
  return (not able[0][1], able[0][0]) if able else (False, min(most, -(-sizes[1] // _CHUNK) * _CHUNK))


@functools.partial(jax.jit, static_argnames=("tiles", "interpret"))
def _groups_of_rows(x, g, sizes, tiles: Tiles, interpret):
  """The gradient of the weights [G, S, C]: x.T @ g over the rows of each group, added up in float32."""
  plgpu, wanted = _mosaic(), (x.shape[1], g.shape[1])
  x, g = _pad(x), _pad(g)
  turned, wide = _wide((x.shape[1], g.shape[1]), tiles.wide)
  x, g = (g, x) if turned else (x, g)
  S, C, G = x.shape[1], g.shape[1], sizes.shape[0]
  own = tiles.high // 2 if S % (tiles.high // 2) == 0 else _DEPTH
  down, across, stages, dtype = pl.cdiv(S, 2 * own), pl.cdiv(C, wide), tiles.weight_stages, x.dtype
  ends = jnp.cumsum(sizes)
  spans = jnp.stack([ends - sizes, ends]).astype(jnp.int32)

  def kernel(spans, x, g, out, x_tiles, g_tiles, out_tiles, full, free):
    group_of = jax.lax.axis_index("warpgroup")

    def place(piece):
      group = jax.lax.div(piece, down * across)
      within = piece - group * (down * across)
      d = jax.lax.div(within, across)
      begin, end = spans[0, group], spans[1, group]
      first = begin - jax.lax.rem(begin, 8)  # where a tile of eight begins
      c = jnp.minimum((within - d * across) * wide, max(C - wide, 0))
      todo = jnp.where(end > begin, jax.lax.div(end - first + (_DEPTH - 1), _DEPTH), 0)
      return group, d * (2 * own), c, first, begin, end, todo

    @pl.when(group_of == 2)
    def copy():
      plgpu.set_max_registers(_FEW_REGISTERS, action="decrease")

      def piece(number, before):
        _, d, c, first, _, _, todo = place(number)

        def step(k, _):
          slot = jax.lax.rem(before + k, stages)

          @pl.when(before + k >= stages)
          def _():
            plgpu.barrier_wait(free.at[slot])

          deep = pl.ds(first + k * _DEPTH, _DEPTH)
          plgpu.copy_gmem_to_smem(g.at[deep, pl.ds(c, wide)], g_tiles.at[slot], full.at[slot])
          for half in range(2):
            plgpu.copy_gmem_to_smem(x.at[deep, pl.ds(d + half * own, own)], x_tiles.at[slot, half], full.at[slot])

        jax.lax.fori_loop(0, todo, step, None)
        return todo

      _in_turn(G * down * across, piece)

    @pl.when(group_of < 2)
    def multiply():
      plgpu.set_max_registers(_REGISTERS, action="increase")

      def piece(number, before):
        group, d, c, first, begin, end, todo = place(number)
        d = d + group_of * own

        @pl.when(d < S)
        def _():
          def summed(total):
            def step(k, _):
              slot = jax.lax.rem(before + k, stages)
              plgpu.barrier_wait(full.at[slot])
              left, right = x_tiles.at[slot, group_of], g_tiles.at[slot]
              at_first = first + k * _DEPTH

              @pl.when((at_first < begin) | (at_first + _DEPTH > end))
              def _():
                # What is not the group's may be anything, and nothing times that is not nothing. Both warpgroups do it to g's
                # tile: each of them reads what it has itself written, and the other one can only have written the same.
                row = plgpu.broadcasted_iota(jnp.int32, (_DEPTH, _DEPTH), 0, layout=plgpu.Layout.WGMMA)
                for tile, size in ((left, own), (right, wide)):
                  for at in range(0, size, _DEPTH):
                    part = tile.at[:, pl.ds(at, _DEPTH)]
                    found = part[...]
                    part[...] = jnp.where((row >= begin - at_first) & (row < end - at_first), found, jnp.zeros_like(found))
                plgpu.commit_smem()

              plgpu.wgmma(total, _turned(left), right)
              plgpu.wgmma_wait(1)

              @pl.when(k > 0)
              def _():
                plgpu.barrier_arrive(free.at[jax.lax.rem(before + k - 1, stages)])

            jax.lax.fori_loop(0, todo, step, None)
            return total[...]

          made = pl.run_scoped(summed, plgpu.ACC((own, wide), jnp.float32)).astype(dtype)

          @pl.when(todo > 0)
          def _():
            plgpu.barrier_arrive(free.at[jax.lax.rem(before + todo - 1, stages)])

          pieces = [(a, b) for a in range(0, own, _CHUNK) for b in range(0, wide, _CHUNK)]
          for i, (a, b) in enumerate(pieces):
            tile = out_tiles.at[group_of, i % 2]
            plgpu.wait_smem_to_gmem(1 if i else 0, wait_read_only=True)
            (_turned(tile) if turned else tile)[...] = made[a : a + _CHUNK, b : b + _CHUNK]
            plgpu.commit_smem()
            there = pl.ds(d + a, _CHUNK), pl.ds(c + b, _CHUNK)
            plgpu.copy_smem_to_gmem(tile, out.at[(group, *(there[::-1] if turned else there))])

        pl.when(d >= S)(lambda: _pass_by(before, todo, full, free))
        return todo

      _in_turn(G * down * across, piece)
      plgpu.wait_smem_to_gmem(0)

  out = _kernel(
    kernel,
    _WEIGHTS,
    jax.ShapeDtypeStruct((G, C, S) if turned else (G, S, C), dtype),
    interpret,
    x_tiles=_swizzled(stages, 2, _DEPTH, own, dtype=dtype),
    g_tiles=_swizzled(stages, _DEPTH, wide, dtype=dtype),
    out_tiles=_swizzled(2, 2, _CHUNK, _CHUNK, dtype=dtype),
    full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
    free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
  )(spans, x, g)
  return _varying_as(x, out)[:, : wanted[0], : wanted[1]]


def _refuses(case: Case) -> list[str]:
  reasons = [] if case.platform == "gpu" else [f"it runs on Hopper GPUs, not on {case.platform}"]
  if case.capability not in (None, _HOPPER):
    reasons.append(f"it is for GPUs of compute capability {_HOPPER}, not {case.capability}")
  if case.dtype == "float32":
    reasons.append("it has no float32 operands")
  if jax.__version_info__ < (0, 11):  # its Pallas cannot write a swizzled tile the other way round
    reasons.append(f"it needs JAX 0.11, and this is {jax.__version__}")
  return reasons


KERNEL = GroupedKernel(
  name="pallas_gpu",
  refuses=_refuses,
  avoided=lambda case: "",
  run=product,
  called=lambda path, name: _ROWS in path or _WEIGHTS in path,
  rows=rows_worked_on,
  skips=True,
  fused=True,
)
