"""How layers become stacks."""

from typing import Any

import numpy as np
import pytest

from maxtext_like.layers.stack import find_stacks


def shape(pattern):
  """[(layers in the block, repeats)] of a pattern with one letter for each kind of layer."""
  letters: Any = tuple(pattern)
  stacks: Any = find_stacks(letters)
  assert [s.name for s in stacks] == [f"stack_{i}" for i in range(len(stacks))]
  # Unrolled, the stacks are the pattern again.
  assert "".join("".join(s.layers) * s.repeats for s in stacks) == pattern
  assert [s.first for s in stacks] == np.cumsum([0] + [len(s.layers) * s.repeats for s in stacks])[:-1].tolist()
  return [(len(s.layers), s.repeats) for s in stacks]


@pytest.mark.parametrize(
  ("pattern", "expected"),
  [
    (("lllllg" * 6)[:34], [(6, 5), (1, 4)]),  # Gemma 3 4B
    ("lllllg" * 8, [(6, 8)]),  # Gemma 3 12B
    (("lllllg" * 11)[:62], [(6, 10), (1, 2)]),  # Gemma 3 27B
    ("lllllg" * 10, [(6, 10)]),  # Gemma 4 31B
    ("llllg" * 3 + "LLLLG" * 4, [(5, 3), (5, 4)]),  # E2B: the last 20 layers share keys and are twice as wide
    ("lllllg" * 4 + "LLLLLG" * 3, [(6, 4), (6, 3)]),  # E4B
    ("d" * 3 + "m" * 58, [(1, 3), (1, 58)]),  # DeepSeek
    ("d", [(1, 1)]),
    ("ab", [(1, 1), (1, 1)]),
    ("aab", [(1, 2), (1, 1)]),
    ("abab", [(2, 2)]),
    ("aabaab", [(3, 2)]),  # not aa, b, aa, b: the longer cover wins
    ("aaaa", [(1, 4)]),  # of equal covers the shortest block
    ("abcabcab", [(3, 2), (1, 1), (1, 1)]),
  ],
)
def test_stacks(pattern, expected):
  assert shape(pattern) == expected
