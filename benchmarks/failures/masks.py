"""Attention masks that are added instead of combined, and queries that see no key.

B batch, T query, S key, N heads, H head.
"""

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import Tokens, attention_mask
from maxtext_like.layers.kernels.attention.dot_product import dot_product_attention
from maxtext_like.layers.precision import Precision

from .row import Row, finite_share, normal

B, T, N, H = 1, 6, 2, 8
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # MaxText's DEFAULT_MASK_VALUE


def _inputs():
  return (jnp.asarray(normal(seed, B, T, N, H)) for seed in range(3))


@jax.jit
def plain_attention(q, k, v, bias):
  """Computes softmax(q.k + bias) v, with the mask as numbers that are added to the scores."""
  scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) + bias
  return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores, axis=-1), v)


@jax.jit
def ours(q, k, v, segments):
  """Computes the project's own attention. Segment 0 is padding."""
  mask = attention_mask(Tokens(segments), B, T, window=None, bidirectional_images=False)
  return dot_product_attention(q, k, v, mask, scale=1.0, precision=Precision(dtype="float32"))[0]


def _padding():
  """Returns segments whose first two tokens are padding, and two masks as numbers: causal, and of padded keys."""
  segments = jnp.array([[0, 0, 1, 1, 1, 1]])
  causal = jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0.0, MASKED)
  padding = jnp.where(segments[:, None, None, :] > 0, 0.0, MASKED)
  return segments, causal, padding


def double_masks() -> Row:
  """-0.7 * max added twice is -inf, and the softmax of a row of -inf is NaN. Three added masks do this to a padded query."""
  q, k, v = _inputs()
  segments, causal, padding = _padding()
  # Causal, padded keys, padded queries: every key of a padded query is masked at least twice.
  both = causal[None, None] + padding + jnp.where(segments[:, None, :, None] > 0, 0.0, MASKED)
  theirs = plain_attention(q, k, v, both)
  mine = ours(q, k, v, segments)
  grads = jax.grad(lambda q: jnp.sum(ours(q, k, v, segments)))(q)
  numbers = {
    "sum": float(jnp.float32(MASKED) + jnp.float32(MASKED)),
    "their_nan": float(jnp.mean(jnp.isnan(theirs))),
    "our_finite": min(finite_share(mine), finite_share(grads)),
  }
  return Row(
    "masks of -0.7 * max added up (MaxText's constant)",
    f"{MASKED:.3g} twice is {numbers['sum']}; {numbers['their_nan']:.0%} of the output NaN",
    "masks are booleans: output and gradient finite",
    numbers,
  )


def fully_masked_row() -> Row:
  """With added masks, a query that sees no key returns the mean of all values, including future ones, instead of 0."""
  q, k, v = _inputs()
  segments, causal, padding = _padding()
  lowest = float(jnp.finfo(jnp.float32).min)
  bias = jnp.where((causal[None, None] < 0) | (padding < 0), lowest, 0.0)
  theirs = plain_attention(q, k, v, bias)[:, 0]
  mine = ours(q, k, v, segments)[:, 0]
  leak = float(jnp.max(jnp.abs(theirs - jnp.mean(v, axis=1))))
  infinite = plain_attention(q, k, v, jnp.where(bias < 0, -jnp.inf, 0.0))[:, 0]
  numbers = {
    "uniform_over_all": leak,
    "infinite_nan": float(jnp.mean(jnp.isnan(infinite))),
    "our_largest": float(jnp.max(jnp.abs(mine))),
  }
  return Row(
    "a query that sees no key",
    f"finfo.min: mean of all {T} values, future ones too; -inf: {numbers['infinite_nan']:.0%} NaN",
    "zeros, and zero gradients",
    numbers,
  )


ROWS = (double_masks, fully_masked_row)
