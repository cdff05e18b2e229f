"""The gradient of the matrices of a grouped product, as a Pallas kernel for Hopper GPUs.

Like the kernel of ``pallas_gpu.py`` it is persistent, with one warpgroup that copies and two that multiply. It sums over the
rows of a group in steps of DEPTH, starting at a multiple of 8, and over the remaining rows in steps of 16. Rows of the first
and the last step that belong to another group are set to zero in shared memory.

S rows and C columns of a matrix, G groups.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

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
from maxtext_like.layers.kernels.mosaic_gpu import mosaic

NAME = "gpu_weights_by_group"
"""Name of the kernel in a program."""

_FEW = 16
"""Rows of the last steps of a group: the fewest that wgmma can sum. Mosaic sums at least the rows that a swizzle spans, so the
tiles of these steps have a narrow swizzle."""


def _steps(begin, end):
  """Return for the group of rows ``begin`` to ``end``: the first row of its first step, the number of steps of DEPTH rows, and
  the number of all steps, including those of 16 rows."""
  first = begin - jax.lax.rem(begin, 8)  # tiles have eight rows
  fews = jnp.where(end > begin, jax.lax.div(end - first + (_FEW - 1), _FEW), 0)
  whole = jax.lax.div(fews, DEPTH // _FEW)
  return first, whole, fews - whole * (DEPTH // _FEW - 1)


def _wide(sizes: tuple[int, int], most: int) -> tuple[bool, int]:
  """Choose the tiles of a gradient [S, C]. Return True if they extend along S instead of C, and their width.

  The width is more than half of the maximum if such a width divides the axis. Otherwise the last tile of C repeats some columns
  of the previous one."""
  able = [(n, not across) for n in range(most, most // 2, -CHUNK) for across in (False, True) if sizes[not across] % n == 0]
  return (not able[0][1], able[0][0]) if able else (False, min(most, -(-sizes[1] // CHUNK) * CHUNK))


@functools.partial(jax.jit, static_argnames=("tiles", "interpret"))
def groups_of_rows(x, g, sizes, tiles: Tiles, interpret):
  """Compute the gradient of the matrices [G, S, C]: x.T @ g over the rows of each group, accumulated in float32."""
  plgpu, wanted = mosaic(), (x.shape[1], g.shape[1])
  x, g = pad(x), pad(g)
  # Choose the tiles, and swap x and g if they extend along S.
  turned, wide = _wide((x.shape[1], g.shape[1]), tiles.wide)
  x, g = (g, x) if turned else (x, g)
  S, C, G = x.shape[1], g.shape[1], sizes.shape[0]
  own = tiles.high // 2 if S % (tiles.high // 2) == 0 else DEPTH
  down, across, stages, dtype = pl.cdiv(S, 2 * own), pl.cdiv(C, wide), tiles.weight_stages, x.dtype
  # First and last row of each group.
  ends = jnp.cumsum(sizes)
  spans = jnp.stack([ends - sizes, ends]).astype(jnp.int32)

  def kernel(spans, x, g, out, in_tiles, out_tiles, full, free):
    # Locate a piece: group, first row and column of the tile, and the steps over the rows of the group.
    group_of = jax.lax.axis_index("warpgroup")
    tiles_of = dict(zip((DEPTH, _FEW), in_tiles, strict=True))

    def place(piece):
      group = jax.lax.div(piece, down * across)
      within = piece - group * (down * across)
      d = jax.lax.div(within, across)
      begin, end = spans[0, group], spans[1, group]
      c = jnp.minimum((within - d * across) * wide, max(C - wide, 0))
      return group, d * (2 * own), c, begin, end, *_steps(begin, end)

    def each_step(whole, todo, do):
      """Call do(index of a step, its first row relative to the first step, its number of rows) for all steps."""
      jax.lax.fori_loop(0, whole, lambda k, _: do(k, k * DEPTH, DEPTH), None)
      jax.lax.fori_loop(whole, todo, lambda k, _: do(k, whole * (DEPTH - _FEW) + k * _FEW, _FEW), None)

    # Warpgroup 2 copies the rows of each step.
    @pl.when(group_of == 2)
    def copy():
      plgpu.set_max_registers(FEW_REGISTERS, action="decrease")

      def piece(number, before):
        _, d, c, _, _, first, whole, todo = place(number)

        def step(k, row, count):
          slot, (x_tiles, g_tiles) = jax.lax.rem(before + k, stages), tiles_of[count]

          # Wait until both warpgroups have read the tiles that were in this slot.
          @pl.when(before + k >= stages)
          def _():
            plgpu.barrier_wait(free.at[slot])

          deep, there = pl.ds(first + row, count), pl.ds(0, count)
          # Both warpgroups use the tile of g, and each has its own tile of x.
          plgpu.copy_gmem_to_smem(g.at[deep, pl.ds(c, wide)], g_tiles.at[slot, there], full.at[slot])
          for half in range(2):
            plgpu.copy_gmem_to_smem(x.at[deep, pl.ds(d + half * own, own)], x_tiles.at[slot, half, there], full.at[slot])

        each_step(whole, todo, step)
        return todo

      in_turn(G * down * across, piece)

    # Warpgroups 0 and 1 multiply, and write the result in parts.
    @pl.when(group_of < 2)
    def multiply():
      plgpu.set_max_registers(REGISTERS, action="increase")

      def piece(number, before):
        group, d, c, begin, end, first, whole, todo = place(number)
        d = d + group_of * own

        @pl.when(d < S)
        def _():
          # Multiply each step as soon as its copies have arrived, after clearing rows of other groups.
          def summed(total):
            def step(k, row, count):
              slot, there, (x_tiles, g_tiles) = jax.lax.rem(before + k, stages), pl.ds(0, count), tiles_of[count]
              plgpu.barrier_wait(full.at[slot])
              left, right = x_tiles.at[slot, group_of, there], g_tiles.at[slot, there]
              for at in dict.fromkeys((0, count - _FEW)):  # only the first and the last rows can belong to another group
                start = first + row + at

                @pl.when((start < begin) | (start + _FEW > end))
                def _(at=at, start=start):
                  # Rows of other groups may be NaN, so they are set to zero. Both warpgroups do it to g's tile: each reads what
                  # it has written itself, and the other one can only have written the same.
                  for tile in (left, right):
                    part = other_way(tile.at[pl.ds(at, _FEW)])  # registers of a warpgroup hold 64 elements of the first axis
                    rows = start + plgpu.broadcasted_iota(jnp.int32, part.shape, 1, layout=plgpu.Layout.WGMMA)
                    found = part[...]
                    part[...] = jnp.where((rows >= begin) & (rows < end), found, jnp.zeros_like(found))
                  plgpu.commit_smem()

              plgpu.wgmma(total, other_way(left), right)
              plgpu.wgmma_wait(1)

              @pl.when(k > 0)
              def _():
                plgpu.barrier_arrive(free.at[jax.lax.rem(before + k - 1, stages)])

            each_step(whole, todo, step)
            return total[...]

          made = pl.run_scoped(summed, plgpu.ACC((own, wide), jnp.float32)).astype(dtype)

          # Release the slot of the last step.
          @pl.when(todo > 0)
          def _():
            plgpu.barrier_arrive(free.at[jax.lax.rem(before + todo - 1, stages)])

          # Write the result in parts, with two buffers in turn.
          pieces = [(a, b) for a in range(0, own, CHUNK) for b in range(0, wide, CHUNK)]
          for i, (a, b) in enumerate(pieces):
            tile = out_tiles.at[group_of, i % 2]
            plgpu.wait_smem_to_gmem(1 if i else 0, wait_read_only=True)
            (other_way(tile) if turned else tile)[...] = made[a : a + CHUNK, b : b + CHUNK]
            plgpu.commit_smem()
            there = pl.ds(d + a, CHUNK), pl.ds(c + b, CHUNK)
            plgpu.copy_smem_to_gmem(tile, out.at[(group, *(there[::-1] if turned else there))])

        # A warpgroup without rows must still release the slots, because the copies wait for both.
        pl.when(d >= S)(lambda: pass_by(before, todo, full, free))
        return todo

      in_turn(G * down * across, piece)
      plgpu.wait_smem_to_gmem(0)

  def both_tiles(width):
    # A stage may hold tiles of one width while other stages hold the other width. Shapes and their order are equal, so every
    # stage has the same bytes for both widths.
    return [swizzled(stages, *shape, dtype=dtype, width=width) for shape in ((2, DEPTH, own), (DEPTH, wide))]

  # The blocks stay on their processors and take one piece after another.
  out = persistent(
    kernel,
    NAME,
    jax.ShapeDtypeStruct((G, C, S) if turned else (G, S, C), dtype),
    interpret,
    in_tiles=plgpu.RefUnion(both_tiles(DEPTH), both_tiles(_FEW)),
    out_tiles=swizzled(2, 2, CHUNK, CHUNK, dtype=dtype),
    full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
    free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
  )(spans, x, g)
  return varying_as(x, out)[:, : wanted[0], : wanted[1]]
