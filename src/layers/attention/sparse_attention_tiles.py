"""Sparse attention, computed for one tile of queries at a time. It is used with an indexer.

The scores of all pairs, for each index head and each attention head, would be by far the largest arrays of a model: 8.6 GB for
one layer and one row of 4096 positions of DeepSeek V3.2. Only the scores of one tile exist at a time. The backward pass
recomputes them, but not the selection of keys, which is saved. A recomputed selection could differ in rounding, and the
gradient would then belong to other keys.

B batch, T query, S key, t queries of a tile, s keys that any of them may see.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext_like.layers.attention.masks import Keys, Tokens, attention_mask

TILE = 256  # queries per tile. With fewer, moving keys and their gradients costs more than scores. Shorter rows are one tile
# Loops over tiles. All tiles of a loop use the keys of its last tile, which are 25 % more pairs than needed. More loops would
# need fewer pairs, but each loop is compiled separately.
LOOPS = 4
CHOSEN = "chosen keys"

Arrays = dict[str, jax.Array]


def chosen(x: jax.Array) -> jax.Array:
  """Mark x, the selection of keys, to be saved for the backward pass."""
  return checkpoint_name(x, CHOSEN)


def over_queries(
  attend: Callable[[Arrays, Arrays, jax.Array], Arrays],
  shared: Arrays,
  keys: Arrays,
  queries: Arrays,
  tokens: Tokens,
  where: Keys,
) -> Arrays:
  """Apply ``attend`` to all queries, one tile at a time.

  Args:
    attend: maps (``shared`` and keys by name [B, s, ...], queries by name [B, t, ...], visible bool [B or 1, t, s]) to results
      by name [B, t, ...].
    shared: further arrays that all queries use, by name.
    keys, queries: by name, [B, S, ...] and [B, T, ...].
    tokens: tokens of the queries.
    where: position of the keys. If its ``first`` is an array, every tile uses all keys.

  Returns:
    Results by name, [B, T, ...].
  """
  (B, T), S = next(iter(queries.values())).shape[:2], next(iter(keys.values())).shape[1]

  def visible(own: Tokens, first, count: int, end: int) -> jax.Array:
    among = (end, Keys(jax.tree.map(lambda x: x[:, :end], where.tokens), first))
    return attention_mask(own, B, count, window=None, bidirectional_images=False, among=among)

  # A short row is a single tile.
  if S <= TILE:
    return attend(shared | keys, queries, visible(tokens, where.first, T, S))
  tile = min(TILE, T)  # a part of a row may have fewer queries than TILE, but all keys
  # Pass each shared array twice: without gradient for reading, and in float32 to receive the gradients, which are added.
  twice: Any = lambda own: {name: (jax.lax.stop_gradient(x), x.astype(jnp.float32)) for name, x in own.items()}
  all_of, of_keys = twice(shared), twice(keys)
  count, known = -(-T // tile), isinstance(where.first, int)
  all_parts: Any = jax.tree.map(lambda x: cut(x, tile), (queries, tokens))
  found = []
  # One loop for each group of tiles. Its body is rematerialized except for the selected keys.
  for begin, end in _loops(count, known):
    last = min(S, int(where.first) + min(end * tile, T)) if known else S

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(CHOSEN))
    def one(seen, queries, own, number, last=last):
      return attend(
        {name: _read(*x) for name, x in seen.items()}, queries, visible(own, where.first + number * tile, tile, last)
      )

    # Run the tiles of this loop over the keys that they may see.
    own = all_of | jax.tree.map(lambda x, last=last: x[:, :last], of_keys)
    parts = jax.tree.map(lambda x, begin=begin, end=end: x[begin:end], all_parts)
    found.append(jax.lax.map(lambda part, own=own, one=one: one(own, *part), (*parts, jnp.arange(begin, end))))
  return jax.tree.map(lambda *parts: joined(jnp.concatenate(parts), T), *found)


@jax.custom_vjp
def _read(x: jax.Array, summed: jax.Array) -> Any:
  """Return x. Its gradient goes to ``summed``, in float32. ``summed`` is never read, so XLA does not compute its value."""
  del summed
  return x


_read.defvjp(lambda x, summed: (x, None), lambda _, g: (None, g.astype(jnp.float32)))


def loop_sizes(length: int, parts: int = 1) -> list[tuple[int, int]]:
  """Return (queries, keys) for each loop over tiles of a row that ``parts`` devices share.

  Every tile uses all keys if the row is split, because the visible keys are then only known at run time."""
  if parts > 1:
    return [(length, length)]
  ends = [min(end * TILE, length) for _, end in _loops(-(-length // TILE), True)]
  return [(end - begin, end) for begin, end in itertools.pairwise([0, *ends])]


def _loops(count: int, known: bool) -> list[tuple[int, int]]:
  """Return the first tile and the one after the last of each loop over ``count`` tiles."""
  size = -(-count // LOOPS) if known else count
  return [(begin, min(begin + size, count)) for begin in range(0, count, size)]


def cut(x_BT: jax.Array, tile: int) -> jax.Array:
  """Cut [B, T, ...] into tiles [n, B, t, ...]. The last tile is padded with zeros, so that one loop can run all of them."""
  B, T = x_BT.shape[:2]
  x_BT = jnp.pad(x_BT, ((0, 0), (0, -T % tile), *((0, 0),) * (x_BT.ndim - 2)))
  return jnp.moveaxis(x_BT.reshape(B, -1, tile, *x_BT.shape[2:]), 1, 0)


def joined(x_nBt: jax.Array, length: int) -> jax.Array:
  """Undo ``cut``: return [B, T, ...]."""
  n, B, t = x_nBt.shape[:3]
  return jnp.moveaxis(x_nBt, 0, 1).reshape(B, n * t, *x_nBt.shape[3:])[:, :length]
