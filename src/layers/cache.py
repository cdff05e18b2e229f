"""Caches for generation: where new entries are stored, which entries a token sees, and how many slots a layer has.

A cache array has the shape [R, ..., C, X]: R rows of the cache, C slots for positions, X numbers of one entry. Keys and values
are [R, K, C, H], so that the entries that one head reads are contiguous. Position i of a row is stored in slot i % C. C is the
capacity of the cache, or the window of a sliding layer if that is smaller (a ring buffer). Rows have their own lengths.

Speculative decoding discards rejected tokens, so the next tokens start at an earlier position again. Ring buffers then have
``spare`` more slots. With them, the entries of discarded tokens, and of a pass over ``spare`` + 1 tokens, overwrite no entry
that is still in the window.

In an 8-bit cache, an array "k" of int8 numbers has a companion "k.scale" of float32 numbers [R, ..., C, 1].

B rows of a batch, T new tokens, S keys that the new tokens are compared with, K key-value heads.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import same_image
from maxtext_like.layers.sharding_rules import Rules

SCALE = ".scale"
"""End of the name of an array that has the scales of an 8-bit array."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
  """Position of the new tokens in their rows.

  Attributes:
    start: int32 [B], index of the first new token of each row, which is the number of tokens that the cache holds.
    count: int32 [B], number of new tokens that are real. The others follow them and are padding. A row with 0 stores nothing.
    rows: int32 [B], rows of the cache that belong to the rows of the batch; distinct. A row beyond the cache stores nothing.
      None: all rows of the cache in order.
    fresh: the cache holds no tokens of these rows (all ``start`` are 0), so the new tokens see only each other.
    spare: largest number of tokens that were taken back; 0 without speculative decoding. Entries of these tokens are read as
      zeros, because 0 times an entry that is not finite is NaN.
  """

  start: jax.Array
  count: jax.Array
  rows: jax.Array | None = None
  fresh: bool = field(default=False, metadata={"static": True})
  spare: int = field(default=0, metadata={"static": True})

  def real(self, length: int) -> jax.Array:
    """Return bool [B, T]: which of the new tokens are real."""
    return jnp.arange(length) < self.count[:, None]

  def decodes(self, new: int) -> bool:
    """True if a single new token follows cached ones."""
    return new == 1 and not self.fresh

  def reads_back(self, new: int) -> bool:
    """True if new tokens are read from the cache after they are stored. Then either all or none of them are real in a row."""
    return not self.fresh and new <= self.spare + 1

  def lengths(self, slots: int) -> jax.Array:
    """Return the number of slots that each row uses after a single new token, int32 [B]. They are the first ones."""
    return jnp.where(self.count > 0, jnp.minimum(self.start + 1, slots), 0)

  def held(self, new: int, slots: int) -> int:
    """Return S, the number of keys that ``extended`` returns for a cache of ``slots`` slots."""
    if self.fresh:
      return new
    return slots if self.reads_back(new) else slots + new

  def extended(self, cache: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Store new entries.

    A single new token is read back from the cache, where it may have replaced the entry that left the window. So are several
    ones if there are spare slots. Otherwise, several new tokens follow the cached ones, because the first of them may still see
    entries that the last ones replace.

    Args:
      cache: [R, ..., C, X].
      new: [B, T, ..., X].

    Returns:
      The cache, and the entries that the new tokens may see, [B, ..., S, X].
    """
    entries = jnp.moveaxis(new, 1, -2).astype(cache.dtype)
    if self.fresh:
      return self._stored(cache, new), entries
    if self.reads_back(new.shape[1]):
      stored = self._stored(cache, new)
      return stored, self._without_taken_back(self._own(stored), new.shape[1])
    # Read the cached entries before any is replaced. Without the barrier, XLA copies the caches of all rows.
    own, new = jax.lax.optimization_barrier((self._own(cache), new))
    return self._stored(cache, new), jnp.concatenate([own, entries], axis=-2)

  def mask(self, new: int, keys: int, *, window: int | None, images: jax.Array | None = None) -> jax.Array:
    """Return a mask of the keys that each new token sees, bool [B, T, S].

    Args:
      new: T.
      keys: S, number of keys that ``extended`` returned.
      window: number of keys a token sees, including itself; None: all earlier keys.
      images: int32 [B, T], image numbers of the new tokens. Tokens of one image see each other. None: there are no images.
    """
    start = self.start[:, None]
    if self.reads_back(new):
      # The cache contains the new tokens. Age of its entries, relative to the last of them.
      last = start + new - 1
      age = jnp.mod(last - jnp.arange(keys), keys)
      later = jnp.arange(new)[::-1, None]
      seen = (age <= last)[:, None] & (age[:, None] >= later)
      # A ring without spare slots has no entry that is older than the window.
      return seen if window is None or keys <= window else seen & (age[:, None] < window + later)
    # Positions of keys and queries, counted from the first new token. Cached keys have negative positions.
    query, slots = jnp.arange(new), keys - new
    held = jnp.broadcast_to(query, (len(self.start), new))
    exists = self.real(new)
    if slots:
      before = -1 - jnp.mod(start - 1 - jnp.arange(slots), slots)
      held, exists = jnp.concatenate([before, held], axis=1), jnp.concatenate([start + before >= 0, exists], axis=1)
    mask = held[:, None] <= query[:, None]
    if images is not None:
      # Only new tokens have image numbers, so cached keys belong to no image.
      mask |= jnp.pad(same_image(images, images), ((0, 0), (0, 0), (slots, 0)))
    if window is not None:
      mask &= held[:, None] > query[:, None] - window
    return mask & exists[:, None]

  def _own(self, cache: jax.Array) -> jax.Array:
    return cache if self.rows is None else jnp.take(cache, self.rows, axis=0, mode="clip")

  def _without_taken_back(self, entries: jax.Array, new: int) -> jax.Array:
    """Return the entries [B, ..., C, X] with zeros where tokens that were taken back are not replaced by ``new`` ones."""
    left = self.spare + 1 - new
    if not left:
      return entries
    slots = entries.shape[-2]
    taken_back = jnp.mod(jnp.arange(slots) - (self.start + new)[:, None], slots) < left
    taken_back = jnp.expand_dims(taken_back, (*range(1, entries.ndim - 2), entries.ndim - 1))
    return jnp.where(taken_back, jnp.zeros((), entries.dtype), entries)

  def _stored(self, cache: jax.Array, new: jax.Array) -> jax.Array:
    """Store the last C real entries of each row."""
    slots, T = cache.shape[-2], new.shape[1]
    place, count = jnp.arange(T), self.count[:, None]
    kept = (place < count) & (place >= count - slots)
    # Entries that are not kept get distinct slots beyond the last, where nothing is stored.
    slot = jnp.where(kept, jnp.mod(self.start[:, None] + place, slots), slots + place)
    how = {"mode": "drop", "unique_indices": True}
    new, others = new.astype(cache.dtype), [slice(None)] * (cache.ndim - 3)
    if self.rows is None:
      # Row by row, so that devices that have different rows need not exchange anything.
      return jax.vmap(lambda row, at, entries: row.at[(*others, at)].set(jnp.moveaxis(entries, 0, -2), **how))(cache, slot, new)
    return cache.at[(self.rows[:, None], *others, slot)].set(new, **how)


def extended(step: Step, cache: dict[str, jax.Array], name: str, new: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
  """Store new entries in the array ``name`` of a layer's cache, which may be an 8-bit one.

  Args:
    step, cache, name: the step, the cache of the layer, and the name of the array.
    new: [B, T, ..., X].

  Returns:
    The updated arrays of the cache, and the entries that the new tokens may see, [B, ..., S, X].
  """
  scale_name = name + SCALE
  if scale_name not in cache:
    stored, held = step.extended(cache[name], new)
    return {name: stored}, held
  numbers, scale = in_8_bits(new)
  stored, held = step.extended(cache[name], numbers)
  stored_scale, held_scale = step.extended(cache[scale_name], scale)
  # One multiplication in float32, so that the entries are rounded to the dtype of the layer only once.
  return {name: stored, scale_name: stored_scale}, (held.astype(jnp.float32) * held_scale).astype(new.dtype)


def in_8_bits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return x as int8 numbers, and their float32 scale [..., 1]: the largest number of an entry is 127 times its scale."""
  x = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
  return jnp.round(x / jnp.where(scale > 0, scale, 1)).astype(jnp.int8), scale


def cache_arrays(name: str, shape: tuple[int, ...], dtype: Any, *, int8: bool) -> dict[str, jax.Array]:
  """Create an array of a cache: zeros. ``int8``: an 8-bit cache instead of numbers in ``dtype``."""
  if not int8:
    return {name: jnp.zeros(shape, dtype)}
  return {name: jnp.zeros(shape, jnp.int8), name + SCALE: jnp.zeros((*shape[:-1], 1), jnp.float32)}


def split_axes(rank: int, *, stacked: bool = False) -> tuple[str | None, ...]:
  """Return the logical axes of a cache array, of which a mesh splits rows and key-value heads.

  Args:
    rank: number of axes of the array.
    stacked: a leading axis has the layers of a stack.
  """
  first = (None,) if stacked else ()
  return (*first, "batch", *(("kv_heads",) if rank - len(first) > 3 else ()))


def split_over_mesh(cache: jax.Array, rules: Rules, *, stacked: bool = False) -> jax.Array:
  """Split a cache array over the current mesh. The arguments are as for ``split_axes``."""
  return rules.constrain(cache, *split_axes(cache.ndim, stacked=stacked))


def cache_slots(window: int | None, capacity: int) -> int:
  """Return the number of slots that a layer needs for rows of up to ``capacity`` tokens."""
  return capacity if window is None else min(window, capacity)


def grown(cache: jax.Array, slots: int) -> jax.Array:
  """Return the cache with more slots.

  Position i must be in slot i, so no row may hold more tokens than the cache has slots."""
  return jnp.pad(cache, [(0, 0)] * (cache.ndim - 2) + [(0, slots - cache.shape[-2]), (0, 0)])
