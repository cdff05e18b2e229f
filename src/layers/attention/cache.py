"""Caches for generation. A forward pass over T new tokens reads the cache of earlier tokens and stores its own entries in it.

Rows are padded on the left, so the next token of every row has the same index. A cache of C slots holds index i in slot i % C:
the complete row if C is its length, or the last C tokens if C is the window of a sliding layer.

B batch, T new tokens, C slots, S = C + T keys: the cached ones, then the new ones.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import causal_mask, same_image


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


def capacity(window: int | None, length: int) -> int:
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


def joined(cache: jax.Array, new: jax.Array) -> jax.Array:
  """Concatenate cached and new entries to [B, C + T, ...]."""
  return jnp.concatenate([cache, new.astype(cache.dtype)], axis=1)


def stored(cache: jax.Array, new: jax.Array, step: Step) -> jax.Array:
  """Return the cache [B, C, ...] with the new entries [B, T, ...] stored. Of more than C entries, the last C are stored."""
  # A ring buffer: index i goes to slot i % C.
  slots, T = cache.shape[1], new.shape[1]
  kept = min(slots, T)
  at = jnp.mod(step.start + jnp.arange(T - kept, T), slots)
  return cache.at[:, at].set(new[:, T - kept :].astype(cache.dtype), unique_indices=True)
