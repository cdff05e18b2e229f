"""Comparisons of bfloat16 numbers: in the sparse indexer, the router, and the router's bias.

B batch, T query, S key, D model, R latent, X index heads, H index head, E experts.
"""

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.attention.indexer import Indexer, IndexerConfig
from maxtext_like.layers.attention.rope import RopeConfig, rope_table
from maxtext_like.layers.moe.moe import MoEConfig, Router
from maxtext_like.layers.precision import Precision
from maxtext_like.training.step.router_bias import RouterBias

from .row import Row, drawn, normal


def _recall(picked: np.ndarray, best: np.ndarray) -> float:
  """Returns the mean share of the best indices [T, k] that were picked."""
  return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(picked, best, strict=True)]))


def _top(scores: jax.Array, k: int) -> np.ndarray:
  """Returns the indices of the k largest entries of each row of [1, T, S]; of equal ones the first, like ``jax.lax.top_k``."""
  return np.argsort(-np.asarray(scores[0], np.float64), axis=-1, kind="stable")[:, :k]


def indexer_ties(length: int = 512, topk: int = 64) -> Row:
  """Index scores rounded to bfloat16 before the top-k (MaxText's chunked path) cause ties and wrong choices at the cut."""
  precision = Precision(dtype="bfloat16")
  rope = RopeConfig(dim=16, theta=1e4)
  cfg = IndexerConfig(emb_dim=64, q_lora_rank=48, num_heads=8, head_dim=32, topk=topk, rope=rope)
  indexer = Indexer(cfg, precision)
  p = drawn(indexer.params())
  x = jnp.asarray(normal(8, 1, length, 64), jnp.bfloat16)
  latent = jnp.asarray(normal(9, 1, length, 48), jnp.bfloat16)
  positions = jnp.arange(length)[None]

  @jax.jit
  def scores(p, x, latent):
    q = indexer._rotate(precision.einsum("BTR,RXH->BTXH", latent, p["q"]), rope_table(rope, positions))
    k = indexer.keys(p, x, positions)
    weights = jnp.matmul(x.astype(jnp.float32), p["weights"], precision="highest") * 8**-0.5
    # Scores in bfloat16: product, relu and sum are each rounded.
    products = jnp.einsum("BTXH,BSH->BXTS", q, k) * jnp.bfloat16(32**-0.5)
    plain = jnp.einsum("BXTS,BTX->BTS", jax.nn.relu(products), weights.astype(jnp.bfloat16))
    return q, k, weights, plain, indexer(p, x, latent, positions, k)

  q, k, weights, plain, mine = scores(p, x, latent)
  q64, k64, w64 = (np.asarray(a, np.float64)[0] for a in (q, k, weights))
  exact = np.einsum("XTS,TX->TS", np.maximum(np.einsum("TXH,SH->XTS", q64, k64) * 32**-0.5, 0), w64)
  best = np.argsort(-exact, axis=-1, kind="stable")[:, :topk]
  theirs, our = (_recall(_top(s, topk), best) for s in (plain, mine))
  equal = float(np.mean([1 - len(np.unique(row)) / length for row in np.asarray(plain[0], np.float32)]))
  numbers = {"their_recall": theirs, "our_recall": our, "their_ties": equal}
  return Row(
    f"bfloat16 index scores, top {topk} of {length} (DeepSeek V3.2)",
    f"recall {theirs:.3f} against float64, {equal:.0%} of scores tied with another",
    f"indexer_float32_logits: recall {our:.3f}",
    numbers,
  )


def router_ties(tokens: int = 2048, experts: int = 256, k: int = 8) -> Row:
  """Sigmoid scores in bfloat16 have a spacing of 0.004 above 0.5. Ties among 256 experts are resolved by index."""
  cfg = MoEConfig(emb_dim=64, mlp_dim=1, num_experts=experts, num_experts_per_tok=k, router="sigmoid", selection_bias=False)
  router = Router(cfg, Precision(dtype="bfloat16"))
  p = drawn(router.params())
  x = jnp.asarray(normal(9, 1, tokens, 64), jnp.bfloat16)
  plain = jax.nn.sigmoid(x @ jnp.asarray(p["kernel"], jnp.bfloat16))
  exact = np.asarray(x, np.float64)[0] @ np.asarray(p["kernel"], np.float64)
  best = np.sort(np.argsort(-exact, axis=-1, kind="stable")[:, :k], axis=-1)
  mine = np.sort(np.asarray(jax.jit(router)(p, x)[1])[0], axis=-1)
  theirs = np.sort(_top(plain, k), axis=-1)
  flipped = [float(np.mean((picked != best).any(axis=-1))) for picked in (theirs, mine)]
  numbers = {"their_flips": flipped[0], "our_flips": flipped[1]}
  return Row(
    f"bfloat16 router scores, {k} of {experts} (DeepSeek V3)",
    f"{flipped[0]:.1%} of tokens go to other experts than in float64",
    f"float32_gate_logits: {flipped[1]:.1%}",
    numbers,
  )


def router_bias(steps: int = 200, rate: float = 1e-3) -> Row:
  """The balancing bias moves by 0.001 a step, less than half of bfloat16's spacing at 0.6."""
  start, load = 0.6, jnp.array([[0.1, 0.9]])
  plain = jnp.full((1, 2), start, jnp.bfloat16)
  frozen = {"stack_0": {"layer_0": {"moe": {"router": {"bias": jnp.full((1, 2), start, jnp.float32)}}}}}
  update = RouterBias(rate, (("stack_0", 0, "layer_0"),))
  for _ in range(steps):
    plain = plain + (rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)).astype(jnp.bfloat16)
    frozen = update(frozen, load, jnp.asarray(True))
  mine = frozen["stack_0"]["layer_0"]["moe"]["router"]["bias"]
  moved = [float(x.astype(jnp.float32)[0, 0] - jnp.asarray(start, x.dtype).astype(jnp.float32)) for x in (plain, mine)]
  numbers = {"intended": steps * rate, "theirs": moved[0], "ours": moved[1]}
  return Row(
    f"router bias in bfloat16, {steps} updates of {rate:g}",
    f"moved by {moved[0]:.3f} of {steps * rate:.3f}",
    f"stored in float32 whatever weight_dtype: moved by {moved[1]:.3f}",
    numbers,
  )


ROWS = (indexer_ties, router_ties, router_bias)
