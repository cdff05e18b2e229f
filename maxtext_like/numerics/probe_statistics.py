"""Light statistics of training steps (``numerics_every``): maxima and non-finite counts per layer, forward and backward.

The probes themselves are in the layers (``maxtext_like.layers.probe``). This module turns their results, and those of parameter
gradients, into metrics.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.probe import MAX, NONFINITE, WIDTH, summary
from maxtext_like.numerics import jaxprs


def tree(values: Any) -> jax.Array:
  """Return float32 [2] over all floating leaves of a tree of gradients, updates or parameters."""
  parts = [summary(x) for x in jax.tree.leaves(values) if jaxprs.is_float(jax.typeof(x))]
  if not parts:
    return jnp.zeros(WIDTH, jnp.float32)
  stacked = jnp.stack(parts)
  return jnp.stack([stacked[:, MAX].max(), stacked[:, NONFINITE].sum()])


def rows(values: Any, count: int) -> jax.Array:
  """Return float32 [count, 2] over all floating leaves of a tree whose leaves are stacked by layer, with ``count`` layers;
  zeros without leaves."""
  leaves = [x for x in jax.tree.leaves(values) if jaxprs.is_float(jax.typeof(x))]
  if not leaves:
    return jnp.zeros((count, WIDTH), jnp.float32)
  parts = jnp.stack([jax.vmap(summary)(x) for x in leaves])
  return jnp.stack([parts[..., MAX].max(0), parts[..., NONFINITE].sum(0)], axis=-1)


def joined(a: jax.Array, b: jax.Array) -> jax.Array:
  """Merge summaries [..., 2] of two arrays, for instance of two microbatches."""
  return jnp.stack([jnp.maximum(a[..., MAX], b[..., MAX]), a[..., NONFINITE] + b[..., NONFINITE]], axis=-1)


def joined_over(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """Merge summaries over the devices along mesh axes, inside shard_map."""
  return jnp.stack([jax.lax.pmax(a[..., MAX], axes), jax.lax.psum(a[..., NONFINITE], axes)], axis=-1)


def metrics(sides: Mapping[str, Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
  """Return flat metrics of {side: {name: [..., 2]}}: "numerics/SIDE/NAME/max" and ".../nonfinite", each with the leading
  axes."""
  found = {}
  for side, values in sides.items():
    for name, value in values.items():
      found[f"numerics/{side}/{name}/max"] = value[..., MAX]
      found[f"numerics/{side}/{name}/nonfinite"] = value[..., NONFINITE]
  return found


def by_layer(params: Mapping[str, Any], stacks: Mapping[str, tuple[int, int]]) -> jax.Array:
  """Return float32 [L, 2] of a tree with the structure of a decoder's parameters, layer by layer in model order.

  Args:
    params: {stack: {layer_j: tree of arrays [repeats, ...]}}, as ``Decoder.params``; other entries are ignored.
    stacks: {stack: (repeats, layers of a row)} in model order.
  """
  found = []
  for stack, (repeats, period) in stacks.items():
    layers = sorted(params[stack].items(), key=lambda item: int(re.sub(r"\D", "", item[0])))
    assert len(layers) == period, "one entry for each layer of the row"
    found.append(jnp.stack([rows(layer, repeats) for _, layer in layers], axis=1).reshape(-1, WIDTH))
  return jnp.concatenate(found)
