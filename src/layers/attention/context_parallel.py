"""Attention where the positions of a row are split over devices: each has the queries of its part and fetches their keys.

A global layer gathers the keys and values of the whole row; a layer with a window fetches those of the positions just before
its part, from the neighbours that have them. Whatever goes with keys (their documents, their images) travels in the same way.
Queries, and with them all work on scores, stay where they are. The parts are contiguous, so that of a causal row the last
device has most to look at; all of them compute what the last one does.

B batch, T position of a row, t position of a part, S key.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxtext_like.layers.attention.masks import Keys, Tokens
from maxtext_like.layers.kernels.attention.registry import Name, kernel
from maxtext_like.layers.partition import axes_of, free_mesh, gathered, on_devices, vary
from maxtext_like.layers.sharding_rules import Rules

_UNIT = 128  # positions: rows of fused kernels are a multiple


def parts(rules: Rules, length: int) -> int:
  """Into how many parts rows of so many positions are split on the mesh in use; 1 where they do not divide."""
  mesh = free_mesh()
  ways = 1 if mesh is None else rules.ways("sequence", mesh)
  return ways if length % ways == 0 else 1


@dataclass(frozen=True)
class Part:
  """One device's part of the rows, inside shard_map.

  Attributes:
    axes: mesh axes that positions are split over.
    past: how many positions before the part are fetched; None: all of the row, those behind it too.
  """

  axes: tuple[str, ...]
  past: int | None = None

  def fetch(self, x_Bt: jax.Array) -> jax.Array:
    """[B, S, ...] of the part's own [B, t, ...]; zeros for what would stand before the row."""
    if self.past is None:
      return gathered(x_Bt, self.axes, 1)
    if not self.past:
      return x_Bt
    size, devices = x_Bt.shape[1], jax.lax.axis_size(self.axes)
    found, missing, distance = [x_Bt], self.past, 1
    while missing > 0:
      count = min(missing, size)
      pairs = [(i, i + distance) for i in range(devices - distance)]
      found.insert(0, jax.lax.ppermute(x_Bt[:, size - count :], self.axes, pairs))
      missing, distance = missing - count, distance + 1
    return jnp.concatenate(found, axis=1)

  def keys(self, tokens: Tokens, batch: int, size: int) -> tuple[Tokens, Keys]:
    """Of the queries and of the keys, given the part's own tokens: [batch, size] positions."""
    if self.past is None:
      return tokens, Keys(jax.tree.map(self.fetch, tokens), jax.lax.axis_index(self.axes) * size)
    if tokens.segments is None:  # what stands before the row is nobody's document
      tokens = Tokens(jnp.ones((batch, size), jnp.int32), tokens.images)
    return tokens, Keys(jax.tree.map(self.fetch, tokens), self.past)


def past_of(window: int | None, images: bool, size: int, ways: int, *, unit: int = 1) -> int | None:
  """``Part.past`` of a layer whose rows are split into so many parts of ``size``; a multiple of the unit."""
  if window is None or images:  # an image's tokens see those behind them
    return None
  past = -(-(window - 1) // unit) * unit
  return past if past <= size * (ways - 1) else None


def attend(
  name: Name, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, tokens: Tokens, *, rules: Rules, **how: Any
) -> jax.Array:
  """As ``registry.attend``, where the rows are split over devices.

  Args:
    name: of the kernel that runs on each of them.
    q_BTNH, k_BTKH, v_BTKV, tokens: of whole rows, as the partitioner sees them.
    rules: how they lie on the mesh in use.
    how: window, bidirectional_images, scale, precision; soft_cap where there is one.
  """
  mesh, chosen = free_mesh(), kernel(name)
  assert mesh is not None, "rows are split over a mesh"
  heads, kv_heads = (
    rules.spec(x.shape, ("batch", "sequence", axis, None), mesh) for x, axis in ((q_BTNH, "heads"), (k_BTKH, "kv_heads"))
  )
  rows, heads_on = PartitionSpec(*heads[:2]), axes_of(heads[2]) if len(heads) > 2 else ()
  copied = bool(heads_on) and len(kv_heads) < 3
  axes = axes_of(heads[1])
  ways = rules.ways("sequence", mesh)
  size = q_BTNH.shape[1] // ways
  images = how["bidirectional_images"] and tokens.images is not None
  past = past_of(how["window"], images, size, ways, unit=_UNIT if chosen.fused else 1)
  part = Part(axes, past)

  def on_device(q, k, v, tokens):
    if copied:
      k, v = (_read_by(x, q.shape[2], q_BTNH.shape[2], heads_on) for x in (k, v))
    k, v = part.fetch(k), part.fetch(v)
    tokens, keys = part.keys(tokens, *q.shape[:2])
    if not chosen.fused:
      return chosen.run(q, k, v, tokens, keys=keys, rules=rules, **how)
    assert past is not None, "refused: see registry.whole_rows"
    q = jnp.pad(q, ((0, 0), (past, 0), (0, 0), (0, 0)))  # as many queries as keys
    return chosen.run(q, k, v, keys.tokens, rules=rules, **how)[:, past:]

  specs = (heads, kv_heads, kv_heads, rows)
  return on_devices(on_device, mesh, specs, heads, check_vma=not chosen.fused)(q_BTNH, k_BTKH, v_BTKV, tokens)


def _read_by(k_BTKH: jax.Array, own: int, heads: int, axes: tuple[str, ...]) -> jax.Array:
  """The key-value heads that this device's queries read, of all of them: ``own`` of so many heads are here."""
  group = heads // k_BTKH.shape[2]
  if own % group and group % own:
    raise ValueError(f"{own} query heads of a device read parts of groups of {group}: {k_BTKH.shape[2]} key-value heads")
  first = jax.lax.axis_index(axes) * own // group
  return jax.lax.dynamic_slice_in_dim(vary(k_BTKH, axes), first, max(1, own // group), axis=2)
