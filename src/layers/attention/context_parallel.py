"""Context parallelism: attention with the positions of a row split over devices.

Each device keeps the queries of its part and fetches the keys and values that they need. A global layer gathers those of the
complete row. A layer with a window fetches only those of the positions before its part, from the neighboring devices. Document
and image numbers of the keys are fetched in the same way. The parts are contiguous, so the last device of a causal row
has most visible keys; all devices compute as much as the last one.

B batch, T position of a row, t position of a part, S key.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxtext_like.layers.attention.masks import Keys, Tokens
from maxtext_like.layers.partition import axes_of, gathered, on_devices, vary
from maxtext_like.layers.sharding_rules import Rules, free_mesh

_UNIT = 128  # fused kernels need row lengths that are a multiple of this many positions


@dataclass(frozen=True)
class Part:
  """One device's part of the rows. Use it inside shard_map.

  Attributes:
    axes: mesh axes that positions are split over.
    past: number of positions before the part that are fetched; None: fetch the complete row.
  """

  axes: tuple[str, ...]
  past: int | None = None

  def fetch(self, x_Bt: jax.Array) -> jax.Array:
    """Extend [B, t, ...] of this part to [B, S, ...], the positions of the keys. Positions before the row are zeros."""
    if self.past is None:
      return gathered(x_Bt, self.axes, 1)
    # A window of one key needs no other positions.
    if not self.past:
      return x_Bt
    # The nearest neighbor has the positions just before this part. Continue with farther ones until all are fetched.
    size, devices = x_Bt.shape[1], jax.lax.axis_size(self.axes)
    found, missing, distance = [x_Bt], self.past, 1
    while missing > 0:
      count = min(missing, size)
      pairs = [(i, i + distance) for i in range(devices - distance)]
      found.insert(0, jax.lax.ppermute(x_Bt[:, size - count :], self.axes, pairs))
      missing, distance = missing - count, distance + 1
    return jnp.concatenate(found, axis=1)

  def keys(self, tokens: Tokens, batch: int, size: int) -> tuple[Tokens, Keys]:
    """Return the tokens of the queries and of the keys. The argument holds this part's tokens, [batch, size] positions."""
    if self.past is None:
      return tokens, Keys(jax.tree.map(self.fetch, tokens), jax.lax.axis_index(self.axes) * size)
    if tokens.segments is None:  # positions before the row get segment 0, which no query sees
      tokens = Tokens(jnp.ones((batch, size), jnp.int32), tokens.images)
    return tokens, Keys(jax.tree.map(self.fetch, tokens), self.past)


def past_of(window: int | None, images: bool, size: int, ways: int, *, unit: int = 1) -> int | None:
  """Return ``Part.past`` for rows split into ``ways`` parts of ``size`` positions, rounded up to a multiple of ``unit``."""
  if window is None or images:  # tokens of an image also see later tokens of it
    return None
  past = -(-(window - 1) // unit) * unit
  return past if past <= size * (ways - 1) else None


class Kernel(Protocol):
  """The attributes of an ``AttentionKernel`` that are read here."""

  @property
  def fused(self) -> bool: ...
  @property
  def run(self) -> Callable[..., jax.Array]: ...


def attend(
  kernel: Kernel, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, tokens: Tokens, *, rules: Rules, **how: Any
) -> jax.Array:
  """Compute ``kernels.attention.registry.attend`` with the positions of the rows split over devices.

  Args:
    kernel: runs on each device.
    q_BTNH, k_BTKH, v_BTKV, tokens: complete rows, before partitioning.
    rules: sharding of the rows on the current mesh.
    how: window, bidirectional_images, scale, precision; soft_cap if the model has one.
  """
  # Find how rows, positions and heads are split.
  mesh = free_mesh()
  assert mesh is not None, "rows are split over a mesh"
  heads, kv_heads = (
    rules.spec(x.shape, ("batch", "sequence", axis, None), mesh) for x, axis in ((q_BTNH, "heads"), (k_BTKH, "kv_heads"))
  )
  rows, heads_on = PartitionSpec(*heads[:2]), axes_of(heads[2]) if len(heads) > 2 else ()
  copied = bool(heads_on) and len(kv_heads) < 3
  axes = axes_of(heads[1])
  ways = rules.ways("sequence", mesh)
  size = q_BTNH.shape[1] // ways
  # Find how many earlier positions each part needs.
  images = how["bidirectional_images"] and tokens.images is not None
  past = past_of(how["window"], images, size, ways, unit=_UNIT if kernel.fused else 1)
  part = Part(axes, past)

  def on_device(q, k, v, tokens):
    # If only query heads are split, each device has all key-value heads, and takes those that its query heads read.
    if copied:
      k, v = (_read_by(x, q.shape[2], q_BTNH.shape[2], heads_on) for x in (k, v))
    k, v = part.fetch(k), part.fetch(v)
    tokens, keys = part.keys(tokens, *q.shape[:2])
    if not kernel.fused:
      return kernel.run(q, k, v, tokens, keys=keys, rules=rules, **how)
    # Fused kernels need as many queries as keys: pad the queries on the left, and cut the result.
    assert past is not None, "refused: see registry.whole_rows"
    q = jnp.pad(q, ((0, 0), (past, 0), (0, 0), (0, 0)))
    return kernel.run(q, k, v, keys.tokens, rules=rules, **how)[:, past:]

  specs = (heads, kv_heads, kv_heads, rows)
  return on_devices(on_device, mesh, specs, heads, check_vma=not kernel.fused)(q_BTNH, k_BTKH, v_BTKV, tokens)


def _read_by(k_BTKH: jax.Array, own: int, heads: int, axes: tuple[str, ...]) -> jax.Array:
  """Return the key-value heads that this device's ``own`` query heads (of ``heads`` in total) read."""
  # Query heads per key-value head. A device's query heads must read complete heads.
  group = heads // k_BTKH.shape[2]
  if own % group and group % own:
    raise ValueError(
      f"context parallelism: each device has {own} query heads, and {group} query heads share a key-value head (of "
      f"{k_BTKH.shape[2]}), so a device would need parts of groups\n  fix: change the size of the mesh axis that splits heads"
    )
  first = jax.lax.axis_index(axes) * own // group
  return jax.lax.dynamic_slice_in_dim(vary(k_BTKH, axes), first, max(1, own // group), axis=2)
