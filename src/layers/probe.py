"""Probes: identity functions that return statistics of an array and of its cotangent, without callbacks.

The forward statistics are returned as a value. The statistics of the cotangent are the "gradient" of a dummy argument, the
sink. ``jax.grad`` returns them in the shape of the sinks, also if the layer is inside scan, remat or vmap.
    def block(x, inputs):                                            # the body of a scan over (params, sinks)
      params, sink = inputs
      x, seen = probe(layer(params, x), sink["residual"])
      return x, {"residual": seen}
    (value, forward), (grads, backward) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, sinks(["residual"], (L,)))
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MAX, NONFINITE = 0, 1
WIDTH = 2

_INFINITY = int(np.float32(np.inf).view(np.int32))


def sinks(names: Iterable[str], shape: tuple[int, ...] = ()) -> dict[str, jax.Array]:
  """Return a zero sink, float32 [*shape, 2], for each name. shape is usually (layers,), the shape of the loop."""
  return {name: jnp.zeros((*shape, WIDTH), jnp.float32) for name in names}


def summary(x: jax.Array) -> jax.Array:
  """Return float32 [2]: the largest finite |x| and the number of non-finite elements (exact up to 2**24).

  The function needs one integer reduction, because the bits of |x| as float32 are ordered like the numbers.
  """
  bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(x).astype(jnp.float32), jnp.int32) & jnp.int32(0x7FFFFFFF)
  # Bits at or above those of infinity are infinity or NaN.
  parts = jnp.where(bits < _INFINITY, bits, 0), (bits >= _INFINITY).astype(jnp.int32)
  join = lambda a, b: (jax.lax.max(a[0], b[0]), jax.lax.add(a[1], b[1]))
  largest, bad = jax.lax.reduce(parts, (jnp.int32(0), jnp.int32(0)), join, tuple(range(x.ndim)))
  return jnp.stack([jax.lax.bitcast_convert_type(largest, jnp.float32), bad.astype(jnp.float32)])


def probe(x: jax.Array, sink: jax.Array) -> tuple[Any, jax.Array]:
  """Return x unchanged and ``summary(x)``. After ``jax.grad``, the gradient of the sink is the summary of x's cotangent.

  Args:
    x: floating array of any shape.
    sink: float32 [2]; its value is not used.

  Raises:
    ValueError: x is not floating, or the sink is not float32 [2] (a scan must slice its leading axis off).
  """
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(f"probe: expected a floating-point array, got {jax.typeof(x).str_short()}")
  if sink.shape != (WIDTH,) or sink.dtype != jnp.float32:
    raise ValueError(
      f"probe: expected a float32 sink of shape [{WIDTH}], got {sink.dtype} {list(sink.shape)}\n  fix: scan over the sinks, so "
      "that the leading axis of layers is sliced off"
    )
  return _tap(x, sink), summary(x)


@jax.custom_vjp
def _tap(x, sink):
  return x


_tap.defvjp(lambda x, sink: (x, None), lambda _, g: (g, summary(g)))
