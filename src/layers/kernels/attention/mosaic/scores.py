"""Scores in base 2 from products of queries and keys, with or without a soft cap. Used by both passes."""

import math

import jax
import jax.numpy as jnp

_LOG2E = math.log2(math.e)


def base_two(qk: jax.Array, scale: float, soft_cap: float | None) -> tuple[jax.Array, jax.Array | None]:
  """Return scores times log2(e), for use with exp2, and the slope of the soft cap (None without a cap).

  tanh is computed as 1 - 2 / (1 + exp(2 x)), with an error of 2**-20. The hardware's tanh.approx has an error of 2**-11, which
  is 0.024 for a cap of 50. If the exponential is 0 or infinite the result is -1 or 1, and NaN stays NaN.

  Args:
    qk: float32 products.
    scale: factor on them.
    soft_cap: soft cap of the scaled scores; None: no cap.
  """
  if soft_cap is None:
    return qk * (scale * _LOG2E), None
  tanh = 1.0 - 2.0 / (1.0 + jnp.exp2(qk * (2 * scale * _LOG2E / soft_cap)))
  return tanh * (soft_cap * _LOG2E), 1.0 - tanh * tanh
