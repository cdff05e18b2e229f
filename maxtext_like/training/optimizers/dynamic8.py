"""Moments in 8 bits: block-wise dynamic codes (Dettmers et al. 2022, arXiv:2110.02861), as bitsandbytes has them.

A number is stored as the nearest of 256 shares of the largest magnitude in its block: for every power of ten down to 1e-6 the
middles of equal parts of [0.1, 1], of twice as many for the next power; 0 and 1. The signed code has both signs, the unsigned
one twice as many parts. Two things are other than in bitsandbytes:

- A second moment above 0 is never stored as 0, but as the smallest share. A 0 under a first moment that is none makes a step
  of ``1 / adam_eps`` times it, which is where 8-bit Adam diverges.
- Blocks lie along one axis of an array, so that state is split over devices as the parameters are. The mesh does not decide
  how: a checkpoint goes on, to the bit, on another one. They never lie across the tokens of a table: gradients of seldom ones
  are thousands of times smaller than those of their neighbours, and would be 0 beside them.

Vectors (norms, biases) and arrays of fewer than 4096 numbers in a layer stay in float32.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_like.layers.param import Param
from maxtext_like.layers.sharding_rules import GATHERED, RULES

SMALLEST = 4096  # numbers of a layer's array that is worth codes, as in bitsandbytes
LONGEST = 256  # numbers of a block
SHORTEST = 32  # below it, blocks along an axis that is gathered are better than those along one that is not
WAYS = 16  # parts that an axis may be split into without a block being split
POWERS = 7  # of ten


class Blocks(NamedTuple):
  """A moment in 8 bits.

  Attributes:
    codes: uint8, of the moment's shape.
    scale: float32, the largest magnitude of every block: as ``codes``, with fewer numbers along the axis of the blocks. What
      is not finite in a moment is seen in it.
  """

  codes: jax.Array
  scale: jax.Array


class Layout(NamedTuple):
  """Where the blocks of an array lie: the axis, counted from the last (-1), and the numbers of a block."""

  axis: int
  size: int


def layout(p: Param) -> Layout | None:
  """Of a parameter's moments; None: they stay in float32."""
  sizes = [(i - len(p.shape), axis, size) for i, (axis, size) in enumerate(zip(p.axes, p.shape, strict=True))]
  sizes = [entry for entry in sizes if entry[1] != "layers"]
  if len(sizes) < 2 or math.prod(size for _, _, size in sizes) < SMALLEST:
    return None
  blocks = [(Layout(i, _block(axis, size)), axis) for i, axis, size in sizes if axis != "vocab"]
  kept = [block for block, axis in blocks if axis not in GATHERED and block.size >= SHORTEST]
  return max(kept or [block for block, _ in blocks], key=lambda block: block.size)


def _block(axis: str | None, size: int) -> int:
  """The largest part of an axis, up to LONGEST, that WAYS devices have whole ones of."""
  if axis is not None and getattr(RULES, axis) and size % WAYS == 0:
    size //= WAYS
  return max(n for n in range(1, min(size, LONGEST) + 1) if size % n == 0)


def in_blocks(x: jax.Array, where: Layout) -> jax.Array:
  """The same numbers with the axis in two: blocks, and the numbers of one."""
  axis = x.ndim + where.axis
  return x.reshape(*x.shape[:axis], -1, where.size, *x.shape[axis + 1 :])


def whole(x: jax.Array, where: Layout) -> jax.Array:
  """What ``in_blocks`` gave, as it was."""
  axis = x.ndim + where.axis
  return x.reshape(*x.shape[: axis - 1], -1, *x.shape[axis + 1 :])


def zeros(shape: tuple[int, ...], where: Layout, *, signed: bool) -> Blocks:
  """What ``encode`` gives of zeros of this shape, which XLA would work out number by number while it compiles: a minute for
  10^9 of them."""
  axis = len(shape) + where.axis
  scale = (*shape[:axis], shape[axis] // where.size, *shape[axis + 1 :])
  return Blocks(jnp.full(shape, 127 if signed else 0, jnp.uint8), jnp.zeros(scale, jnp.float32))


def encode(blocks: jax.Array, where: Layout, *, signed: bool) -> Blocks:
  """The codes of float32 numbers, ties either way.

  Args:
    blocks: as ``in_blocks`` gives them.
    where: they lie.
    signed: numbers below 0 have codes too; else there are none, and one above 0 is not stored as 0.
  """
  spread = jnp.max(jnp.abs(blocks), axis=blocks.ndim + where.axis, keepdims=True)
  down = jnp.where(spread > 1, np.float32(2.0**-64), 1)  # machines divide by the reciprocal, which is 0 beyond 2^126
  share = jnp.where(spread > 0, jnp.abs(blocks) * down / (spread * down), 0)
  least, step, first = (jnp.zeros(share.shape, jnp.float32) for _ in range(3))
  last = first
  for power in range(POWERS):
    parts, unit = _parts(power, signed=signed), 10.0 ** (power - POWERS + 1)
    here = share >= _between(power, signed=signed)
    least = jnp.where(here, 0.1 * unit, least)
    step = jnp.where(here, parts / (0.9 * unit), step)
    first = jnp.where(here, _first(power, signed=signed), first)
    last = jnp.where(here, _first(power + 1, signed=signed) - 1, last)
  number = jnp.clip(first + jnp.floor((share - least) * step), first, last)
  number = jnp.where(share >= _between(POWERS, signed=signed), _first(POWERS, signed=signed), number)
  if signed:
    number = 127 + jnp.where(blocks < 0, -jnp.minimum(number, 127), number)
  else:
    number = jnp.where(blocks > 0, jnp.maximum(number, 1), number)
  return Blocks(whole(number.astype(jnp.uint8), where), jnp.squeeze(spread, blocks.ndim + where.axis))


def decode(stored: Blocks, where: Layout, *, signed: bool) -> jax.Array:
  """What was stored, float32, as ``in_blocks`` gives it: the same to the bit in whatever program, as nothing but one product
  of each share is rounded."""
  number = in_blocks(stored.codes, where).astype(jnp.float32) - (127 if signed else 0)
  size, share = jnp.abs(number), jnp.zeros(number.shape, jnp.float32)
  for power in range(POWERS):  # straight lines, each the highest where it counts
    parts, first = _parts(power, signed=signed), _first(power, signed=signed)
    ninths = 18 * (size - first) + 9 + 2 * parts  # whole numbers: parts of 0.1 / (2 * parts)
    share = jnp.maximum(share, ninths * np.float32(10.0 ** (power - POWERS) / (2 * parts)))
  share = jnp.where(size > 0, jnp.minimum(share, 1), 0)
  return jnp.sign(number) * share * jnp.expand_dims(stored.scale, number.ndim + where.axis)


def _parts(power: int, *, signed: bool) -> int:
  """Of [0.1, 1] times a power of ten, from the lowest on."""
  return 2**power * (1 if signed else 2)


def _first(power: int, *, signed: bool) -> int:
  """The number of the first share of a power of ten; of the one beyond the last, that of 1."""
  return 2**power if signed else 2 ** (power + 1) - 1


def _between(power: int, *, signed: bool) -> np.float32:
  """The middle between the first share of a power of ten and the one before it: 0, or the last of the power before."""
  unit = 10.0 ** (power - POWERS + 1)
  above = unit * (0.1 + 0.45 / _parts(power, signed=signed)) if power < POWERS else 1.0
  below = unit / 10 * (1 - 0.45 / _parts(power - 1, signed=signed)) if power else 0.0
  return np.float32((above + below) / 2)


def scale_sharding(codes: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
  """Of the scales of this shape: as the codes lie, but whole along an axis that has too few of them."""
  spec = [*codes.spec, *(None,) * (len(shape) - len(codes.spec))]
  uneven = lambda entry, size: size % math.prod(codes.mesh.shape[a] for a in ((entry,) if isinstance(entry, str) else entry))
  return NamedSharding(
    codes.mesh, PartitionSpec(*(None if e and uneven(e, n) else e for e, n in zip(spec, shape, strict=True)))
  )
