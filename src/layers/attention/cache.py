"""Caches for generation: what a forward pass over T new tokens reads of the tokens before them, and leaves for those after.

Rows are padded on the left, so that every row's next token stands at the same index. A cache of C slots holds index i in
slot i % C: all of a row when C is its length, the last C tokens when C is the window of a sliding layer.

B batch, T new tokens, C slots, S = C + T keys: the cached ones, then the new ones.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import causal_mask, same_image


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
  """Where the new tokens stand.

  Attributes:
    start: int32 scalar, the index in the row of the first new token; what the cache holds stands before it.
    first: int32 [B], the index of each row's first real token; before it is padding.
  """

  start: jax.Array
  first: jax.Array


def capacity(window: int | None, length: int) -> int:
  """Slots that a layer needs in rows of ``length`` tokens."""
  return length if window is None else min(window, length)


def cached_mask(step: Step, new: int, slots: int, *, window: int | None, images: jax.Array | None = None) -> jax.Array:
  """Which keys each new token sees.

  Args:
    step: where the new tokens stand.
    new: T.
    slots: C.
    window: keys a token sees, itself included; None: all before it.
    images: int32 [B, T], those among the new tokens, whose tokens see each other; None: none do.

  Returns:
    bool [B, T, C + T].
  """
  slot = jnp.arange(slots)
  held = step.start - 1 - jnp.mod(step.start - 1 - slot, slots)  # the newest index before start that maps to the slot
  query = step.start + jnp.arange(new)
  key = jnp.concatenate([held, query])
  same = None if images is None else jnp.pad(same_image(images, images), ((0, 0), (0, 0), (slots, 0)))
  mask = causal_mask(query, key, window=window, images=same)
  # An index before the row's first real token is padding, or (below 0) a slot that nothing was written to.
  return mask & (key[None, :] >= step.first[:, None])[:, None]


def joined(cache: jax.Array, new: jax.Array) -> jax.Array:
  """Cached and new entries, [B, C + T, ...]."""
  return jnp.concatenate([cache, new.astype(cache.dtype)], axis=1)


def stored(cache: jax.Array, new: jax.Array, step: Step) -> jax.Array:
  """The cache [B, C, ...] after the new entries [B, T, ...]; of more than C, the last C."""
  slots, T = cache.shape[1], new.shape[1]
  kept = min(slots, T)
  at = jnp.mod(step.start + jnp.arange(T - kept, T), slots)
  return cache.at[:, at].set(new[:, T - kept :].astype(cache.dtype), unique_indices=True)
