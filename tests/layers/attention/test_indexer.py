"""Tests the lightning indexer: it selects exactly k keys, the earlier one of two with equal scores. Also tests its loss and its
precision flag. test_mla.py tests the scores."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import dtypes, equations
from hypothesis import given, settings
from hypothesis import strategies as st
from written_out import causal

from maxtext_like.layers.attention.indexer import Indexer, IndexerConfig, divergence, index_distribution, indexer_loss
from maxtext_like.layers.attention.rope import RopeConfig
from maxtext_like.layers.precision import Precision

T, D, R, HEADS, DIM = 6, 11, 5, 3, 7
ROPE = RopeConfig(dim=4, theta=100.0)


def indexer(topk, dtype: Any = "float32", indexer_float32_logits=True):
  cfg = IndexerConfig(emb_dim=D, q_lora_rank=R, num_heads=HEADS, head_dim=DIM, topk=topk, rope=ROPE)
  return Indexer(cfg, Precision(dtype=dtype, indexer_float32_logits=indexer_float32_logits))


def both(topk):
  layer = indexer(topk)
  return jax.jit(lambda scores, mask: (layer.select(scores, mask), layer.best(scores, mask)))


SELECT = {topk: both(topk) for topk in (1, 3, T, T + 5)}


@settings(max_examples=40, deadline=None)
@given(
  topk=st.sampled_from(sorted(SELECT)),
  # There are few different values, so most rows contain equal scores. Scores may be negative or exactly zero.
  scores=st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.0, 1.0]), min_size=T * T, max_size=T * T),
  segments=st.lists(st.integers(0, 2), min_size=T, max_size=T),
)
def test_exactly_k_of_the_visible_and_the_earlier_of_equals(topk, scores, segments):
  """Each query selects its ``topk`` visible keys with the highest scores. The earlier of two keys with equal scores is
  preferred."""
  rows = np.array(scores).reshape(1, T, T)
  mask = causal(T, np.array([segments]))
  chosen, indices = SELECT[topk](jnp.asarray(rows, jnp.float32), jnp.asarray(mask))
  for t in range(T):
    visible = np.flatnonzero(mask[0, t])
    best = sorted(visible, key=lambda s, row=rows[0, t]: (-row[s], s))[:topk]
    assert set(np.flatnonzero(chosen[0, t])) == set(best)
  assert indices.shape == (1, T, min(topk, T))
  assert all(len(set(row)) == min(topk, T) for row in indices[0].tolist())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_many_keys_those_that_a_sort_finds(dtype):
  """``select`` chooses the same keys as ``best``, which sorts. Half of the bfloat16 scores are equal to another score of their
  row."""
  layer, shape = indexer(100), (2, 40, 300)
  scores = jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)
  mask = jnp.asarray(np.arange(300) <= np.arange(80, 300, 5.5)[None, :, None])
  chosen, best = (np.asarray(x) for x in both(100)(scores, mask))
  wanted = np.zeros(shape, bool)
  np.put_along_axis(wanted, best, True, -1)
  np.testing.assert_array_equal(chosen, wanted & mask)
  assert chosen.sum(-1).max() == layer.cfg.topk


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_very_low_score_beats_a_masked_key(dtype):
  scores = jnp.full((1, 3, 3), float(jnp.finfo(dtype).min) * 0.9, dtype)
  mask = jnp.asarray([[[False, False, True], [False, True, True], [True, True, True]]])
  chosen, _ = SELECT[1](scores, mask)
  assert chosen[0].tolist() == [[False, False, True], [False, True, False], [True, False, False]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_not_finite_is_chosen_alike_in_both_forms_and_told_by_the_loss(dtype):
  """NaN of both signs is selected first (inf - inf is a negative NaN on x86). -inf of a visible key is selected before a masked
  key."""
  negative = np.copysign(np.nan, -1)
  visible = np.array([1, 1, 0, 1, 1, 0], bool)
  rows = np.array([[1, 2, 9, negative, 3, 9], [1, 2, 9, np.nan, 3, 9], [-np.inf, -np.inf, 9, -np.inf, -np.inf, 9]])
  scores, mask = jnp.asarray(rows, dtype)[None], jnp.asarray(np.broadcast_to(visible, (1, 3, T)))
  chosen, best = SELECT[3](scores, mask)
  wanted = [{1, 3, 4}, {1, 3, 4}, {0, 1, 3}]
  assert [set(np.flatnonzero(row)) for row in chosen[0]] == wanted
  assert [set(row.tolist()) for row in best[0]] == wanted
  assert not jnp.isfinite(divergence(scores, jnp.ones(scores.shape), chosen)).any()


def test_zeros_of_both_signs_are_equal():
  scores = jnp.asarray([[[-0.0, -0.0, -1.0, 0.0, 0.0, 0.0]]])
  chosen, best = SELECT[3](scores, jnp.ones((1, 1, T), bool))
  assert set(np.flatnonzero(chosen[0, 0])) == set(best[0, 0].tolist()) == {0, 1, 3}


def test_selection_has_no_gradient():
  layer = indexer(2)
  scores = jnp.asarray(np.random.default_rng(0).normal(size=(1, T, T)), jnp.float32)

  def kept(s):
    chosen = layer.select(s, jnp.ones((1, T, T), bool))
    return jnp.sum(jnp.where(chosen, 1.0, 0.0))

  assert (jax.grad(kept)(scores) == 0).all()


def written_divergence(scores, probs, mask, real):
  total = 0.0
  for b, t in np.ndindex(scores.shape[:2]):
    seen = np.broadcast_to(mask, scores.shape)[b, t]
    p = np.where(seen, probs[b, t], 0)
    if real[b, t] and p.sum() > 0:
      p = p / p.sum()
      e = np.where(seen, np.exp(scores[b, t] - scores[b, t][seen].max()), 0)
      q = e / e.sum()
      total += sum(p[s] * np.log(p[s] / q[s]) for s in range(len(p)) if p[s] > 0)
  return total / max(real.sum(), 1)


def mean_divergence(scores, probs, mask, real=None):
  return indexer_loss(divergence(scores, probs, mask), real)


def test_loss_and_gradient_against_numpy():
  rng = np.random.default_rng(0)
  scores, probs = rng.normal(size=(2, T, T)), rng.uniform(size=(2, T, T)) * 3
  probs[0, 3, :2] = 0  # a probability of exactly zero
  segments = np.array([[1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 0, 0]])
  mask, real = causal(T, segments), segments > 0
  arrays = [jnp.asarray(a, jnp.float32) for a in (scores, probs)]
  run = jax.jit(jax.value_and_grad(mean_divergence, (0, 1)))
  loss, (gradient, to_probs) = run(*arrays, jnp.asarray(mask), jnp.asarray(real))
  np.testing.assert_allclose(loss, written_divergence(scores, probs, mask, real), rtol=1e-5)
  # d KL(p || softmax(I)) / dI = softmax(I) - p, divided by the number of tokens in the mean.
  target = np.where(mask, probs, 0)
  target = target / np.maximum(target.sum(-1, keepdims=True), 1e-30)
  e = np.where(mask, np.exp(scores), 0)
  expected = np.where(real[..., None], e / np.maximum(e.sum(-1, keepdims=True), 1e-30) - target, 0) / real.sum()
  np.testing.assert_allclose(gradient, expected, atol=1e-6)
  assert (to_probs == 0).all()
  np.testing.assert_allclose(
    jax.jit(index_distribution)(arrays[0], jnp.asarray(mask)), e / np.maximum(e.sum(-1, keepdims=True), 1e-30), atol=1e-6
  )


def test_loss_is_zero_where_both_agree_and_without_tokens():
  rng = np.random.default_rng(0)
  scores = jnp.asarray(rng.normal(size=(1, T, T)), jnp.float32)
  mask = jnp.asarray(causal(T))
  assert mean_divergence(scores, 7 * index_distribution(scores, mask), mask) == pytest.approx(0, abs=1e-6)
  loss, gradient = jax.value_and_grad(mean_divergence)(scores, jnp.ones((1, T, T)), mask & False, jnp.zeros((1, T), bool))
  assert loss == 0
  assert (gradient == 0).all()


@pytest.mark.parametrize("flag", [True, False])
def test_float32_flag_sets_the_dtype_of_product_relu_and_sum(flag, random_params):
  layer = indexer(3, dtype="bfloat16", indexer_float32_logits=flag)
  p = random_params(layer.params())
  x, latent = jnp.ones((1, T, D), jnp.bfloat16), jnp.ones((1, T, R), jnp.bfloat16)
  found = list(equations(layer, p, x, latent, jnp.arange(T)[None]))
  products = [dtypes(e) for e in found if e.primitive.name == "dot_general"]
  wanted = "float32" if flag else "bfloat16"
  # The projections of k and q run in the dtype of activations. The next products are the weights of the heads, q.k, and the sum
  # over heads.
  assert products[:2] == [("bfloat16",) * 3] * 2
  assert products[2] == (wanted,) * 3
  assert products[3] == ("bfloat16", "bfloat16", wanted)
  assert products[4:] == [(wanted,) * 3]
  (relu,) = [dtypes(e)[-1] for e in found if e.primitive.name == "max"]
  assert relu == wanted


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"topk": 0}, "topk=0"),
    ({"head_dim": 2}, "rotary dimension 4 .*head dimension 2"),
    ({"q_lora_rank": 0}, "q_lora_rank=0"),
  ],
)
def test_impossible_sizes_are_refused(change, message):
  good = {"emb_dim": D, "q_lora_rank": R, "num_heads": HEADS, "head_dim": DIM, "topk": 2, "rope": ROPE}
  with pytest.raises(ValueError, match=message):
    IndexerConfig(**good | change)
