"""Attention whose keys an indexer chooses, a tile of queries at a time.

Scores of every pair, those of each index head and of each attention head, would be the largest arrays of a model by far: 8.6 GB
for one layer and row of 4096 positions of DeepSeek V3.2. Here those of a tile exist at a time. The backward pass makes them
again, but for what was chosen, which is kept: a bit that came out otherwise would make it the gradient of something else.

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

TILE = 256  # queries; with fewer, keys and their gradients travel more than scores do. Rows of at most this many are one tile
STRETCHES = 4  # of tiles in one loop, which meet the keys of its last: a quarter more pairs than queries see. Each is compiled
CHOSEN = "chosen keys"

Arrays = dict[str, jax.Array]


def chosen(x: jax.Array) -> jax.Array:
  """x, what queries were found to attend to: kept for the backward pass."""
  return checkpoint_name(x, CHOSEN)


def over_queries(
  attend: Callable[[Arrays, Arrays, jax.Array], Arrays],
  shared: Arrays,
  keys: Arrays,
  queries: Arrays,
  tokens: Tokens,
  where: Keys,
) -> Arrays:
  """What ``attend`` makes of all queries, given a tile of them at a time.

  Args:
    attend: (``shared`` and keys by name [B, s, ...], queries by name [B, t, ...], visible bool [B or 1, t, s]) -> results by
      name [B, t, ...].
    shared: what else all queries meet, by name.
    keys, queries: by name, [B, S, ...] and [B, T, ...].
    tokens: of the queries.
    where: the keys stand; with an array ``first`` all queries meet all keys.

  Returns:
    Results by name, [B, T, ...].
  """
  (B, T), S = next(iter(queries.values())).shape[:2], next(iter(keys.values())).shape[1]

  def visible(own: Tokens, first, count: int, end: int) -> jax.Array:
    among = (end, Keys(jax.tree.map(lambda x: x[:, :end], where.tokens), first))
    return attention_mask(own, B, count, window=None, bidirectional_images=False, among=among)

  if S <= TILE:
    return attend(shared | keys, queries, visible(tokens, where.first, T, S))
  tile = min(TILE, T)  # of a part of a row there may be less, whose scores are as many as there are keys
  # Of what all tiles read: as it is, and in float32, which has the gradients, to be added up.
  twice: Any = lambda own: {name: (jax.lax.stop_gradient(x), x.astype(jnp.float32)) for name, x in own.items()}
  all_of, of_keys = twice(shared), twice(keys)
  count, known = -(-T // tile), isinstance(where.first, int)
  all_parts: Any = jax.tree.map(lambda x: cut(x, tile), (queries, tokens))
  found = []
  for begin, end in _stretches(count, known):
    last = min(S, int(where.first) + min(end * tile, T)) if known else S

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(CHOSEN))
    def one(seen, queries, own, number, last=last):
      return attend(
        {name: _read(*x) for name, x in seen.items()}, queries, visible(own, where.first + number * tile, tile, last)
      )

    own = all_of | jax.tree.map(lambda x, last=last: x[:, :last], of_keys)
    parts = jax.tree.map(lambda x, begin=begin, end=end: x[begin:end], all_parts)
    found.append(jax.lax.map(lambda part, own=own, one=one: one(own, *part), (*parts, jnp.arange(begin, end))))
  return jax.tree.map(lambda *parts: joined(jnp.concatenate(parts), T), *found)


@jax.custom_vjp
def _read(x: jax.Array, summed: jax.Array) -> Any:
  """x, whose gradient goes to the other in float32. That one is never read: no compiler makes it."""
  del summed
  return x


_read.defvjp(lambda x, summed: (x, None), lambda _, g: (None, g.astype(jnp.float32)))


def stretches(length: int, parts: int = 1) -> list[tuple[int, int]]:
  """Of rows that so many devices share, how many queries each stretch has, and how many keys they meet: where it is decided as
  a program runs which keys those are, all."""
  if parts > 1:
    return [(length, length)]
  ends = [min(end * TILE, length) for _, end in _stretches(-(-length // TILE), True)]
  return [(end - begin, end) for begin, end in itertools.pairwise([0, *ends])]


def _stretches(count: int, known: bool) -> list[tuple[int, int]]:
  """Of so many tiles, the first and the one behind the last of each loop."""
  size = -(-count // STRETCHES) if known else count
  return [(begin, min(begin + size, count)) for begin in range(0, count, size)]


def cut(x_BT: jax.Array, tile: int) -> jax.Array:
  """[n, B, t, ...] of [B, T, ...], with zeros in the last tile for what is not there: so tiles are alike, for one loop."""
  B, T = x_BT.shape[:2]
  x_BT = jnp.pad(x_BT, ((0, 0), (0, -T % tile), *((0, 0),) * (x_BT.ndim - 2)))
  return jnp.moveaxis(x_BT.reshape(B, -1, tile, *x_BT.shape[2:]), 1, 0)


def joined(x_nBt: jax.Array, length: int) -> jax.Array:
  """[B, T, ...] again of what ``cut`` makes."""
  n, B, t = x_nBt.shape[:3]
  return jnp.moveaxis(x_nBt, 0, 1).reshape(B, n * t, *x_nBt.shape[3:])[:, :length]
