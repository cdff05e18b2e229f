"""What the kernels for Hopper GPUs share: a ring of copies into shared memory, and the layouts of tiles."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu
"""Pallas for GPUs as it is since JAX 0.11; before, its types were others."""

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""How a 16-bit tile lies in shared memory, for the tensor cores."""

TILE, ROWS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
"""How a result of the tensor cores lies in registers, and one number for each of its rows."""


@dataclass(frozen=True)
class Stream:
  """Steps of a product whose operands one warpgroup copies and others multiply, in slots of shared memory.

  Attributes:
    ready: barriers, one a slot: its copies have arrived.
    free: barriers, one a slot: everybody has multiplied it.
    slots: how many.
  """

  ready: Any
  free: Any
  slots: int

  def fill(self, count: Any, copy: Callable[[Any, Any], None]) -> None:
    """Copies ``count`` steps, copy(step, slot) each, and waits until all are multiplied: a block must not end before."""

    def vacate(t):
      slot = lax.rem(t, self.slots)
      pl.when(t >= self.slots)(lambda: plgpu.barrier_wait(self.free.at[slot]))
      return slot

    lax.fori_loop(0, count, lambda t, _: copy(t, vacate(t)), None)
    lax.fori_loop(count, count + self.slots, lambda t, _: (vacate(t), None)[1], None)

  def multiply(self, acc: Any, begin: Any, count: Any, product: Callable[[Any, Any], None]) -> None:
    """Adds ``count`` steps from ``begin`` on to an accumulator, product(acc, slot) each, and waits for the sum."""

    def step(t, _):
      slot = lax.rem(t, self.slots)
      plgpu.barrier_wait(self.ready.at[slot])
      product(acc, slot)

      @pl.when(t > begin)
      def _():
        plgpu.wgmma_wait(1)  # the step before
        plgpu.barrier_arrive(self.free.at[lax.rem(t - 1, self.slots)])

    lax.fori_loop(begin, begin + count, step, None)
    plgpu.wgmma_wait(0)
    pl.when(count > 0)(lambda: plgpu.barrier_arrive(self.free.at[lax.rem(begin + count - 1, self.slots)]))


def wide(rows: jax.Array, width: int) -> jax.Array:
  """[rows, width] of one number a row."""
  return lax.broadcast_in_dim(rows, (rows.shape[0], width), [0])
