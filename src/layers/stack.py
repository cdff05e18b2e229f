"""``Stack``: groups the layers of a model into runs of equal rows, so that ``lax.scan`` can run each of them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from maxtext_like.layers.block import Block
from maxtext_like.layers.param import stack


@dataclass(frozen=True)
class Stack:
  """``repeats`` equal rows of a few layers each. ``first`` is the index of its first layer in the model."""

  name: str
  first: int
  layers: tuple[Block, ...]
  repeats: int

  def params(self) -> dict:
    return stack({f"layer_{j}": layer.params() for j, layer in enumerate(self.layers)}, self.repeats)

  def split(self, layers: Sequence[Block]) -> list[tuple[int, tuple[Block, ...]]]:
    """Split the stack where the precision of its layers changes. Return (number of rows, layers of a row) for each part.

    Args:
      layers: all layers of the model, with their own precisions.
    """
    period = len(self.layers)
    rows = [tuple(layers[self.first + r * period : self.first + (r + 1) * period]) for r in range(self.repeats)]
    return [(len(list(same)), row) for row, same in itertools.groupby(rows)]


def find_stacks(layers: Sequence[Block]) -> tuple[Stack, ...]:
  """Divide a list of layers into stacks of a repeating row.

  Each step, from the left, chooses the row whose repetition covers most layers, and the shortest of equal choices. Gemma's 5
  local and 1 global layer are one row of 6. DeepSeek's dense layers and its MoE layers are two stacks with rows of one layer.
  """
  stacks, at = [], 0
  while at < len(layers):
    best, repeats = 1, 1
    # Try every length of a row, and count how often it repeats from here.
    for period in range(1, (len(layers) - at) // 2 + 1):
      row, n = layers[at : at + period], 1
      while layers[at + n * period : at + (n + 1) * period] == row:
        n += 1
      if n > 1 and n * period > best * repeats:
        best, repeats = period, n
    stacks.append(Stack(f"stack_{len(stacks)}", at, tuple(layers[at : at + best]), repeats))
    at += best * repeats
  return tuple(stacks)
