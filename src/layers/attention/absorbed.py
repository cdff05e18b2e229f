"""Attention over the latents of MLA without expanding them to heads: the absorbed form (DeepSeek-V2, section 2.1.2).

B batch, T query, K key, N heads, C key-value latent, P rotary part of a head, Q unrotated part, V value head.
"""

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import masked_softmax, softmax_scores
from maxtext_like.layers.precision import Precision


def absorbed(
  kv_b_CNH: jax.Array, q_BTNH: jax.Array, k: jax.Array, mask_BTK: jax.Array, *, scale: float, precision: Precision
) -> tuple[jax.Array, jax.Array]:
  """Compute attention over latents.

  Queries are multiplied by the key part of the weight that expands latents, so that scores are computed with latents. The
  outputs are multiplied by its value part.

  Args:
    kv_b_CNH: the weight, [C, N, Q + V], in ``dtype``.
    q_BTNH: queries, [B, T, N, Q + P].
    k: latents followed by the rotated part: [B, K, C + P] for all queries of a row, or [B, T, K, C + P] for each query.
    mask_BTK: bool, the keys that each query sees.
    scale: factor on the scores.
    precision: selects the dtypes.

  Returns:
    The output [B, T, N, V], and the probabilities [B, N, T, K].
  """
  C, Q = len(kv_b_CNH), q_BTNH.shape[-1] - (k.shape[-1] - len(kv_b_CNH))
  axes, latent = ("BTKC", k[..., :C]) if k.ndim == 4 else ("BKC", k)
  # Absorb the key part of the weight into the queries.
  of_keys, of_values = jnp.split(kv_b_CNH, [Q], axis=-1)
  nope, rope = jnp.split(q_BTNH, [Q], axis=-1)
  # Queries in the space of latents, followed by their rotated part.
  q_BTNC = jnp.concatenate([precision.einsum("BTNQ,CNQ->BTNC", nope, of_keys, large=True), rope], axis=-1)
  with jax.named_scope("qk_product"):
    products = precision.einsum(f"BTNC,{axes}->BNTK", q_BTNC, k, out=precision.qk_dtype) * scale
  scores_BNTK = softmax_scores(products, precision, None)
  with jax.named_scope("softmax"):
    probs_BNTK = masked_softmax(scores_BNTK, mask_BTK[:, None])
  with jax.named_scope("pv_product"):
    # Entries of a cache are read with their rotated part, because a slice of them would be a copy.
    latent_BTNC = precision.einsum(f"BNTK,{axes}->BTNC", probs_BNTK, latent)[..., :C]
  return precision.einsum("BTNC,CNV->BTNV", latent_BTNC, of_values, large=True), probs_BNTK
