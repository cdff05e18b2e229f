"""Tests plain attention against float64, one head at a time, and the effect of the float32 flags."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import dtypes, equations
from written_out import attention, causal

from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.kernels.attention.dot_product import dot_product_attention
from maxtext_like.layers.kernels.attention.registry import attend
from maxtext_like.layers.precision import Precision

RNG = np.random.default_rng(0)
B, T, N, K, H, V = 2, 5, 6, 2, 4, 3
Q, KEYS, VALUES = (RNG.normal(size=s) for s in [(B, T, N, H), (B, T, K, H), (B, T, K, V)])
SEGMENTS = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]])


def arrays(dtype) -> tuple[Any, Any, Any]:
  return jnp.asarray(Q, dtype), jnp.asarray(KEYS, dtype), jnp.asarray(VALUES, dtype)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("segments", [None, SEGMENTS])
@pytest.mark.parametrize("soft_cap", [None, 0.4])
def test_against_float64(window, segments, soft_cap):
  mask = causal(T, segments, window)
  expected, probs = attention(Q, KEYS, VALUES, mask, 0.3, soft_cap)
  out, got_probs = dot_product_attention(
    *arrays("float32"), jnp.asarray(mask), scale=0.3, precision=Precision(dtype="float32"), soft_cap=soft_cap
  )
  np.testing.assert_allclose(out, expected, atol=2e-6)
  np.testing.assert_allclose(got_probs.reshape(B, N, T, T), probs, atol=2e-6)
  tokens = Tokens(None if segments is None else jnp.asarray(segments))
  whole = attend(
    "dot_product",
    *arrays("float32"),
    tokens,
    window=window,
    bidirectional_images=False,
    scale=0.3,
    precision=Precision(dtype="float32"),
    soft_cap=soft_cap,
  )
  np.testing.assert_allclose(whole, expected, atol=2e-6)


@pytest.mark.parametrize("kernel", ["dot_product", "blockwise"])
def test_gradients_with_a_soft_cap_are_those_of_differences_in_float64(kernel):
  """Compare the derivative of a weighted sum of the outputs along one direction of q, k and v together."""
  weights, mask = RNG.normal(size=(B, T, N, V)), causal(T, SEGMENTS, 3)
  directions = [RNG.normal(size=x.shape) for x in (Q, KEYS, VALUES)]

  def total(step):
    q, k, v = (x + step * d for x, d in zip((Q, KEYS, VALUES), directions, strict=True))
    return np.sum(attention(q, k, v, mask, 0.9, 1.5)[0] * weights)

  @jax.jit
  def loss(q, k, v):
    out = attend(
      kernel, q, k, v, Tokens(jnp.asarray(SEGMENTS)), window=3, bidirectional_images=False, scale=0.9,
      precision=Precision(dtype="float32"), soft_cap=1.5,
    )  # fmt: skip
    return jnp.sum(out * weights)

  gradients = jax.grad(loss, (0, 1, 2))(*arrays("float32"))
  along = sum(np.sum(np.float64(g) * d) for g, d in zip(gradients, directions, strict=True))
  assert along == pytest.approx((total(1e-4) - total(-1e-4)) / 2e-4, rel=1e-5)


def test_query_heads_read_their_key_value_head_in_blocks():
  """A change of key-value head 1 changes query heads 3, 4 and 5 of 6, and no other."""
  q, k, v = arrays("float32")
  mask = jnp.asarray(causal(T))

  @jax.jit
  def run(v):
    return dot_product_attention(q, k, v, mask, scale=1.0, precision=Precision(dtype="float32"))[0]

  changed = np.asarray(jnp.abs(run(v.at[:, :, 1].add(1.0)) - run(v)).max((0, 1, 3)) > 0.1)
  assert changed.tolist() == [False] * 3 + [True] * 3


def test_padding_gets_zeros_and_a_finite_gradient():
  mask = jnp.asarray(causal(T, SEGMENTS))

  @jax.jit
  def run(q, k, v):
    out = dot_product_attention(q, k, v, mask, scale=1.0, precision=Precision(dtype="float32"))[0]
    return jnp.sum(out**2), out

  gradients, out = jax.grad(run, (0, 1, 2), has_aux=True)(*arrays("float32"))
  assert (out[0, 4] == 0).all()
  for g in gradients:
    assert jnp.isfinite(g).all()
    assert (g[0, 4] == 0).all()


@pytest.mark.parametrize("qk", [True, False])
@pytest.mark.parametrize("logits", [True, False])
def test_each_flag_sets_its_own_dtype(qk, logits):
  precision = Precision(dtype="bfloat16", float32_qk_product=qk, float32_logits=logits)
  mask = jnp.asarray(causal(T))
  found = list(
    equations(lambda q, k, v: dot_product_attention(q, k, v, mask, scale=0.3, precision=precision), *arrays("bfloat16"))
  )
  products = [dtypes(e) for e in found if e.primitive.name == "dot_general"]
  (exponential,) = [dtypes(e) for e in found if e.primitive.name == "exp"]
  assert products[0] == ("bfloat16", "bfloat16", "float32" if qk else "bfloat16")
  assert exponential[0] == ("float32" if logits else "bfloat16")
  assert products[1] == ("bfloat16",) * 3


@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_float32_flags_bring_bfloat16_near_the_truth(head_dim):
  """Gemma 4 multiplies scores by 1. bfloat16 rounds a score near 60 by up to 0.125, which changes its exponential by 13 %."""
  rng = np.random.default_rng(head_dim)
  q, k, v = (np.asarray(jnp.asarray(rng.normal(size=(1, 33, 2, head_dim)), jnp.bfloat16), np.float64) for _ in range(3))
  mask = causal(33)
  q *= 2
  _, truth = attention(q, k, v, mask, 1.0)

  def error(**flags):
    precision = Precision(dtype="bfloat16", **flags)
    low = [jnp.asarray(a, jnp.bfloat16) for a in (q, k, v)]
    probs = dot_product_attention(low[0], low[1], low[2], jnp.asarray(mask), scale=1.0, precision=precision)[1]
    return np.abs(np.asarray(probs, np.float64).reshape(truth.shape) - truth).max()

  both, only_logits, neither = error(), error(float32_qk_product=False), error(float32_qk_product=False, float32_logits=False)
  assert both < 1e-4
  assert only_logits > 100 * both
  assert neither > 100 * both
