"""Shared parts of the kernels for Hopper GPUs: a ring of copies into shared memory, and the layouts of tiles."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from maxtext_like.layers.kernels.mosaic_gpu import mosaic

plgpu = mosaic()

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""Layout of a 16-bit tile in shared memory that tensor cores can read."""

TILE, ROWS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
"""Register layout of a tensor-core result, and of one number for each of its rows."""


@dataclass(frozen=True)
class Stream:
  """The steps of a product. One warpgroup copies operands into slots of shared memory, and the others multiply them.

  Attributes:
    ready: one barrier per slot: its copies have arrived.
    free: one barrier per slot: all warpgroups have multiplied it.
    slots: number of slots.
  """

  ready: Any
  free: Any
  slots: int

  def fill(self, count: Any, copy: Callable[[Any, Any], None]) -> None:
    """Copy ``count`` steps with copy(step, slot), and wait until all are multiplied, because the block must not end earlier."""

    def vacate(t):
      slot = lax.rem(t, self.slots)
      pl.when(t >= self.slots)(lambda: plgpu.barrier_wait(self.free.at[slot]))
      return slot

    # Copy every step into its slot, and then wait for the last ones to be multiplied.
    lax.fori_loop(0, count, lambda t, _: copy(t, vacate(t)), None)
    lax.fori_loop(count, count + self.slots, lambda t, _: (vacate(t), None)[1], None)

  def multiply(self, acc: Any, begin: Any, count: Any, product: Callable[[Any, Any], None]) -> None:
    """Add ``count`` steps starting with ``begin`` to an accumulator with product(acc, slot), and wait for the sum."""

    def step(t, _):
      slot = lax.rem(t, self.slots)
      plgpu.barrier_wait(self.ready.at[slot])
      product(acc, slot)

      @pl.when(t > begin)
      def _():
        plgpu.wgmma_wait(1)  # wait for the previous step
        plgpu.barrier_arrive(self.free.at[lax.rem(t - 1, self.slots)])

    lax.fori_loop(begin, begin + count, step, None)
    plgpu.wgmma_wait(0)
    pl.when(count > 0)(lambda: plgpu.barrier_arrive(self.free.at[lax.rem(begin + count - 1, self.slots)]))


def wide(rows: jax.Array, width: int) -> jax.Array:
  """Broadcast one number per row to [rows, width]."""
  return lax.broadcast_in_dim(rows, (rows.shape[0], width), [0])
