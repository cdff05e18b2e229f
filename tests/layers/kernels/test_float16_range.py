"""Tests the powers of two that scale rows and groups into the range of float16. Scaling rows is exact in both directions.
Scaling a group loses only values that are too small to change a float32 sum."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.layers.kernels.float16_range import by_group, by_row, power_of_two


def rows(seed, exponents):
  """Return float32 rows: numbers that float16 represents, times 2^exponent of the row."""
  x = np.random.default_rng(seed).normal(size=(len(exponents), 7)).astype(np.float16).astype(np.float32)
  return np.ldexp(x, np.asarray(exponents)[:, None])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-100, 100), min_size=5, max_size=5), st.integers(0, 99))
def test_rows_come_back_to_the_bit(exponents, seed):
  x = rows(seed, exponents)
  small, unit = by_row(jnp.asarray(x), "float16")
  assert (small.dtype, unit.shape) == (jnp.float16, (5, 1))
  assert np.isfinite(small).all()
  np.testing.assert_array_equal(np.asarray(small, np.float32) * np.asarray(unit), x)
  assert (np.frexp(np.asarray(unit))[0] == 0.5).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-100, 100), min_size=6, max_size=6), st.lists(st.integers(0, 3), min_size=2, max_size=2))
def test_a_group_has_one_unit_and_keeps_what_counts(exponents, sizes):
  x = rows(3, exponents)
  small, unit = by_group(jnp.asarray(x), jnp.asarray(sizes, jnp.int32), "float16")
  assert unit.shape == (2,)
  for i, end in enumerate(np.cumsum(sizes)):
    own = slice(end - sizes[i], end)
    found = np.asarray(small, np.float64)[own] * float(unit[i])
    error = np.abs(found - x[own]).max(initial=0)
    assert error <= 2.0**-38 * np.abs(x[own]).max(initial=0)


def test_what_is_not_finite_stays_where_it_is():
  x = rows(0, [90, -90, 0]).copy()
  x[0, 1], x[1, 2], x[2] = np.inf, np.nan, 0
  for small, unit in (by_row(jnp.asarray(x), "float16"), by_group(jnp.asarray(x), jnp.asarray([1, 1, 1]), "float16")):
    back = np.asarray(small, np.float32) * np.asarray(unit).reshape(3, 1)
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize(("of", "to"), [("float32", "bfloat16"), ("float16", "float16")])
def test_what_has_the_range_is_not_scaled(of, to):
  x = jnp.asarray(rows(0, [3, 0, 1]), of)
  for small, unit in (by_row(x, to), by_group(x, jnp.asarray([2, 0]), to)):
    np.testing.assert_array_equal(np.asarray(small, np.float32), np.asarray(x.astype(to), np.float32))
    assert (np.asarray(unit) == 1).all()


@given(st.floats(2.0**-120, 2.0**120, width=32))
def test_a_power_of_two_is_one_to_the_bit(x):
  mantissa, exponent = np.frexp(np.asarray(power_of_two(jnp.float32(x))))
  assert mantissa == 0.5
  assert abs(exponent - np.frexp(np.float32(x))[1]) <= 1  # the logarithm is rounded
