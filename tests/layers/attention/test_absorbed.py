"""Tests that the absorbed form of latent attention equals attention over expanded heads."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention.absorbed import absorbed
from maxtext_like.layers.precision import Precision

B, T, S, N, C, P, Q, V = 2, 3, 7, 5, 11, 4, 6, 8


@pytest.mark.parametrize("own", [False, True])
def test_against_expanded_heads(own):
  draw = np.random.default_rng(1).normal
  kv_b, q = draw(size=(C, N, Q + V)), draw(size=(B, T, N, Q + P))
  k = draw(size=(B, T, S, C + P) if own else (B, S, C + P))
  mask = np.random.default_rng(2).random((B, T, S)) < 0.6
  each = k if own else np.broadcast_to(k[:, None], (B, T, S, C + P))
  # Every query has its own keys and values, expanded for every head.
  heads = np.einsum("btsc,cnh->btsnh", each[..., :C], kv_b)
  scores = np.einsum("btnq,btsnq->bnts", q[..., :Q], heads[..., :Q]) + np.einsum("btnp,btsp->bnts", q[..., Q:], each[..., C:])
  weights = np.where(mask[:, None], np.exp(0.3 * scores), 0)
  probs = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
  want = np.einsum("bnts,btsnv->btnv", probs, heads[..., Q:])
  kv_b, q, k = (jnp.asarray(x, jnp.float32) for x in (kv_b, q, k))
  precision = Precision(dtype="float32", matmul_precision="highest")
  got, of_scores = absorbed(kv_b, q, k, jnp.asarray(mask), scale=0.3, precision=precision)
  np.testing.assert_allclose(of_scores, probs, atol=2e-5)
  np.testing.assert_allclose(got, want, atol=2e-4)
