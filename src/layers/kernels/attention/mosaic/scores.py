"""Scores in base 2 from products of queries and keys, with a soft cap or without: one way for both passes."""

import math

import jax
import jax.numpy as jnp

_LOG2E = math.log2(math.e)


def base_two(qk: jax.Array, scale: float, soft_cap: float | None) -> tuple[jax.Array, jax.Array | None]:
  """Scores times log2(e), so that exp2 makes their exponentials, and what they grow by with uncapped ones; None without a cap.

  The tangent is 1 - 2 / (1 + exp(2 x)), to 2**-20: that of the hardware (tanh.approx) is off by 2**-11, which a cap of 50 makes
  0.024. An exponential that is 0 or infinite gives -1 or 1, and what is no number stays none.

  Args:
    qk: float32.
    scale: multiplies them.
    soft_cap: of the scores after that; None: none.
  """
  if soft_cap is None:
    return qk * (scale * _LOG2E), None
  tanh = 1.0 - 2.0 / (1.0 + jnp.exp2(qk * (2 * scale * _LOG2E / soft_cap)))
  return tanh * (soft_cap * _LOG2E), 1.0 - tanh * tanh
