"""The lightning indexer of DeepSeek V3.2: it selects the keys of each query. Also the loss that trains it.

B batch, T query, S key, D model, R query latent, X index heads, H index head dimension.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import masked_fill, masked_softmax
from maxtext_like.layers.attention.rope import RopeConfig, rope_table, rotate
from maxtext_like.layers.norms import LayerNorm, NormConfig, named
from maxtext_like.layers.param import Param
from maxtext_like.layers.partition import vary
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.threshold import count, largest, ordered
from maxtext_like.layers.threshold import rank as rank_of
from maxtext_like.layers.weight import product


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
  """Settings of the indexer.

  Attributes:
    emb_dim, q_lora_rank: D and R.
    num_heads, head_dim: X and H.
    topk: number of keys that each query keeps.
    rope: the table of the main attention. It rotates the first ``rope.dim`` elements of a head, in half-split pairs.
    epsilon: epsilon of the key norm.
  """

  emb_dim: int
  q_lora_rank: int
  num_heads: int
  head_dim: int
  topk: int
  rope: RopeConfig
  epsilon: float = 1e-6

  def __post_init__(self):
    if self.topk < 1:
      raise ValueError(f"indexer: topk={self.topk}, but a query must keep at least 1 key\n  fix: set it to 1 or more")
    if self.rope.dim > self.head_dim:
      raise ValueError(f"indexer: the rotary dimension {self.rope.dim} exceeds the head dimension {self.head_dim}")
    if self.q_lora_rank < 1:
      raise ValueError(
        f"indexer: q_lora_rank={self.q_lora_rank}, but the indexer reads the query latent\n  fix: set q_lora_rank to 1 or more"
      )


@dataclass(frozen=True)
class Indexer:
  """I[t, s] = sum over heads of w[t, h] * relu(q[t, h] . k[s]) (DeepSeek-V3.2-Exp report, equation 1)."""

  cfg: IndexerConfig
  precision: Precision

  @property
  def _k_norm(self) -> LayerNorm:
    return LayerNorm(NormConfig(dim=self.cfg.head_dim, epsilon=self.cfg.epsilon), self.precision)

  def params(self) -> dict:
    c, dtype = self.cfg, self.precision.weight_dtype
    return {
      "q": Param((c.q_lora_rank, c.num_heads, c.head_dim), ("q_lora", "index_heads", "head_dim"), dtype),
      "k": Param((c.emb_dim, c.head_dim), ("embed", "head_dim"), dtype),
      "k_norm": self._k_norm.params(),
      "weights": Param((c.emb_dim, c.num_heads), ("embed", "index_heads"), dtype),
    }

  @jax.named_scope("indexer")
  def keys(self, p: dict, x_BTD: jax.Array, positions: jax.Array) -> jax.Array:
    """Compute index keys [B, T, H] from the normed input of the layer. They are stored in the cache."""
    k_BTH = named(self._k_norm, p, "k_norm", product(self.precision, "BTD,DH->BTH", jax.lax.stop_gradient(x_BTD), p["k"]))
    return self._rotate(k_BTH, rope_table(self.cfg.rope, positions))

  @jax.named_scope("indexer")
  def __call__(
    self, p: dict, x_BTD: jax.Array, latent_BTR: jax.Array, positions: jax.Array, k_BSH: jax.Array | None = None
  ) -> jax.Array:
    """Compute unmasked index scores of every pair of query and key.

    Args:
      p: parameters.
      x_BTD: normed input of the layer.
      latent_BTR: normed query latent of the main attention.
      positions: int32 [B, T], in tokens.
      k_BSH: index keys; None: those of x.

    Returns:
      [B, T, S], float32 with ``indexer_float32_logits``, else ``dtype``. The inputs receive no gradient: the language-model
      loss and the indexer's loss train disjoint parameters.
    """
    k_BSH = self.keys(p, x_BTD, positions) if k_BSH is None else k_BSH
    return self.score(*self.queries(p, x_BTD, latent_BTR, positions), k_BSH)

  @jax.named_scope("indexer")
  def queries(self, p: dict, x_BTD: jax.Array, latent_BTR: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute rotated index queries [B, T, X, H] and head weights [B, T, X]. The arguments are as in ``__call__``."""
    # The indexer is trained by its own loss only, so its inputs receive no gradient.
    c, precision = self.cfg, self.precision
    x_BTD, latent_BTR = jax.lax.stop_gradient(x_BTD), jax.lax.stop_gradient(latent_BTR)
    q_BTXH = self._rotate(product(precision, "BTR,RXH->BTXH", latent_BTR, p["q"]), rope_table(c.rope, positions))
    return q_BTXH, self.head_weights(p, x_BTD)

  def head_weights(self, p: dict, x_BTD: jax.Array) -> jax.Array:
    """Compute the weight of each head [B, T, X], in float32 with ``indexer_float32_logits``."""
    weights = product(self.precision.for_indexer, "BTD,DX->BTX", x_BTD, p["weights"])
    return weights * jnp.asarray(self.cfg.num_heads**-0.5, weights.dtype)

  @jax.named_scope("indexer")
  def score(self, q_BTXH: jax.Array, weights_BTX: jax.Array, k_BSH: jax.Array) -> jax.Array:
    """Compute index scores [B, T, S] from ``queries`` and ``keys``."""
    with jax.named_scope("indexer_product"):
      products = self.precision.einsum("BTXH,BSH->BXTS", q_BTXH, k_BSH, out=self.precision.indexer_dtype)
    with jax.named_scope("indexer_sum"):
      relu = jax.nn.relu(products * jnp.asarray(self.cfg.head_dim**-0.5, products.dtype))
      # The sum over heads has terms of both signs. Rounding them would change which keys are selected near the threshold.
      return jnp.einsum("BXTS,BTX->BTS", relu, weights_BTX, precision=self.precision.indexer_sum_precision)

  def _rotate(self, x, table):
    rotated, rest = jnp.split(x, [self.cfg.rope.dim], axis=-1)
    return jnp.concatenate([rotate(rotated, table), rest], axis=-1)

  @jax.named_scope("indexer")
  def select(self, scores_BTS: jax.Array, mask: jax.Array) -> jax.Array:
    """Select the ``topk`` best visible keys of each query. Of equal scores the earlier keys are selected.

    Nothing is sorted. A digit-by-digit search finds the score at the threshold. A second search finds the position up to which
    keys with exactly this score are selected.

    Args:
      scores_BTS: index scores.
      mask: bool [B or 1, T, S], the keys that each query can see.

    Returns:
      bool [B, T, S]: visible and selected.
    """
    S = scores_BTS.shape[-1]
    if self.cfg.topk >= S:
      return jnp.broadcast_to(mask, scores_BTS.shape)
    # Find the score at the threshold. Masked keys have rank 0.
    rank = jnp.where(mask, rank_of(jax.lax.stop_gradient(scores_BTS)), jnp.uint32(0))
    cut = largest(lambda cut: count(rank[:, :, None] >= cut) >= self.cfg.topk, 32, rank[..., :1])
    # Fill the remaining places with the earliest keys that have exactly the threshold score.
    equal, key = rank == cut, jax.lax.broadcasted_iota(jnp.uint32, rank.shape, rank.ndim - 1)
    left = self.cfg.topk - count(rank > cut)[..., None]
    end = largest(lambda end: count(equal[:, :, None] & (key[:, :, None] < end)) <= left, S.bit_length(), rank[..., :1])
    return ((rank > cut) | (equal & (key < end))) & mask

  @jax.named_scope("indexer")
  def best(self, scores_BTS: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the keys of ``select`` as indices [B, T, min(topk, S)] int32, best first. If fewer keys are visible, the last
    indices are masked keys."""
    scores = jnp.maximum(ordered(jax.lax.stop_gradient(scores_BTS)), jnp.finfo(scores_BTS.dtype).min)
    scores = jnp.where(mask, scores, -jnp.inf)  # masked keys are lower than a visible key with -inf, which is the lowest finite
    return jax.lax.top_k(scores, min(self.cfg.topk, scores.shape[-1]))[1]


@jax.named_scope("indexer_loss")
def divergence(scores_BTS: jax.Array, probs_BTS: jax.Array, mask: jax.Array) -> jax.Array:
  """KL(p || softmax(I)) of each query, float32 [B, T], in nats.

  Args:
    scores_BTS: index scores. Only they receive a gradient.
    probs_BTS: probabilities of the main attention, summed over heads, with any positive scale.
    mask: bool [B or 1, T, S]: all visible keys in the dense warm-up, the selected keys in sparse training.
  """
  # The target distribution: the attention probabilities over the masked keys, normalized.
  target = jax.lax.stop_gradient(probs_BTS).astype(jnp.float32)
  target = jnp.where(mask, target, 0)
  total = jnp.sum(target, axis=-1, keepdims=True)
  target = target / jnp.where(total == 0, 1, total)
  # The log-softmax of the index scores over the same keys.
  scores = scores_BTS.astype(jnp.float32)
  top = jax.lax.stop_gradient(jnp.max(masked_fill(scores, mask), axis=-1, keepdims=True))
  shifted = jnp.where(mask, scores - top, 0)
  total = jnp.sum(jnp.where(mask, jnp.exp(shifted), 0), axis=-1, keepdims=True)
  log_index = shifted - jnp.log(jnp.where(total == 0, 1, total))
  log_target = jnp.log(jnp.where(target > 0, target, 1))
  return jnp.sum(jnp.where(target > 0, target * (log_target - log_index), 0), axis=-1)


@jax.named_scope("indexer_loss")
def indexer_loss(divergence_BT: jax.Array, real: jax.Array | None = None, over: tuple[str, ...] = ()) -> jax.Array:
  """Compute the loss that trains the indexer: the mean of ``divergence`` over tokens.

  Args:
    divergence_BT: KL divergence of each query.
    real: bool [B, T], real tokens. The mean over no token is 0.
    over: inside shard_map, the mesh axes that split tokens.

  Returns:
    float32 scalar, in nats per token.
  """
  # Average over the real tokens of all devices.
  counts = jnp.ones(divergence_BT.shape, jnp.float32) if real is None else real.astype(jnp.float32)
  total, tokens = jnp.sum(divergence_BT * counts), jnp.sum(counts)
  if over:
    total, tokens = (jax.lax.psum(vary(x, over), over) for x in (total, tokens))
  return total / jnp.maximum(tokens, 1.0)


def index_distribution(scores_BTS: jax.Array, mask: jax.Array) -> jax.Array:
  """Return softmax of the index scores over visible keys, float32 [B, T, S], which the KL loss compares."""
  return masked_softmax(scores_BTS.astype(jnp.float32), mask)
