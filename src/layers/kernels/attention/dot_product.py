"""Scaled dot-product attention in plain XLA with all scores in memory: the reference for all kernels.

B batch, T query, S key, N query heads, K key-value heads, G = N / K queries per key-value head, H head, V value head.
"""

import jax

from maxtext_like.layers.attention.masks import Keys, Tokens, attention_mask, masked_softmax, softmax_scores
from maxtext_like.layers.kernels.attention.registry import AttentionKernel
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.sharding_rules import Rules


def dot_product_attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKV: jax.Array,
  mask_BTS: jax.Array,
  *,
  scale: float,
  precision: Precision,
  soft_cap: float | None = None,
  cached: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Attention with all scores in memory. It follows ``float32_qk_product`` and ``float32_logits``.

  Args:
    q_BTNH, k_BSKH, v_BSKV: queries, keys, values; query head n reads key-value head n // (N / K).
    mask_BTS: bool, [B or 1, T, S]; a query that sees no key gets zeros.
    scale: factor on the scores.
    precision: selects the dtypes.
    soft_cap: soft cap of the scaled, unmasked scores; None: no cap.
    cached: keys and values have the axes of a cache, [B, K, S, H] and [B, K, S, V].

  Returns:
    The attention output [B, T, N, V] in ``dtype``, and the probabilities [B, K, G, T, S] (float32 with float32_logits).
  """
  B, T, N, H = q_BTNH.shape
  K = k_BSKH.shape[1 if cached else 2]
  keys, values = ("BKSH", "BKSV") if cached else ("BSKH", "BSKV")
  # Group the query heads by the key-value head that they read.
  q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
  with jax.named_scope("qk_product"):
    scores = precision.einsum(f"BTKGH,{keys}->BKGTS", q_BTKGH, k_BSKH, out=precision.qk_dtype) * scale
  scores = softmax_scores(scores, precision, soft_cap)
  with jax.named_scope("softmax"):
    probs_BKGTS = masked_softmax(scores, mask_BTS[:, None, None])
  with jax.named_scope("pv_product"):
    out_BTKGV = precision.einsum(f"BKGTS,{values}->BTKGV", probs_BKGTS, v_BSKV)
  return out_BTKGV.reshape(B, T, N, -1), probs_BKGTS


def _run(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKV: jax.Array,
  tokens: Tokens,
  *,
  window: int | None,
  bidirectional_images: bool,
  scale: float,
  precision: Precision,
  rules: Rules,
  keys: Keys | None = None,
  causal: bool = True,
  soft_cap: float | None = None,
) -> jax.Array:
  del rules  # the partitioner splits all of these operations
  among = None if keys is None else (k_BSKH.shape[1], keys)
  seen = {"window": window, "bidirectional_images": bidirectional_images, "among": among, "causal": causal}
  mask = attention_mask(tokens, *q_BTNH.shape[:2], **seen)
  return dot_product_attention(q_BTNH, k_BSKH, v_BSKV, mask, scale=scale, precision=precision, soft_cap=soft_cap)[0]


KERNEL = AttentionKernel(name="dot_product", refuses=lambda case: [], run=_run)
