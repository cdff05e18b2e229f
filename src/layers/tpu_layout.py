"""How a TPU lays an array in memory: its two minor axes in tiles of 8 x 128 numbers, which are filled up at the edges.

A program's arguments lie in the order of axes that fills up least, which need not be the order in which they are declared; what
a kernel reads or a loop gathers lies as it asks. docs/results/tpu.md says what follows from it.
"""

import math

ROWS, LANES = 8, 128


def order(shape: tuple[int, ...]) -> tuple[int, ...]:
  """The axes of an argument from major to minor: least is filled up, and of orders alike it is the nearest to the declared."""
  if len(shape) < 2:
    return tuple(range(len(shape)))
  axes = range(len(shape) - 1, -1, -1)
  pairs = [(second, minor) for minor in axes for second in axes if second != minor]
  best = min(pairs, key=lambda pair: _taken(shape, *pair))  # the first of those alike
  return (*(axis for axis in range(len(shape)) if axis not in best), *best)


def numbers(shape: tuple[int, ...]) -> int:
  """How many numbers an argument takes the place of, in its own order."""
  return _taken(shape, *order(shape)[-2:]) if len(shape) > 1 else math.prod(shape)


def as_declared(shape: tuple[int, ...]) -> int:
  """The same of an array of two axes or more that lies in the declared order."""
  return _taken(shape, len(shape) - 2, len(shape) - 1)


def _taken(shape: tuple[int, ...], second: int, minor: int) -> int:
  # Of fewer than eight rows a tile has two or four.
  rows = min(ROWS, 1 << (shape[second] - 1).bit_length())
  whole = filled(shape[second], rows) * filled(shape[minor], LANES)
  return whole * math.prod(n for axis, n in enumerate(shape) if axis not in (second, minor))


def filled(size: int, tile: int = ROWS) -> int:
  """A size filled up to whole tiles."""
  return -(-size // tile) * tile
