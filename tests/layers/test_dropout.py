"""Tests dropout: the share of dropped values, masks that must be equal, and masks that must be independent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.dropout import Dropout, folded, row_keys


def kept(keys, shape=(4, 30, 50), rate=0.3) -> np.ndarray:
  return np.asarray(jax.jit(lambda keys: Dropout(keys, rate)(jnp.ones(shape)))(keys) == 1)


def keys(seed=0, step=0, array=1, layer=2, rows=4) -> jax.Array:
  made = lambda step: folded(folded(row_keys(seed, step, rows), jnp.array(array)), jnp.arange(layer + 1))[layer]
  return jax.jit(made)(step)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_as_many_zeros_as_were_asked_for(rate):
  found = kept(keys(), (4, 100, 250), rate)
  assert abs(found.mean() - (1 - rate)) < 4 * (rate * (1 - rate) / found.size) ** 0.5
  spread = np.sqrt(rate * (1 - rate) / (found[0, 0].size * 4))
  assert np.abs(found.mean(axis=(0, 2)) - (1 - rate)).max() < 5 * spread  # all positions of a row have the same rate


def test_every_row_step_seed_array_and_layer_has_its_own_and_so_has_every_place():
  """Masks of different rows, steps, seeds, arrays and layers are uncorrelated. A mask is also uncorrelated with shifted copies
  of itself."""
  found = [kept(keys(**other)).reshape(4, -1) for other in ({}, {"step": 1}, {"seed": 1}, {"array": 2}, {"layer": 1})]
  rows = np.concatenate([*found, np.roll(found[0], 1, axis=1), np.roll(found[0], 50, axis=1)]).astype(float)
  alike = np.corrcoef(rows)
  np.fill_diagonal(alike, 0)
  assert np.abs(alike).max() < 5 / rows.shape[1] ** 0.5


def test_a_row_has_its_mask_wherever_it_is():
  """The mask of a row depends only on its key, and not on the other rows of the batch."""
  whole = kept(keys())
  np.testing.assert_array_equal(kept(keys()[2:], (2, 30, 50)), whole[2:])
  np.testing.assert_array_equal(kept(keys()[::2], (2, 30, 50)), whole[::2])
  np.testing.assert_array_equal(kept(keys(), (120, 50)), whole.reshape(120, 50))  # rows and positions are one axis


def test_what_is_left_is_as_it_was_and_its_gradient_too():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 30, 50)), jnp.bfloat16)
  drop = Dropout(keys(), 0.3)
  mask = kept(keys())
  np.testing.assert_array_equal(drop(x), jnp.where(mask, x, 0))
  grad = jax.grad(lambda x: jnp.sum(drop(x).astype(jnp.float32) * 3))(x)
  np.testing.assert_array_equal(grad, np.where(mask, 3, 0))


def test_entries_of_nobody_are_refused():
  """The leading dimension must be a multiple of the number of rows with keys."""
  with pytest.raises(ValueError, match=r"7 entries .*4 rows"):
    Dropout(keys(), 0.3)(jnp.ones((7, 5)))
