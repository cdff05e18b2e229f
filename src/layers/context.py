"""``Context``: the arguments of a layer other than the residual stream, the values that it reports, and caches for generation.

Mixers and feed-forward layers have the signature ``part(p, x, ctx) -> out``. Their other results (statistics, captured arrays,
probes, cache entries, keys and values for later layers) are collected in the context. A layer creates a collecting context
inside its own call (``ctx.collecting()``) and returns the collected values as aux. This is needed because a value can only
leave a transformed function (scan, remat) as a result.

B batch, T position (in generation, the new tokens), D model, P per-layer width, C slots of a cache.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import Tokens, causal_mask, same_image
from maxtext_like.layers.kernels.grouped_matmul.registry import Name
from maxtext_like.layers.probe import probe
from maxtext_like.layers.sharding_rules import RULES, Rules

Aux = dict[str, Any]
KeysValues = tuple[jax.Array, jax.Array]

CAPTURES = ("hidden", "router", "indexer", "ple", "vision")
PROBED = ("attention", "mlp", "residual")
"""Points that probes can observe: the output of the mixer, that of the feed-forward layer, and the stream after the layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
  """The position of the new tokens in their rows.

  Attributes:
    start: int32 scalar, index of the first new token. The cache holds tokens with smaller indices.
    first: int32 [B], index of the first real token of each row. Smaller indices are padding.
  """

  start: jax.Array
  first: jax.Array


class Taps:
  """Values that one layer has reported so far, by name. An object belongs to one trace. It is not an array, so a context that
  contains one cannot be an argument of jit, scan or checkpoint."""

  def __init__(self):
    self.found: Aux = {}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
  """Arguments of a layer other than parameters and the residual stream.

  Attributes:
    positions: int32 [B, T], positions in tokens, for the rotary angle.
    tokens: segments and images.
    step: position of the new tokens relative to the cache, in generation.
    capture: names of ``CAPTURES`` to return in aux.
    rules: sharding of activations over the current mesh.
    grouped: name of the kernel that multiplies tokens by their experts.
    balance_load: ``load_balance.LOAD`` of the complete batch, if these rows are only a part of it; None otherwise.
    cache: the cache entries of this layer, in generation; empty if the layer reuses those of another layer.
    probes: float32 [2] for each of ``PROBED`` (see ``layers.probe``); None: no probes.
    per_layer_input: [B, T, P], the per-layer input (Gemma 4 E2B and E4B).
    shared: keys and values that earlier layers share, by name.
    stream: [B, T, D], the residual stream from which the normed input was computed.
    kept_apart: XLA cannot fuse this layer's saved products with the operations that computed them, because they are stored
      by a loop or protected by a barrier until the backward pass.
    taps: collected values; None if the context does not collect.
  """

  positions: jax.Array
  tokens: Tokens = Tokens()
  step: Step | None = None
  capture: frozenset[str] = field(default=frozenset(), metadata={"static": True})
  rules: Rules = field(default=RULES, metadata={"static": True})
  grouped: Name = field(default="ragged_dot", metadata={"static": True})
  balance_load: jax.Array | None = None
  cache: dict[str, jax.Array] | None = None
  probes: dict[str, jax.Array] | None = None
  per_layer_input: jax.Array | None = None
  shared: dict[str, KeysValues] = field(default_factory=dict)
  stream: jax.Array | None = None
  kept_apart: bool = field(default=False, metadata={"static": True})
  taps: Taps | None = None

  @classmethod
  def of(cls, x: jax.Array, positions: jax.Array | None = None, tokens: Tokens = Tokens(), **values: Any) -> "Context":
    """Create the context of rows x [B, T, ...]. positions default to 0, 1, 2, ..."""
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    return cls(positions, tokens, **values)

  @property
  def real(self) -> jax.Array | None:
    """bool [B, T]: which tokens are real; None: all of them."""
    return None if self.tokens.segments is None else self.tokens.segments > 0

  def collecting(self, **values: Any) -> "Context":
    """Return a copy with some attributes replaced and an empty collection, which ``aux`` returns."""
    return replace(self, taps=Taps(), **values)

  def at_stream(self, stream: jax.Array) -> "Context":
    """Return a copy with another residual stream, which adds to the same collection."""
    return replace(self, stream=stream)

  @property
  def aux(self) -> Aux:
    """The values collected since ``collecting``. A context that does not collect drops all values."""
    return {} if self.taps is None else self.taps.found

  def tap(self, name: str, x: jax.Array) -> jax.Array:
    """Return x. Report x if its name, or the part before the dot, is captured.

    If the name has a probe, also report the statistics of x, and pass the statistics of its cotangent to the probe."""
    # Probe first, so that a capture returns the probed array.
    if self.probes is not None and name in self.probes:
      x, self.aux[f"probe.{name}"] = probe(x, self.probes[name])
    if name.partition(".")[0] in self.capture:
      self.aux[name] = x
    return x

  def report(self, name: str, value: jax.Array) -> None:
    """Report a statistic, independent of captures. Several values with one name are added."""
    self.aux[name] = self.aux[name] + value if name in self.aux else value

  def update_cache(self, **new: jax.Array) -> dict[str, jax.Array]:
    """Return arrays of all tokens so far, [B, S, ...] by name. In generation, store them in the cache for later tokens.

    Args:
      new: [B, T, ...], arrays of the current tokens.
    """
    # Without a cache, the layer reads only the current tokens.
    if self.cache is None or self.step is None:
      return new
    if self.taps is None:
      raise ValueError(
        "context: a layer has a cache, but its context does not collect values, so new cache entries would be lost\n  fix: use "
        "ctx.collecting()"
      )
    # Store the new entries, and return them together with the cached ones.
    self.aux["cache"] = {name: store_in_cache(self.cache[name], x, self.step) for name, x in new.items()}
    return {name: with_cached(self.cache[name], x) for name, x in new.items()}

  def share_kv(self, name: str, kv: KeysValues) -> None:
    """Share keys and values with later layers, which find them in ``shared`` under this name."""
    self.aux["shared_kv"] = self.aux.get("shared_kv", {}) | {name: kv}


# Caches for generation. Rows are padded on the left, so the next token of every row has the same index. A cache of C slots
# holds index i in slot i % C: the complete row if C is its length, or the last C tokens if C is the window of a sliding layer.


def cache_slots(window: int | None, length: int) -> int:
  """Return the number of slots that a layer needs for rows of ``length`` tokens."""
  return length if window is None else min(window, length)


def cached_mask(step: Step, new: int, slots: int, *, window: int | None, images: jax.Array | None = None) -> jax.Array:
  """Return a mask of the keys that each new token sees.

  Args:
    step: position of the new tokens.
    new: T.
    slots: C.
    window: number of keys a token sees, including itself; None: all earlier keys.
    images: int32 [B, T], image numbers of the new tokens. Tokens of one image see each other. None: there are no images.

  Returns:
    bool [B, T, C + T].
  """
  # Find the token index in each slot: the newest index before ``start`` that maps to it.
  slot = jnp.arange(slots)
  held = step.start - 1 - jnp.mod(step.start - 1 - slot, slots)  # the newest index before start that maps to the slot
  query = step.start + jnp.arange(new)
  key = jnp.concatenate([held, query])
  # Only new tokens have image numbers, so cached keys belong to no image.
  same = None if images is None else jnp.pad(same_image(images, images), ((0, 0), (0, 0), (slots, 0)))
  mask = causal_mask(query, key, window=window, images=same)
  # An index below the first real token of the row is padding, or (below 0) an empty slot.
  return mask & (key[None, :] >= step.first[:, None])[:, None]


def with_cached(cache: jax.Array, new: jax.Array) -> jax.Array:
  """Concatenate cached and new entries to [B, C + T, ...]."""
  return jnp.concatenate([cache, new.astype(cache.dtype)], axis=1)


def store_in_cache(cache: jax.Array, new: jax.Array, step: Step) -> jax.Array:
  """Return the cache [B, C, ...] with the new entries [B, T, ...] stored. Of more than C entries, the last C are stored."""
  # A ring buffer: index i goes to slot i % C.
  slots, T = cache.shape[1], new.shape[1]
  kept = min(slots, T)
  at = jnp.mod(step.start + jnp.arange(T - kept, T), slots)
  return cache.at[:, at].set(new[:, T - kept :].astype(cache.dtype), unique_indices=True)
