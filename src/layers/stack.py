"""Stacks: how the layers of a model become runs of equal rows, each of which ``lax.scan`` can run."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from maxtext_like.layers.block import Block
from maxtext_like.layers.param import stack


@dataclass(frozen=True)
class Stack:
  """``repeats`` equal rows of a few layers each, the first of which is the model's layer ``first``."""

  name: str
  first: int
  layers: tuple[Block, ...]
  repeats: int

  def params(self) -> dict:
    return stack({f"layer_{j}": layer.params() for j, layer in enumerate(self.layers)}, self.repeats)

  def split(self, layers: Sequence[Block]) -> list[tuple[int, tuple[Block, ...]]]:
    """The stack cut where the precision of its layers changes: (rows, their layers) for each run of equal rows.

    Args:
      layers: all layers of the model, with their own precisions.
    """
    period = len(self.layers)
    rows = [tuple(layers[self.first + r * period : self.first + (r + 1) * period]) for r in range(self.repeats)]
    return [(len(list(same)), row) for row, same in itertools.groupby(rows)]


def find_stacks(layers: Sequence[Block]) -> tuple[Stack, ...]:
  """Cuts a list of layers into stacks of a repeating row.

  From the left, each cut takes the row whose repetition covers most layers, and of those the shortest: Gemma's 5 local
  and 1 global layer are one row of 6, DeepSeek's dense layers and its MoE layers are two stacks of single layers.
  """
  stacks, at = [], 0
  while at < len(layers):
    best, repeats = 1, 1
    for period in range(1, (len(layers) - at) // 2 + 1):
      row, n = layers[at : at + period], 1
      while layers[at + n * period : at + (n + 1) * period] == row:
        n += 1
      if n > 1 and n * period > best * repeats:
        best, repeats = period, n
    stacks.append(Stack(f"stack_{len(stacks)}", at, tuple(layers[at : at + best]), repeats))
    at += best * repeats
  return tuple(stacks)
