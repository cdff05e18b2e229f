"""Moments in 8 bits: block-wise dynamic codes (Dettmers et al. 2022, arXiv:2110.02861), as in bitsandbytes.

A number is stored as the nearest of 256 fractions of the largest magnitude in its block. For every power of ten down to 1e-6,
the fractions are the midpoints of equal parts of [0.1, 1] times that power; each next larger power has twice as many parts. The
fractions 0 and 1 are also included. The signed code has both signs; the unsigned code has twice as many parts. Two things
differ from bitsandbytes:

- A second moment above 0 is never stored as 0, but as the smallest fraction. With a second moment of 0 and a first moment that
  is not 0, the step is ``1 / adam_eps`` times the first moment, which makes 8-bit Adam diverge.
- Blocks run along one axis of an array, so the state is sharded as the parameters are. The block layout does not depend on the
  mesh: a checkpoint resumes bit for bit on another mesh. Blocks never run across the tokens of an embedding table: gradients of
  rare tokens are thousands of times smaller than those of their neighbors, and would be rounded to 0 in the same block.

Vectors (norms, biases) and arrays with fewer than 4096 numbers in a layer stay in float32.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_like.layers.param import Param
from maxtext_like.layers.sharding_rules import GATHERED, RULES

SMALLEST = 4096  # arrays of a layer with fewer numbers stay in float32, as in bitsandbytes
LONGEST = 256  # largest number of elements in a block
SHORTEST = 32  # blocks along an axis that is not gathered are preferred unless they are shorter than this
WAYS = 16  # an axis may be sharded over this many devices without splitting a block
POWERS = 7  # powers of ten that the codes cover


class Blocks(NamedTuple):
  """A moment in 8 bits.

  Attributes:
    codes: uint8, with the moment's shape.
    scale: float32, the largest magnitude of every block: the shape of ``codes`` with one entry per block along the axis of the
      blocks. A NaN or infinity in the moment makes the scale non-finite.
  """

  codes: jax.Array
  scale: jax.Array


class Layout(NamedTuple):
  """The blocks of an array: their axis, counted from the last (-1), and the number of elements in a block."""

  axis: int
  size: int


def layout(p: Param) -> Layout | None:
  """Return the block layout for a parameter's moments, or None if they stay in float32."""
  # Axes are counted from the last, because a stack adds an axis in front.
  sizes = [(i - len(p.shape), axis, size) for i, (axis, size) in enumerate(zip(p.axes, p.shape, strict=True))]
  sizes = [entry for entry in sizes if entry[1] != "layers"]
  if len(sizes) < 2 or math.prod(size for _, _, size in sizes) < SMALLEST:
    return None
  # Prefer axes that are not gathered, and among these the longest blocks.
  blocks = [(Layout(i, _block(axis, size)), axis) for i, axis, size in sizes if axis != "vocab"]
  kept = [block for block, axis in blocks if axis not in GATHERED and block.size >= SHORTEST]
  return max(kept or [block for block, _ in blocks], key=lambda block: block.size)


def _block(axis: str | None, size: int) -> int:
  """Return the largest divisor of an axis, up to LONGEST, such that WAYS devices each hold complete blocks."""
  if axis is not None and getattr(RULES, axis) and size % WAYS == 0:
    size //= WAYS
  return max(n for n in range(1, min(size, LONGEST) + 1) if size % n == 0)


def in_blocks(x: jax.Array, where: Layout) -> jax.Array:
  """Reshape the axis of the blocks into two axes: blocks, and elements of a block."""
  axis = x.ndim + where.axis
  return x.reshape(*x.shape[:axis], -1, where.size, *x.shape[axis + 1 :])


def from_blocks(x: jax.Array, where: Layout) -> jax.Array:
  """Undo ``in_blocks``."""
  axis = x.ndim + where.axis
  return x.reshape(*x.shape[: axis - 1], -1, *x.shape[axis + 1 :])


def zeros(shape: tuple[int, ...], where: Layout, *, signed: bool) -> Blocks:
  """Return what ``encode`` returns for zeros of this shape. XLA would constant-fold the encoding while it compiles, which takes
  a minute for 10^9 numbers."""
  axis = len(shape) + where.axis
  scale = (*shape[:axis], shape[axis] // where.size, *shape[axis + 1 :])
  return Blocks(jnp.full(shape, 127 if signed else 0, jnp.uint8), jnp.zeros(scale, jnp.float32))


def encode(blocks: jax.Array, where: Layout, *, signed: bool) -> Blocks:
  """Return the codes of float32 numbers. Ties may round either way.

  Args:
    blocks: in the shape that ``in_blocks`` returns.
    where: the layout of the blocks.
    signed: negative numbers have codes too. Otherwise there must be none, and a number above 0 is not stored as 0.
  """
  # The fraction of each number, relative to the largest magnitude of its block.
  spread = jnp.max(jnp.abs(blocks), axis=blocks.ndim + where.axis, keepdims=True)
  down = jnp.where(spread > 1, np.float32(2.0**-64), 1)  # XLA may multiply by the reciprocal, which is 0 beyond 2^126
  share = jnp.where(spread > 0, jnp.abs(blocks) * down / (spread * down), 0)
  # For each power of ten: where its range starts, how many codes it has per unit, and its first and last code.
  least, step, first = (jnp.zeros(share.shape, jnp.float32) for _ in range(3))
  last = first
  for power in range(POWERS):
    parts, unit = _parts(power, signed=signed), 10.0 ** (power - POWERS + 1)
    here = share >= _between(power, signed=signed)
    least = jnp.where(here, 0.1 * unit, least)
    step = jnp.where(here, parts / (0.9 * unit), step)
    first = jnp.where(here, _first(power, signed=signed), first)
    last = jnp.where(here, _first(power + 1, signed=signed) - 1, last)
  # The code within the range. A fraction close enough to 1 has the code of 1.
  number = jnp.clip(first + jnp.floor((share - least) * step), first, last)
  number = jnp.where(share >= _between(POWERS, signed=signed), _first(POWERS, signed=signed), number)
  # Negative numbers use the lower half of the signed codes. Positive second moments are never stored as 0.
  if signed:
    number = 127 + jnp.where(blocks < 0, -jnp.minimum(number, 127), number)
  else:
    number = jnp.where(blocks > 0, jnp.maximum(number, 1), number)
  return Blocks(from_blocks(number.astype(jnp.uint8), where), jnp.squeeze(spread, blocks.ndim + where.axis))


def decode(stored: Blocks, where: Layout, *, signed: bool) -> jax.Array:
  """Return the stored numbers as float32, in the shape of ``in_blocks``. The result is the same to the bit in every program,
  because only one product per number is rounded."""
  number = in_blocks(stored.codes, where).astype(jnp.float32) - (127 if signed else 0)
  # The fraction of a code is the largest of the straight lines of all powers of ten.
  size, share = jnp.abs(number), jnp.zeros(number.shape, jnp.float32)
  for power in range(POWERS):  # each power is a straight line that is the highest one in its own range
    parts, first = _parts(power, signed=signed), _first(power, signed=signed)
    ninths = 18 * (size - first) + 9 + 2 * parts  # an integer, in units of 0.1 / (2 * parts)
    share = jnp.maximum(share, ninths * np.float32(10.0 ** (power - POWERS) / (2 * parts)))
  share = jnp.where(size > 0, jnp.minimum(share, 1), 0)
  return jnp.sign(number) * share * jnp.expand_dims(stored.scale, number.ndim + where.axis)


def _parts(power: int, *, signed: bool) -> int:
  """Number of parts of [0.1, 1] times a power of ten; power 0 is the smallest."""
  return 2**power * (1 if signed else 2)


def _first(power: int, *, signed: bool) -> int:
  """Code of the first fraction of a power of ten; for the power beyond the last, the code of 1."""
  return 2**power if signed else 2 ** (power + 1) - 1


def _between(power: int, *, signed: bool) -> np.float32:
  """The midpoint between the first fraction of a power of ten and the fraction before it, which is 0 or the last one of the
  lower power."""
  unit = 10.0 ** (power - POWERS + 1)
  above = unit * (0.1 + 0.45 / _parts(power, signed=signed)) if power < POWERS else 1.0
  below = unit / 10 * (1 - 0.45 / _parts(power - 1, signed=signed)) if power else 0.0
  return np.float32((above + below) / 2)


def scale_sharding(codes: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
  """Return the sharding of scales of this shape: that of the codes, but replicated along an axis that does not divide evenly
  among its devices."""
  spec = [*codes.spec, *(None,) * (len(shape) - len(codes.spec))]
  uneven = lambda entry, size: size % math.prod(codes.mesh.shape[a] for a in ((entry,) if isinstance(entry, str) else entry))
  return NamedSharding(
    codes.mesh, PartitionSpec(*(None if e and uneven(e, n) else e for e, n in zip(spec, shape, strict=True)))
  )
