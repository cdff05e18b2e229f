"""Bounds on the values that a DeepSeek model computes, for ``risk``; see ``walk``.

N heads, Q size of the unrotated and P of the rotated part of a head, H size of an index head, X index heads.
"""

import math

import numpy as np

from maxtext_like.analysis.risk import bounds
from maxtext_like.analysis.risk.bounds import Signal
from maxtext_like.analysis.risk.parameters import Parameters
from maxtext_like.analysis.risk.walk import Formula, Sizes
from maxtext_like.layers.attention.mla import MLAConfig
from maxtext_like.layers.block import Block


def _attention(walk: Sizes, place: str, p: Parameters, c: MLAConfig, x: Signal) -> Signal:
  """Multi-head latent attention, including the indexer if the model has one."""

  def project(name: str, quantity: str) -> Signal:
    return _linear(walk, place, quantity, p, name, x, bias=c.bias)

  # Queries and keys of each head are expanded from low-rank latents, which are normalized.
  source, q_name = x, "q"
  if c.q_lora_rank:
    project("q_a", "q latent")
    source, q_name = bounds.normed(p.scale("q_a_norm"), walk.u, roundings=2), "q_b"
  kv = project("kv_a", "kv latent")
  k_rope = kv.channels(slice(c.kv_lora_rank, None))
  latent = bounds.normed(p.scale("kv_a_norm"), walk.u, roundings=2)
  N, Q = c.num_heads, c.nope_dim

  def expand(name: str, source: Signal, parts: tuple[str, str]) -> tuple[Signal, Signal, np.ndarray]:
    """Return the two parts of every head, flat over heads, and the Gram matrices [N, Q, Q] of the unrotated part."""
    grams: list[np.ndarray] = []

    def noted(chunks):
      for w in chunks:
        heads = w.reshape(w.shape[0], -1, width)[..., :Q]
        grams.append(bounds.gram(heads, source))
        yield w

    width = Q + (c.rope_dim if parts[1] == "q" else c.value_dim)
    whole = bounds.through(source, noted(p.columns(name)), walk.u)
    index = np.arange(N * width).reshape(N, width)
    first, second = (whole.channels(index[:, part].reshape(-1)) for part in (slice(0, Q), slice(Q, None)))
    if parts[0] == parts[1]:
      walk.put(place, parts[0], whole)
    else:
      walk.put(place, parts[0], first)
      walk.put(place, parts[1], second)
    return first, second, np.concatenate(grams)

  # The scores, the indexer, and the weighted sum of the values.
  q_nope, q_rope, q_gram = expand(q_name, source, ("q", "q"))
  k_nope, v, k_gram = expand("kv_b", latent, ("k", "v"))
  bound, std = _scores(walk, c, (q_nope, q_rope, q_gram), (k_nope, k_rope, k_gram))
  walk.put_scores(place, bound, std, c.scale)
  if c.indexer:
    _indexer(walk, place, p.part("indexer"), c, x, source)
  values = v.grown((1 + walk.u) ** 3)  # convex combinations; the probabilities are rounded
  return _linear(walk, place, "attention output", p, "o", values, inputs=2, bias=c.bias)


def _linear(
  walk: Sizes, place: str, quantity: str, p: Parameters, name: str, x: Signal, *, inputs: int = 1, bias: bool
) -> Signal:
  out = bounds.through(x, p.columns(name, inputs=inputs), walk.u)
  return walk.put_biased(place, quantity, out, p.vector(f"{name}_bias")) if bias else walk.put(place, quantity, out)


def _scores(walk: Sizes, c: MLAConfig, query: tuple, key: tuple) -> tuple[float, np.ndarray]:
  """Return the bound of q.k over all heads, and its standard deviation for every head [N].

  The unrotated parts are linear in two balls, so the largest value of their product is a matrix norm. The rotated parts are
  bounded pair by pair.
  """
  (q_nope, q_rope, q_gram), (k_nope, k_rope, k_gram) = query, key
  N = c.num_heads
  growth = (1 + walk.u) ** 5 * (1 + (c.nope_dim + c.rope_dim) * 2.0**-23)
  separate = np.sum(q_nope.bounds().reshape(N, -1) * k_nope.bounds().reshape(N, -1), axis=1)
  # The norm is that of exact q and k. The rounding errors of both are bounded channel by channel.
  nope = np.minimum(bounds.bilinear_bound(q_gram, k_gram) * (1 + 1e-4) + (growth - 1) * separate, separate) * growth

  def pair(sizes: np.ndarray) -> np.ndarray:
    two = np.stack([bounds.rotary_pairs(s, interleave=c.rope.interleave) for s in sizes.reshape(-1, c.rope_dim)])
    return np.sqrt(np.sum(np.square(two), axis=-1))

  factor = c.rope.attention_factor**2
  rope = np.sum(pair(q_rope.bounds()) * pair(k_rope.bounds()), axis=1) * growth * factor
  variance = np.sum(np.square(q_nope.std * k_nope.std).reshape(N, -1), axis=1)
  variance = variance + factor**2 * np.sum(np.square(pair(q_rope.std) * pair(k_rope.moment())), axis=1) / 2
  return float(np.max(nope + rope)), np.sqrt(variance)


def _indexer(walk: Sizes, place: str, p: Parameters, c: MLAConfig, x: Signal, latent: Signal) -> None:
  """Bound the index products, and their weighted sum over heads."""
  i = c.indexer
  assert i is not None
  X, H, rotated = i.num_heads, i.head_dim, i.rope.dim
  q = walk.put(place, "index q", bounds.through(latent, p.columns("q"), walk.u))
  k = bounds.normed(p.scale("k_norm"), walk.u, bias=p.vector("k_norm", "bias")).grown(1 + walk.u)
  assert k.offset is not None
  # Rope mixes two channels of a pair, so both get the larger of the two values.
  pairs = bounds.rotary_pairs(np.arange(rotated))
  scale, bias, factor = k.scale.copy(), np.abs(k.offset), np.ones(H)
  scale[pairs] = scale[pairs].max(axis=1, keepdims=True)
  bias[pairs] = np.sqrt(np.sum(np.square(bias[pairs]), axis=1, keepdims=True) / 2)
  factor[:rotated] = i.rope.attention_factor**2
  size = q.bounds().reshape(X, H).copy()
  size[:, pairs] = np.sqrt(np.sum(np.square(size[:, pairs]), axis=-1, keepdims=True) / 2)
  size = size * factor
  growth = (1 + walk.u) ** 4 * (1 + H * 2.0**-23)
  bound = (k.radius * np.sqrt(np.square(size) @ np.square(scale)) + size @ bias) * growth
  moment = np.square(k.moment())
  moment[pairs] = moment[pairs].mean(axis=1, keepdims=True)
  std = np.sqrt((np.square(q.std).reshape(X, H) * factor**2) @ moment)
  walk.add(place, "index q.k", bound.max(), bounds.expected_peak(std, float(walk.tokens) ** 2))
  weights = bounds.through(x, p.columns("weights"), walk.u)
  share = (H * X) ** -0.5
  total = float(np.sum(weights.bounds() * bound)) * share * (1 + walk.u) ** 6 * (1 + X * 2.0**-23)
  spread = math.sqrt(float(np.sum(np.square(weights.std * std)) / 2)) * share
  walk.add(place, "index scores", total, bounds.expected_peak(np.array([spread]), float(walk.tokens) ** 2))


def _layer(walk: Sizes, place: str, p: Parameters, layer: Block, x: Signal, own_input: Signal | None) -> Signal:
  c = layer.cfg
  assert isinstance(c.mixer, MLAConfig)
  cfg = c.mixer
  return walk.pre_norm_block(place, p, c, x, lambda part, y: _attention(walk, place, part, cfg, y))


RISK = Formula(_layer)
