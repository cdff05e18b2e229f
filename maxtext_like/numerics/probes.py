"""Light probes for every N-th training step: per-layer maxima and non-finite counts, forward and backward, without callbacks.

A probe is an identity. Its forward statistics are returned as a value; the statistics of its cotangent are the "gradient" of
a dummy argument, the slot: whatever loop, remat or vmap the layer sits in, jax.grad brings them out in the slots' own shape.

    slots = probes.slots(["residual", "mlp"], (layers,))                      # one slot for each layer and name
    def block(x, inputs):
      params, slot = inputs
      x, seen = probes.probe(layer(params, x), slot["residual"])              # seen: forward statistics, a value
      return x, {"residual": seen}
    def loss(params, slots): x, forward = lax.scan(block, x0, (params, slots)); return ..., forward
    (value, forward), (grads, backward) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, slots)
    metrics = probes.metrics(forward, backward)

On steps without numerics, pass slots=None through the block and call no probe: the compiled step is the plain one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.numerics import jaxprs, statistics

MAX, NONFINITE = 0, 1
WIDTH = 2


def slots(names: Iterable[str], shape: tuple[int, ...] = ()) -> dict[str, jax.Array]:
  """A zero slot, float32 [*shape, 2], for each name; shape is the loop's, usually (layers,)."""
  return {name: jnp.zeros((*shape, WIDTH), jnp.float32) for name in names}


def summary(x) -> jax.Array:
  """float32 [2] of one floating array: largest finite |x|, number of non-finite elements (exact up to 2**24)."""
  largest, bad = statistics.largest_and_bad(x)
  return jax.lax.stop_gradient(jnp.stack([largest, bad.astype(jnp.float32)]))


def probe(x, slot) -> tuple[Any, jax.Array]:
  """(x, summary(x)): x unchanged, and after jax.grad the slot's gradient is the summary of x's cotangent.

  Args:
    x: floating array of any shape.      slot: float32 [2]; its value is not used.
  Raises:
    ValueError: x is not floating, or the slot is not float32 [2] (a scan must slice its leading axis off).
  """
  if not jaxprs.is_float(jax.typeof(x)):
    raise ValueError(f"probe: expects a floating array, got {jax.typeof(x).str_short()}")
  if slot.shape != (WIDTH,) or slot.dtype != jnp.float32:
    raise ValueError(f"probe: the slot must be float32 [{WIDTH}], got {slot.dtype} {list(slot.shape)}; scan over the slots")
  return _tap(x, slot), summary(x)


@jax.custom_vjp
def _tap(x, slot):
  return x


_tap.defvjp(lambda x, slot: (x, None), lambda _, g: (g, summary(g)))


def tree(values) -> jax.Array:
  """float32 [2] over all floating leaves of a tree: for gradients, updates or parameters."""
  parts = [summary(x) for x in jax.tree.leaves(values) if jaxprs.is_float(jax.typeof(x))]
  if not parts:
    return jnp.zeros(WIDTH, jnp.float32)
  stacked = jnp.stack(parts)
  return jnp.stack([stacked[:, MAX].max(), stacked[:, NONFINITE].sum()])


def rows(values) -> jax.Array:
  """float32 [layers, 2] over all floating leaves of a tree whose leaves are stacked by layer."""
  leaves = [x for x in jax.tree.leaves(values) if jaxprs.is_float(jax.typeof(x))]
  parts = jnp.stack([jax.vmap(summary)(x) for x in leaves])
  return jnp.stack([parts[..., MAX].max(0), parts[..., NONFINITE].sum(0)], axis=-1)


def metrics(forward: Mapping[str, Any], backward: Mapping[str, Any] | None = None) -> dict[str, jax.Array]:
  """Flat metrics: numerics/{forward,backward}/NAME/{max,nonfinite}, each with the slots' leading axes (layers)."""
  sides = {"forward": forward, "backward": backward or {}}
  found = {}
  for side, values in sides.items():
    for name, value in values.items():
      found[f"numerics/{side}/{name}/max"] = value[..., MAX]
      found[f"numerics/{side}/{name}/nonfinite"] = value[..., NONFINITE]
  return found
