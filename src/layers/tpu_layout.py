"""The memory layout of arrays on TPUs: the two minor axes are stored in tiles of 8 x 128 elements, padded at the edges.

The arguments of a program use the order of axes that needs least padding, which may differ from the declared order. Kernels and
loops that gather need specific orders. docs/results/history.md has the effect on memory.
"""

import math

ROWS, LANES = 8, 128


def order(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Return the axes of an argument from major to minor: the order with least padding, or of equal ones the nearest to the
  declared order."""
  if len(shape) < 2:
    return tuple(range(len(shape)))
  # Try all pairs of minor axes, starting with the declared order.
  axes = range(len(shape) - 1, -1, -1)
  pairs = [(second, minor) for minor in axes for second in axes if second != minor]
  best = min(pairs, key=lambda pair: _taken(shape, *pair))  # min returns the first of equal pairs
  return (*(axis for axis in range(len(shape)) if axis not in best), *best)


def numbers(shape: tuple[int, ...]) -> int:
  """Return the number of elements, with padding, that an argument occupies in its own order."""
  return _taken(shape, *order(shape)[-2:]) if len(shape) > 1 else math.prod(shape)


def as_declared(shape: tuple[int, ...]) -> int:
  """Return the same for an array with at least two axes in the declared order."""
  return _taken(shape, len(shape) - 2, len(shape) - 1)


def _taken(shape: tuple[int, ...], second: int, minor: int) -> int:
  # A tile has two or four rows if there are fewer than eight.
  rows = min(ROWS, 1 << (shape[second] - 1).bit_length())
  whole = filled(shape[second], rows) * filled(shape[minor], LANES)
  return whole * math.prod(n for axis, n in enumerate(shape) if axis not in (second, minor))


def filled(size: int, tile: int = ROWS) -> int:
  """Round a size up to a multiple of the tile size."""
  return -(-size // tile) * tile
