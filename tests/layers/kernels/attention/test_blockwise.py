"""Tests attention in tiles of queries: values and gradients equal those of the reference, with every mask and flag."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import named

from maxtext_like.layers.attention.masks import Tokens, attention_mask
from maxtext_like.layers.kernels.attention.blockwise import blockwise_attention
from maxtext_like.layers.kernels.attention.dot_product import dot_product_attention
from maxtext_like.layers.kernels.attention.registry import Case, attend, choose
from maxtext_like.layers.precision import Precision
from tests.tiers import slow

B, T, N, K, H, V = 2, 150, 4, 2, 6, 5
Q, KEYS, VALUES, G = (
  jax.random.normal(jax.random.key(i), (B, T, n, size)) for i, (n, size) in enumerate([(N, H), (K, H), (K, V), (N, V)])
)
AT = np.arange(T)
# Three documents, with padding before and after them. Queries of padding see no keys.
SEGMENTS = jnp.asarray(np.stack([np.where(AT < 7, 0, np.where(AT < 75, 1, 2)), np.where(AT < 140, 3, 0)]), jnp.int32)


# The first row has adjacent images that extend into the second tile, the second row has one that extends into the third tile.
# No image is in two documents.
IMAGES = jnp.asarray(
  np.stack([np.where(AT < 20, 0, np.where(AT < 50, 1, np.where(AT < 74, 2, 0))), np.where(AT < 30, 0, 1)]), jnp.int32
)


def both(precision, segments, window, scale=0.7, tile=64, images=None, soft_cap=None):
  tokens = Tokens(segments, images)
  mask = attention_mask(tokens, B, T, window=window, bidirectional_images=True)

  def reference(q, k, v):
    out = dot_product_attention(q, k, v, mask, scale=scale, precision=precision, soft_cap=soft_cap)[0]
    return jnp.sum(out.astype(jnp.float32) * G), out

  def tiled(q, k, v):
    how: Any = {"window": window, "scale": scale, "precision": precision, "tile": tile, "soft_cap": soft_cap}
    out = blockwise_attention(q, k, v, tokens, **how)
    return jnp.sum(out.astype(jnp.float32) * G), out

  cast = [x.astype(precision.dtype) for x in (Q, KEYS, VALUES)]
  return [jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(*cast) for f in (reference, tiled)]


@pytest.mark.parametrize("window", [slow(None), slow(1), 50], ids=str)
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one document", "packed"])
@pytest.mark.parametrize("images", [None, IMAGES], ids=["text", "images"])
def test_float32_values_and_gradients(images, segments, window):
  ((_, want), want_grads), ((_, got), got_grads) = both(Precision(dtype="float32"), segments, window, images=images)
  np.testing.assert_allclose(got, want, atol=2e-6)
  for a, b in zip(got_grads, want_grads, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  if segments is not None:
    assert not np.any(np.asarray(got)[np.asarray(segments) == 0])


@pytest.mark.parametrize(
  ("dtype", "product", "softmax", "tolerance"),
  [
    ("float32", True, True, 2e-6),
    ("bfloat16", True, True, 1.2e-2),
    ("float16", True, False, 3e-3),
    ("bfloat16", False, True, 1.2e-2),
    ("float16", False, False, 6e-3),
  ],
)
@pytest.mark.slow
def test_values_and_gradients_with_a_soft_cap(dtype, product, softmax, tolerance):
  precision: Any = Precision(dtype=dtype, float32_qk_product=product, float32_logits=softmax)
  ((_, want), want_grads), ((_, got), got_grads) = both(precision, SEGMENTS, 50, images=IMAGES, soft_cap=1.3)
  ((_, other), _), _ = both(precision, SEGMENTS, 50, images=IMAGES)
  assert np.abs(np.float32(other) - np.float32(want)).max() > 0.1
  for a, b in zip((got, *got_grads), (want, *want_grads), strict=True):
    assert a.dtype == dtype
    assert np.linalg.norm(np.float32(a) - np.float32(b)) <= tolerance * np.linalg.norm(np.float32(b))


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 3e-3)])
@pytest.mark.parametrize(("product", "softmax"), [(True, True), slow(False, False)])
def test_low_precision_values_are_the_reference_s_and_gradients_near(dtype, tolerance, product, softmax):
  precision = Precision(dtype=dtype, float32_qk_product=product, float32_logits=softmax)
  ((_, want), want_grads), ((_, got), got_grads) = both(precision, SEGMENTS, 50)
  assert got.dtype == dtype
  np.testing.assert_allclose(np.float32(got), np.float32(want), atol=tolerance / 2)
  for a, b in zip(got_grads, want_grads, strict=True):
    assert a.dtype == dtype
    a, b = np.float32(a), np.float32(b)
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) * (1 if softmax else 4)


@pytest.mark.parametrize(("product", "softmax"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_flags_decide_the_dtypes(product, softmax):
  precision = Precision(dtype="bfloat16", float32_qk_product=product, float32_logits=softmax)
  run = lambda q, k, v: blockwise_attention(q, k, v, Tokens(), window=None, scale=1.0, precision=precision, tile=128)
  equations = named(run, Q, KEYS, VALUES, name="dot_general")
  first = [str(e.outvars[0].aval.dtype) for e in equations][::2]
  assert set(first) == {"float32" if product else "bfloat16"}
  exponentials = {str(e.outvars[0].aval.dtype) for e in named(run, Q, KEYS, VALUES, name="exp")}
  assert exponentials == {"float32" if softmax else "bfloat16"}


def test_extreme_scores_are_finite_forward_and_backward():
  for dtype in ("float32", "float16"):
    (_, _), ((_, got), grads) = both(Precision(dtype=dtype), SEGMENTS, None, scale=3e4 if dtype == "float32" else 3e3)
    assert all(np.isfinite(np.float32(x)).all() for x in (got, *grads))


def test_long_rows_take_this_way_and_short_ones_the_reference():
  def count(length, images=None, window=None):
    x = [jnp.zeros((1, length, 1, 4))] * 3
    case = Case(
      platform="cpu", precision=Precision(dtype="float32"), query_heads=1, kv_heads=1, head_dim=4, value_dim=4, length=length,
      bidirectional_images=images is not None,
    )  # fmt: skip
    run = lambda q, k, v: attend(
      choose("auto", case).name, q, k, v, Tokens(None, images), window=window, bidirectional_images=images is not None,
      scale=1.0, precision=Precision(dtype="float32"),
    )  # fmt: skip
    # einsum chooses the order of the dimensions. A head has 4 numbers, so the two largest dimensions are queries and keys.
    return [tuple(sorted(e.outvars[0].aval.shape)[-2:]) for e in named(run, *x, name="dot_general")][::2]

  assert count(512) == [(512, 512)]
  assert count(1100) == [(512, 512), (512, 1024), (76, 1100)]
  assert count(1100, window=130) == [(512, 512), (512, 768), (76, 332)]
  images = jnp.zeros((1, 1100), jnp.int32)
  assert count(512, images[:, :512]) == [(512, 512)]
  assert count(1100, images) == [(512, 1100), (512, 1100), (76, 1100)]
  assert count(1100, images, window=130) == [(512, 1100), (512, 844), (76, 332)]


@pytest.mark.slow
def test_cotangents_whose_difference_leaves_float16():
  """The scores are 16-bit. The cotangent of one key is 4e4 and that of the others -4e4. Each fits float16, but their difference
  does not, and the gradient must still be finite and correct."""
  precision = Precision(dtype="float16", float32_logits=False)
  t, sign = 8, np.where(np.arange(8) == 0, 1, -1)
  v = jnp.asarray(np.broadcast_to(sign[None, :, None, None], (1, t, 1, 1)), jnp.float16)
  q, k = jnp.zeros((1, t, 1, 2), jnp.float16), jnp.ones((1, t, 1, 2), jnp.float16).at[0, 0].set(2)

  def out(q):
    return blockwise_attention(q, k, v, Tokens(), window=None, scale=1.0, precision=precision, tile=4)

  (dq,) = jax.vjp(out, q)[1](jnp.full((1, t, 1, 1), 4e4, jnp.float16))
  # A query sees n keys, and each has the probability p = 1 / n. The gradient of the first score is p * 8e4 * (1 - p), and so is
  # that of q.
  n = np.arange(1, t + 1)
  expected = 8e4 * (1 - 1 / n) / n
  np.testing.assert_allclose(np.asarray(dq, np.float64)[0, :, 0, 0], expected, rtol=4e-3)
