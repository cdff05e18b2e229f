"""Attention in tiles of queries, in plain XLA. It computes half of the pairs of a causal row and saves no T x S array.

It is used for shapes and dtypes that no fused kernel supports. A tile of queries is multiplied only by the keys that the mask
may allow. The backward pass recomputes the scores of a tile from the saved maximum and sum of each query (Rabe & Staats 2021;
Dao et al. 2022). Every step has the dtypes of the reference, ``dot_product``.

B batch, T position, K key-value heads, G queries per key-value head, H head, V value head, t queries and s keys of a tile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext_like.layers.attention.masks import (
  Keys,
  Tokens,
  capped_scores,
  causal_mask,
  masked_fill,
  same_document,
  same_image,
  slope,
)
from maxtext_like.layers.attention.sparse_attention_tiles import cut, joined
from maxtext_like.layers.kernels.attention.registry import AttentionKernel, Case
from maxtext_like.layers.partition import vary_alike
from maxtext_like.layers.precision import Precision

TILE = 512  # queries per tile. A shorter row is one tile, for which the reference is as good

# Precision, scale, soft cap, window, queries per tile, and the index of the key at the first query; None: known at run time
# only.
_Static = tuple[Precision, float, float | None, int | None, int, int | None]
# Tokens of the queries, tokens of the keys, and the index of the key at the first query if it is an array.
_Where = tuple[Tokens, Tokens, jax.Array | None]


def blockwise_attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKV: jax.Array,
  tokens: Tokens,
  *,
  window: int | None,
  scale: float,
  precision: Precision,
  tile: int = TILE,
  keys: Keys | None = None,
  soft_cap: float | None = None,
) -> jax.Array:
  """Causal self-attention of each row.

  Args:
    q_BTNH, k_BSKH, v_BSKV: queries, keys, values; query head n reads key-value head n // (N / K).
    tokens: segments and images. Tokens of one image see each other, so with images a tile also uses the keys after it.
    window: number of keys a query sees, including itself; None: all earlier keys.
    scale: factor on the scores.
    precision: selects the dtypes (``float32_qk_product``, ``float32_logits``).
    tile: queries per tile.
    keys: position of the keys; None: they are at the positions of the queries.
    soft_cap: soft cap of the scaled, unmasked scores; None: no cap.

  Returns:
    [B, T, N, V] in ``dtype``; zeros for a query that sees no key.
  """
  B, T, N, H = q_BTNH.shape
  K = k_BSKH.shape[2]
  # Group the query heads by key-value head, and find the position of the keys.
  q, k, v = (precision.cast(x) for x in (q_BTNH.reshape(B, T, K, N // K, H), k_BSKH, v_BSKV))
  keys = keys or Keys(tokens, 0)
  known = isinstance(keys.first, int)
  static = (precision, scale, soft_cap, window, tile, keys.first if known else None)
  out: Any = _attend(static, q, k, v, (tokens, keys.tokens, None if known else keys.first))
  return out.reshape(B, T, N, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q, k, v, where):
  return _forward(static, q, k, v, where)[0]


def _forward(static: _Static, q, k, v, where) -> tuple[jax.Array, Any]:
  """Return [B, T, K, G, V], and the residuals of the backward pass."""
  whole = slice(0, k.shape[1])

  def one(q, own, query, keys=whole):
    return _tile_forward(static, q, k[:, keys], v[:, keys], _mask(static, own, where, query, keys))

  # One loop over tiles if the position of the keys is known at run time only. Otherwise each tile uses a slice of the keys.
  if static[-1] is None:
    # Dynamic: one loop body for all tiles, and all keys.
    found = jax.lax.map(lambda tile: one(*tile), (cut(q, static[4]), *_queries(static, q.shape[1], where)))
    out = joined(found[0], q.shape[1])
  else:
    # Static: each tile is multiplied by the keys that it may see.
    at = static[-1]
    parts = [
      one(q[:, tile], _part(where[0], tile), jnp.arange(tile.start, tile.stop) + at, keys)
      for tile, keys in _tiles(static, q.shape[1], k.shape[1], where)
    ]
    found = tuple(zip(*parts, strict=True))
    out = jnp.concatenate(found[0], axis=1)
  # Name the residuals, so that a remat policy can save them.
  out, *sums = jax.tree.map(lambda x: checkpoint_name(x, "attention"), (out, *found[1:]))
  return out, (q, k, v, where, out, *sums)


def _tile_forward(static: _Static, q_BtKGH, k_BsKH, v_BsKV, mask) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Return [B, t, K, G, V], and the maximum and the sum of the exponentials of every query, [B, K, G, t, 1]."""
  precision = static[0]
  scores, _ = _scores(static, q_BtKGH, k_BsKH)
  with jax.named_scope("softmax"):
    # Save the maximum and the sum of each row instead of the probabilities.
    top = jnp.max(masked_fill(scores, mask), axis=-1, keepdims=True)
    weights = _exponentials(scores, mask, top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    probs_BKGts = weights / total
  with jax.named_scope("pv_product"):
    return precision.einsum("BKGts,BsKV->BtKGV", probs_BKGts, v_BsKV), top, total


def _backward(static: _Static, saved, g: jax.Array):
  # Recompute the scores of one tile at a time. With remat, the recomputed forward pass is in the same program. Without the
  # barrier, XLA would reuse its scores, and keep those of all tiles in memory at once.
  (q, k, v, where, out, tops, totals), g = jax.lax.optimization_barrier((saved, g))
  with jax.named_scope("softmax"):
    # The term of the softmax gradient that is common to all keys of a query.
    delta_BTKG = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
  dk, dv, *_ = vary_alike(*(jnp.zeros(x.shape, jnp.float32) for x in (k, v)), q, k, v, g, *jax.tree.leaves(where))
  whole = slice(0, k.shape[1])

  def one(q, g, delta, own, query, top, total, keys=whole):
    mask = _mask(static, own, where, query, keys)
    return _tile_backward(static, q, k[:, keys], v[:, keys], mask, top, total, g, delta)

  # Add up the gradients of keys and values over tiles, in float32.
  if static[-1] is None:
    # The position of the queries is not known when tracing, so every tile reads all keys.
    def step(total, tile):
      dq, *added = one(*tile)
      return jax.tree.map(jnp.add, total, tuple(added)), dq

    parts = [cut(x, static[4]) for x in (q, g, delta_BTKG)]
    (dk, dv), dqs = jax.lax.scan(step, (dk, dv), (*parts, *_queries(static, q.shape[1], where), tops, totals))
    dq = joined(dqs, q.shape[1])
  else:
    # The position is known, so each tile reads only the keys that it can see.
    at, dqs = static[-1], []
    for (tile, keys), top, total in zip(_tiles(static, q.shape[1], k.shape[1], where), tops, totals, strict=True):
      query, own = jnp.arange(tile.start, tile.stop) + at, _part(where[0], tile)
      dq, dk_there, dv_there = one(q[:, tile], g[:, tile], delta_BTKG[:, tile], own, query, top, total, keys)
      dqs, dk, dv = [*dqs, dq], dk.at[:, keys].add(dk_there), dv.at[:, keys].add(dv_there)
    dq = jnp.concatenate(dqs, axis=1)
  return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


def _tile_backward(static: _Static, q_BtKGH, k_BsKH, v_BsKV, mask, top, total, g_BtKGV, delta_BtKG):
  """Return gradients of the queries [B, t, K, G, H], and of the keys [B, s, K, H] and values [B, s, K, V] in float32."""
  precision, scale, cap = static[:3]
  # Cotangents may be rounded to bfloat16 before a product, because it has the range of float32. float16 does not.
  operand = jnp.float32 if precision.dtype == "float16" else q_BtKGH.dtype
  product = functools.partial(jnp.einsum, precision=precision.matmul_precision, preferred_element_type=jnp.float32)
  scores, capped = _scores(static, q_BtKGH, k_BsKH)
  with jax.named_scope("softmax"):
    probs = _exponentials(scores, mask, top) / total
  with jax.named_scope("pv_product"):
    g_BtKGV = g_BtKGV.astype(operand)
    dprobs = product("BtKGV,BsKV->BKGts", g_BtKGV, v_BsKV.astype(operand))
    dv = product("BKGts,BtKGV->BsKV", probs.astype(operand), g_BtKGV)
  with jax.named_scope("softmax"):
    delta_BKGt1 = jnp.moveaxis(delta_BtKG, 1, -1)[..., None]
    # In float32, as in masked_softmax, because the difference can overflow float16.
    dscores = probs.astype(jnp.float32) * (dprobs - delta_BKGt1)
    dscores = (dscores if cap is None else dscores * slope(capped, cap)).astype(operand)
  with jax.named_scope("qk_product"):
    dq = product("BKGts,BsKH->BtKGH", dscores, k_BsKH.astype(operand)) * scale
    dk = product("BKGts,BtKGH->BsKH", dscores, q_BtKGH.astype(operand)) * scale
  return dq, dk, dv


_attend.defvjp(_forward, _backward)


def _tiles(static: _Static, length: int, keys: int, where: _Where) -> list[tuple[slice, slice]]:
  """Return the queries of each tile and the keys that any of them may see, if the position of the queries is static."""
  *_, window, tile, at = static
  assert at is not None
  found = []
  for start in range(0, length, tile):
    end = min(start + tile, length)
    first = 0 if window is None else max(0, at + start - window + 1) // 128 * 128  # aligned to the tiles of matrix units
    found.append((slice(start, end), slice(first, at + end if where[0].images is None else keys)))
  return found


def _part(tokens: Tokens, tile: slice) -> Tokens:
  """Return the tokens at some positions."""
  return jax.tree.map(lambda x: x[:, tile], tokens)


def _queries(static: _Static, length: int, where: _Where) -> tuple[Tokens, jax.Array]:
  """Return the segments and images of all tiles of a loop [n, B, t], and the positions of their queries, int32 [n, t]."""
  tokens, _, first = where
  assert first is not None
  tile = static[4]
  at = jnp.arange(length + -length % tile) + first
  return jax.tree.map(lambda x: cut(x, tile), tokens), at.reshape(-1, tile)


def _scores(static: _Static, q_BtKGH, k_BsKH) -> tuple[jax.Array, jax.Array]:
  """Return ``capped_scores``, two arrays [B, K, G, t, s]."""
  precision, scale, cap = static[:3]
  with jax.named_scope("qk_product"):
    scores = precision.einsum("BtKGH,BsKH->BKGts", q_BtKGH, k_BsKH, out=precision.qk_dtype) * scale
  return capped_scores(scores, precision, cap)


def _mask(static: _Static, own: Tokens, where: _Where, query: jax.Array, keys: slice) -> jax.Array:
  """Return a mask [B or 1, 1, 1, t, s] of the keys that the queries of a tile see."""
  others = _part(where[1], keys)
  images = None if own.images is None or others.images is None else same_image(own.images, others.images)
  # Combine causality, window, images and documents.
  mask = causal_mask(query, jnp.arange(keys.start, keys.stop), window=static[3], images=images)
  if own.segments is not None and others.segments is not None:
    mask = mask & same_document(own.segments, others.segments)
  return mask[:, None, None]


def _exponentials(scores, mask, top):
  # A masked score can be far above the visible ones. The inner where keeps its exponential from overflowing.
  return jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0)


def _run(
  q_BTNH,
  k_BSKH,
  v_BSKV,
  tokens: Tokens,
  *,
  window,
  bidirectional_images,
  scale,
  precision,
  rules,
  keys: Keys | None = None,
  causal: bool = True,
  soft_cap: float | None = None,
) -> jax.Array:
  del rules
  if not bidirectional_images:
    tokens = Tokens(tokens.segments)
  if not causal:
    # Queries at positions after all keys see all of them. The position is an array, so that one loop runs all tiles.
    keys = Keys(tokens, jnp.asarray(k_BSKH.shape[1]))
  return blockwise_attention(
    q_BTNH, k_BSKH, v_BSKV, tokens, window=window, scale=scale, precision=precision, keys=keys, soft_cap=soft_cap
  )


def _refuses(case: Case) -> list[str]:
  reasons = []
  if case.length // case.context <= TILE:
    reasons.append(f"rows of {case.length // case.context} positions are a single tile (of {TILE}), which dot_product computes")
  if case.probabilities:
    reasons.append("the layer needs the probabilities as an array")
  return reasons


KERNEL = AttentionKernel(name="blockwise", refuses=_refuses, run=_run, named=True)
