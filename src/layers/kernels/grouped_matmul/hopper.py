"""Shared parts of the two grouped kernels for Hopper GPUs (``pallas_gpu.py``, ``pallas_gpu_weights.py``): persistent blocks of
three warpgroups, the distribution of work, and the layout of shared memory for TMA and wgmma."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.kernels.mosaic_gpu import mosaic
from maxtext_like.layers.partition import vary, varying_axes

BLOCKS = 132
"""Number of multiprocessors of an H100 or H200 (SXM), which is the number of persistent blocks. On a GPU with fewer, some
wait."""
DEPTH = 64
"""Size of one step along the summed axis: 16-bit numbers in 128 bytes, the widest swizzle of shared memory."""
CHUNK = 64
"""Columns of a result that are written at once."""
REGISTERS, FEW_REGISTERS = 232, 40
"""Registers per thread of multiplying and copying warpgroups. 2 * 232 + 40 for 128 threads each fill a multiprocessor."""


def persistent(body, name: str, out: jax.ShapeDtypeStruct, interpret: Any, **scratch: Any) -> Any:
  """Build a persistent kernel with three warpgroups: body(*arrays, result, **scratch)."""
  plgpu = mosaic()
  return plgpu.kernel(
    body,
    out_type=out,
    grid=(BLOCKS,),
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
  """Sizes of the tiles that a block works on. The fastest sizes depend only on the mean number of rows of a group.

  Attributes:
    rows: R, a multiple of 16.
    columns: columns of both warpgroups together.
    stages: steps whose tiles are in shared memory or being copied.
    high, wide: size of a tile of the gradient of the matrices, for both warpgroups together: S and C.
    weight_stages: stages of that kernel.
  """

  rows: int = 256
  columns: int = 128
  stages: int = 4
  high: int = 128
  wide: int = 256
  weight_stages: int = 4


def swizzled(*shape: int, dtype: Any, width: int = DEPTH) -> Any:
  """Declare shared memory with the layout of TMA and wgmma. The last axis is a multiple of ``width`` 16-bit numbers, the width
  of a swizzle."""
  plgpu = mosaic()
  return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)))


def in_turn(count: jax.Array, work) -> None:
  """Run this block's share of the pieces, inside a kernel. work(index of a piece, steps before it) returns its steps."""
  # Block b works on the pieces b, b + BLOCKS, b + 2 * BLOCKS, ...
  block = jax.lax.axis_index("block")
  mine = jax.lax.div(count - block + (BLOCKS - 1), BLOCKS)
  jax.lax.fori_loop(0, mine, lambda i, step: step + work(block + i * BLOCKS, step), jnp.int32(0))


def other_way(tile):
  """Transpose a tile of shared memory for reading or writing."""
  return tile.transpose((1, 0))


def pass_by(before, todo, full, free) -> None:
  """Release the slots of a piece in which this warpgroup has no columns, so that other warpgroups need not wait for it."""
  stages = full.shape[0]

  def step(k, _):
    # Wait for each step's copies, and mark its slot as free.
    slot = jax.lax.rem(before + k, stages)
    mosaic().barrier_wait(full.at[slot])
    mosaic().barrier_arrive(free.at[slot])

  jax.lax.fori_loop(0, todo, step, None)


def pad(x: jax.Array) -> jax.Array:
  """Pad rows with zeros to a multiple of 8, and the other axes to a multiple of 64, so that no array ends inside a tile. The
  sizes of models are already such multiples, but the factors of an adapter are not."""
  rows = x.ndim == 2
  widths = [(0, -x.shape[0] % 8 if rows else 0), *((0, -size % DEPTH) for size in x.shape[1:])]
  return jnp.pad(x, widths) if any(w for _, w in widths) else x


def varying_as(x, out):
  """Mark a kernel's result as varying over the devices that x varies over. Inside shard_map, Pallas does not do this."""
  return vary(out, varying_axes(x))
