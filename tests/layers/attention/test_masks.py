"""Tests masks against the rule written as a loop, and a softmax whose rows may have no visible key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maxtext_like.layers.attention.masks import Tokens, attention_mask, masked_fill, masked_softmax

T = 7
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1]])
BLOCKS = np.array([[0, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 2, 2]])


def rule(b, i, j, *, window, segments, images):
  """Return True if query i of row b sees key j, by Gemma 3's rule."""
  sees = j <= i
  if images is not None:
    sees = sees or (images[b, i] == images[b, j] and images[b, i] > 0)
  if window is not None:
    sees = sees and j > i - window
  if segments is not None:
    sees = sees and segments[b, i] == segments[b, j] and segments[b, j] > 0
  return sees


@pytest.mark.parametrize("window", [None, 1, 3, T, T + 5])
@pytest.mark.parametrize("segments", [None, SEGMENTS])
@pytest.mark.parametrize("images", [None, BLOCKS])
def test_every_pair_follows_the_rule(window, segments, images):
  segments_of, images_of = (None if a is None else jnp.asarray(a, jnp.int32) for a in (segments, images))
  tokens = Tokens(segments=segments_of, images=images_of)
  got = attention_mask(tokens, 2, T, window=window, bidirectional_images=True)
  rows = [
    [[rule(b, i, j, window=window, segments=segments, images=images) for j in range(T)] for i in range(T)] for b in range(2)
  ]
  np.testing.assert_array_equal(np.broadcast_to(got, (2, T, T)), np.array(rows))


def test_a_window_holds_that_many_keys_and_the_query_is_one_of_them():
  mask = np.asarray(attention_mask(Tokens(), 1, T, window=3, bidirectional_images=False)[0])
  assert mask.sum(1).tolist() == [1, 2, 3, 3, 3, 3, 3]
  assert mask.diagonal().all()


def test_images_are_causal_in_a_layer_that_does_not_ask_for_them():
  tokens = Tokens(None, jnp.asarray(BLOCKS))
  plain = attention_mask(tokens, 2, T, window=None, bidirectional_images=False)
  np.testing.assert_array_equal(np.broadcast_to(plain, (2, T, T)), np.broadcast_to(np.tril(np.ones((T, T), bool)), (2, T, T)))


def test_an_image_longer_than_the_window_sees_its_future_whole_and_its_past_cut():
  mask = np.asarray(attention_mask(Tokens(None, jnp.asarray(BLOCKS)), 2, T, window=2, bidirectional_images=True))[1]
  assert mask[1].tolist() == [True, True, True, True, True, False, False]
  assert mask[4].tolist() == [False, False, False, True, True, False, False]


def test_padding_sees_nothing_and_is_seen_by_nothing():
  mask = np.asarray(attention_mask(Tokens(jnp.asarray(SEGMENTS)), 2, T, window=None, bidirectional_images=True))[0]
  assert not mask[6].any()
  assert not mask[:, 6].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_fill_is_finite_and_below_every_finite_score(dtype):
  lowest = jnp.finfo(dtype).min
  filled = masked_fill(jnp.asarray([lowest, 0.0, 1.0], dtype), jnp.asarray([True, False, True]))
  assert jnp.isfinite(filled).all()
  assert filled[1] <= filled[0]


SCORES = st.lists(st.floats(-60000, 60000, width=16), min_size=5, max_size=5)
VISIBLE = st.lists(st.booleans(), min_size=5, max_size=5)


@jax.jit
def softmax_and_gradient(scores, mask, cotangent):
  probs, pull = jax.vjp(lambda s: masked_softmax(s, mask), scores)
  return probs, pull(cotangent)[0]


@settings(max_examples=60, deadline=None)
@given(scores=SCORES, visible=VISIBLE, dtype=st.sampled_from(["float32", "bfloat16", "float16"]))
@example(scores=[-50000.0, -60000.0, 0.0, 1.0, 2.0], visible=[True, True, False, False, False], dtype="float16")
def test_softmax_over_the_visible_or_zeros(scores, visible, dtype):
  s, m = jnp.asarray(scores, dtype), np.asarray(visible)
  probs, gradient = softmax_and_gradient(s, jnp.asarray(m), jnp.asarray([1.0, -2.0, 3.0, 0.5, 7.0], dtype))
  assert jnp.isfinite(gradient).all()
  assert (np.asarray(probs)[~m] == 0).all()
  assert (np.asarray(gradient)[~m] == 0).all()
  if not m.any():
    return
  exact = np.asarray(s, np.float64)[m]
  below = exact - exact.max()
  expected = np.exp(below) / np.exp(below).sum()
  # The scores are exact. The difference, the exponential and the sum are rounded, and exp amplifies the error of the
  # difference.
  unit = float(jnp.finfo(dtype).eps)
  tolerance = expected * np.minimum(unit * (4 - below), 1) + unit
  assert (np.abs(np.asarray(probs, np.float64)[m] - expected) <= tolerance).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_gradient_of_the_softmax(dtype):
  """The reference multiplies by the Jacobian, diag(p) - p p^T, in float64. The forward pass may keep only the result of the
  softmax for the backward pass."""
  rng = np.random.default_rng(3)
  scores, g = (jnp.asarray(rng.normal(size=(2, 3, 5)), dtype) for _ in range(2))
  mask = jnp.asarray(rng.random((2, 1, 5)) < 0.7)
  probs, pull = jax.vjp(lambda s: masked_softmax(s, mask), scores)
  p = np.asarray(jnp.where(mask, jnp.exp(scores.astype(jnp.float32)), 0), np.float64)
  p /= p.sum(-1, keepdims=True)
  matrix = p[..., None] * np.eye(5) - p[..., None] * p[..., None, :]
  expected = np.einsum("...ij,...j->...i", matrix, np.asarray(g, np.float64))
  np.testing.assert_allclose(np.asarray(pull(g)[0], np.float64), expected, atol=8 * float(jnp.finfo(dtype).eps))
  assert [(x.shape, x.dtype) for x in jax.tree.leaves(pull)] == [(probs.shape, probs.dtype)]


def test_the_gradient_of_float16_scores_is_finite_wherever_its_terms_are():
  """The difference of two cotangents may exceed float16. A cotangent at a masked key, which may be infinite, has no effect."""
  for mask, g, expected in [
    ([True] * 8, [4e4] + [-4e4] * 7, [8750.0] + [-1250.0] * 7),
    ([True, True] + [False] * 6, [1.0, 2.0] + [jnp.inf] * 6, [-0.25, 0.25] + [0.0] * 6),
    ([False] * 8, [jnp.inf] * 8, [0.0] * 8),
  ]:
    _, pull = jax.vjp(functools.partial(masked_softmax, mask=jnp.asarray(mask)), jnp.zeros(8, jnp.float16))
    np.testing.assert_allclose(pull(jnp.asarray(g, jnp.float16))[0], expected, rtol=1e-3)


def test_a_row_of_nothing_passes_no_nan_to_its_neighbors():
  def loss(scores):
    return jnp.sum(masked_softmax(scores, jnp.asarray([[True, False], [False, False]])) ** 2)

  gradient = jax.grad(loss)(jnp.asarray([[1e30, 3e38], [3e38, -3e38]]))
  np.testing.assert_array_equal(gradient, np.zeros((2, 2)))
