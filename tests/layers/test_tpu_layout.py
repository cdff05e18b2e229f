"""Tests the order in which libtpu lays out the arguments of a program, and the memory that their tiles take."""

import math

import pytest

from maxtext_like.layers.tpu_layout import numbers, order

# Entry layouts of compiled programs, minor axis first (libtpu 0.0.42; gemma4-26b, gemma4-31b, gemma3-27b, DeepSeek).
LAID_OUT = {
  (5, 88, 2112): (2, 1, 0),
  (5, 2112, 88): (1, 2, 0),
  (5, 128, 88, 704): (1, 3, 2, 0),
  (5, 128, 704, 88): (1, 3, 2, 0),
  (5, 16, 256, 88): (2, 3, 1, 0),
  (10, 32, 256, 84): (2, 1, 3, 0),
  (10, 84, 4, 512): (3, 2, 1, 0),
  (262144, 84): (0, 1),
  (2, 21, 21504): (2, 0, 1),
  (2, 21504, 21): (1, 0, 2),
  (58, 8, 896, 2048): (3, 2, 1, 0),
  (58, 28, 2048): (2, 0, 1),
  (3, 28, 18432): (2, 1, 0),
  (58, 6, 128, 192): (2, 3, 1, 0),
  (58, 2048, 28): (1, 0, 2),
  (28, 129280): (1, 0),
}


@pytest.mark.parametrize("shape", LAID_OUT)
def test_the_order_that_fills_up_least(shape):
  assert order(shape) == LAID_OUT[shape][::-1]


def test_numbers_are_those_of_whole_tiles():
  assert numbers((5, 128, 88, 704)) == 5 * 128 * 88 * 704  # in the order that libtpu chooses, this array needs no padding
  assert numbers((10, 84, 21504)) == 10 * 88 * 21504
  assert numbers((2, 21, 21504)) == 2 * 21 * 21504  # tiles with two rows
  assert numbers((3, 192)) == 4 * 256
  for shape in ((), (7,)):
    assert numbers(shape) == math.prod(shape)
    assert order(shape) == tuple(range(len(shape)))
