"""The gradient of the matrices of a grouped product, as a Pallas kernel for Hopper GPUs.

Persistent, with a warpgroup that copies and two that multiply, as the kernel of ``pallas_gpu.py`` is. It sums over the rows of
a group: in steps of DEPTH, from a multiple of 8 on, and what is left of it in steps of 16. Rows of the first and the last one
that are another group's are set to zero in shared memory.

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
  mosaic,
  other_way,
  pad,
  pass_by,
  persistent,
  swizzled,
  varying_as,
)

NAME = "gpu_weights_by_group"
"""What the kernel is called in a program."""

_FEW = 16
"""Rows of each of a group's last steps: as few as wgmma adds up. Mosaic adds up no fewer than a swizzle spans, so these steps'
tiles have a narrow one."""


def _steps(begin, end):
  """Of the group of rows ``begin`` to ``end``: where its first step begins, how many steps have DEPTH rows, and how many it has
  with those of 16."""
  first = begin - jax.lax.rem(begin, 8)  # where a tile of eight begins
  fews = jnp.where(end > begin, jax.lax.div(end - first + (_FEW - 1), _FEW), 0)
  whole = jax.lax.div(fews, DEPTH // _FEW)
  return first, whole, fews - whole * (DEPTH // _FEW - 1)


def _wide(sizes: tuple[int, int], most: int) -> tuple[bool, int]:
  """Of a gradient [S, C]: whether its tiles lie across S instead of C, and how wide they are: more than half of the most, if
  any such width divides the axis; else the last tile of C repeats some of the one before."""
  able = [(n, not across) for n in range(most, most // 2, -CHUNK) for across in (False, True) if sizes[not across] % n == 0]
  return (not able[0][1], able[0][0]) if able else (False, min(most, -(-sizes[1] // CHUNK) * CHUNK))


@functools.partial(jax.jit, static_argnames=("tiles", "interpret"))
def groups_of_rows(x, g, sizes, tiles: Tiles, interpret):
  """The gradient of the weights [G, S, C]: x.T @ g over the rows of each group, added up in float32."""
  plgpu, wanted = mosaic(), (x.shape[1], g.shape[1])
  x, g = pad(x), pad(g)
  turned, wide = _wide((x.shape[1], g.shape[1]), tiles.wide)
  x, g = (g, x) if turned else (x, g)
  S, C, G = x.shape[1], g.shape[1], sizes.shape[0]
  own = tiles.high // 2 if S % (tiles.high // 2) == 0 else DEPTH
  down, across, stages, dtype = pl.cdiv(S, 2 * own), pl.cdiv(C, wide), tiles.weight_stages, x.dtype
  ends = jnp.cumsum(sizes)
  spans = jnp.stack([ends - sizes, ends]).astype(jnp.int32)

  def kernel(spans, x, g, out, in_tiles, out_tiles, full, free):
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
      """do(number of a step, its first row from the first step's on, its rows)."""
      jax.lax.fori_loop(0, whole, lambda k, _: do(k, k * DEPTH, DEPTH), None)
      jax.lax.fori_loop(whole, todo, lambda k, _: do(k, whole * (DEPTH - _FEW) + k * _FEW, _FEW), None)

    @pl.when(group_of == 2)
    def copy():
      plgpu.set_max_registers(FEW_REGISTERS, action="decrease")

      def piece(number, before):
        _, d, c, _, _, first, whole, todo = place(number)

        def step(k, row, count):
          slot, (x_tiles, g_tiles) = jax.lax.rem(before + k, stages), tiles_of[count]

          @pl.when(before + k >= stages)
          def _():
            plgpu.barrier_wait(free.at[slot])

          deep, there = pl.ds(first + row, count), pl.ds(0, count)
          plgpu.copy_gmem_to_smem(g.at[deep, pl.ds(c, wide)], g_tiles.at[slot, there], full.at[slot])
          for half in range(2):
            plgpu.copy_gmem_to_smem(x.at[deep, pl.ds(d + half * own, own)], x_tiles.at[slot, half, there], full.at[slot])

        each_step(whole, todo, step)
        return todo

      in_turn(G * down * across, piece)

    @pl.when(group_of < 2)
    def multiply():
      plgpu.set_max_registers(REGISTERS, action="increase")

      def piece(number, before):
        group, d, c, begin, end, first, whole, todo = place(number)
        d = d + group_of * own

        @pl.when(d < S)
        def _():
          def summed(total):
            def step(k, row, count):
              slot, there, (x_tiles, g_tiles) = jax.lax.rem(before + k, stages), pl.ds(0, count), tiles_of[count]
              plgpu.barrier_wait(full.at[slot])
              left, right = x_tiles.at[slot, group_of, there], g_tiles.at[slot, there]
              for at in dict.fromkeys((0, count - _FEW)):  # another group's rows are before its first or behind its last
                start = first + row + at

                @pl.when((start < begin) | (start + _FEW > end))
                def _(at=at, start=start):
                  # What is not the group's may be anything, and nothing times that is not nothing. Both warpgroups do it to g's
                  # tile: each of them reads what it has itself written, and the other one can only have written the same.
                  for tile in (left, right):
                    part = other_way(tile.at[pl.ds(at, _FEW)])  # a warpgroup's registers have 64 numbers of the first axis
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

          @pl.when(todo > 0)
          def _():
            plgpu.barrier_arrive(free.at[jax.lax.rem(before + todo - 1, stages)])

          pieces = [(a, b) for a in range(0, own, CHUNK) for b in range(0, wide, CHUNK)]
          for i, (a, b) in enumerate(pieces):
            tile = out_tiles.at[group_of, i % 2]
            plgpu.wait_smem_to_gmem(1 if i else 0, wait_read_only=True)
            (other_way(tile) if turned else tile)[...] = made[a : a + CHUNK, b : b + CHUNK]
            plgpu.commit_smem()
            there = pl.ds(d + a, CHUNK), pl.ds(c + b, CHUNK)
            plgpu.copy_smem_to_gmem(tile, out.at[(group, *(there[::-1] if turned else there))])

        pl.when(d >= S)(lambda: pass_by(before, todo, full, free))
        return todo

      in_turn(G * down * across, piece)
      plgpu.wait_smem_to_gmem(0)

  def both_tiles(width):
    # A stage holds tiles of either width while others hold the other one: shapes and their order are the same, so that every
    # stage has the same bytes in both.
    return [swizzled(stages, *shape, dtype=dtype, width=width) for shape in ((2, DEPTH, own), (DEPTH, wide))]

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
