"""What both grouped kernels for Hopper GPUs are made of (``pallas_gpu.py``, ``pallas_gpu_weights.py``): blocks of three
warpgroups, their share of the work, and shared memory as TMA and wgmma like it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.partition import vary, varying_axes

BLOCKS = 132
"""Multiprocessors of an H100 or H200 (SXM): blocks of a persistent kernel. On a card with fewer some wait for others."""
DEPTH = 64
"""What is summed in a step: 16-bit numbers of a row of 128 bytes, the widest swizzle of shared memory."""
CHUNK = 64
"""Columns of a result that are written at once."""
REGISTERS, FEW_REGISTERS = 232, 40
"""Of a thread that multiplies, and of one that copies: 2 * 232 + 40 of them are as many as a multiprocessor has for 128."""


def mosaic() -> Any:
  """Pallas for NVIDIA GPUs. Its import takes half a second, which who only chooses between kernels shall not wait for."""
  from jax.experimental.pallas import mosaic_gpu

  return mosaic_gpu


def persistent(body, name: str, out: jax.ShapeDtypeStruct, interpret: Any, **scratch: Any) -> Any:
  """A persistent kernel of three warpgroups: body(*arrays, result, **scratch)."""
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


def swizzled(*shape: int, dtype: Any, width: int = DEPTH) -> Any:
  """Shared memory as TMA and wgmma like it; the last axis is a multiple of ``width`` 16-bit numbers, which a swizzle spans."""
  plgpu = mosaic()
  return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)))


def in_turn(count: jax.Array, work) -> None:
  """Inside a kernel: work(number of a piece, steps before it) -> its steps, for this block's share of the pieces."""
  block = jax.lax.axis_index("block")
  mine = jax.lax.div(count - block + (BLOCKS - 1), BLOCKS)
  jax.lax.fori_loop(0, mine, lambda i, step: step + work(block + i * BLOCKS, step), jnp.int32(0))


def other_way(tile):
  """A tile of shared memory read, or written, the other way round."""
  return tile.transpose((1, 0))


def pass_by(before, todo, full, free) -> None:
  """What a warpgroup does that has no columns in this piece: it holds up no one."""
  stages = full.shape[0]

  def step(k, _):
    slot = jax.lax.rem(before + k, stages)
    mosaic().barrier_wait(full.at[slot])
    mosaic().barrier_arrive(free.at[slot])

  jax.lax.fori_loop(0, todo, step, None)


def pad(x: jax.Array) -> jax.Array:
  """Zeros behind rows up to a multiple of 8, and behind the other axes of 64: so no array ends inside a tile. Sizes of models
  are such; the factors of an adapter are not."""
  rows = x.ndim == 2
  widths = [(0, -x.shape[0] % 8 if rows else 0), *((0, -size % DEPTH) for size in x.shape[1:])]
  return jnp.pad(x, widths) if any(w for _, w in widths) else x


def varying_as(x, out):
  """A kernel's result, which varies over the devices that x varies over: inside shard_map Pallas does not say so."""
  return vary(out, varying_axes(x))
