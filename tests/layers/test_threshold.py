"""Tests the search for the k-th largest number against a sort."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.threshold import count, largest, rank


@pytest.mark.parametrize("digit", [1, 2, 4])
def test_the_kth_largest_number(digit):
  x = np.random.default_rng(0).normal(size=(3, 37)).astype(np.float32) * np.array([[1e-30], [1], [1e30]], np.float32)
  x[0, :5] = [0.0, -0.0, np.inf, -np.inf, x[0, 9]]
  ranks = rank(jnp.asarray(x))
  for k in (1, 4, 37):
    cut = largest(lambda cut, k=k: count(ranks[:, None] >= cut) >= k, 32, ranks[:, :1], digit=digit)
    want = np.sort(x, axis=1)[:, ::-1][:, k - 1 : k]
    np.testing.assert_array_equal(np.asarray(ranks >= cut), x >= want)


def test_nan_is_the_largest():
  ranks = np.asarray(rank(jnp.asarray([jnp.nan, 1.0, jnp.inf, -jnp.nan])))
  assert ranks[0] == ranks[2] == ranks[3] > ranks[1]
