"""Tables of numbers that codes of few bits stand for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NF4 = np.array(
  [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
  ],
  np.float32,
)  # fmt: skip
"""The 16 values of NormalFloat (Dettmers et al. 2023, appendix E)."""


def dynamic_map() -> np.ndarray:
  """Return float32 [256]: the values that block maxima are rounded to (the signed dynamic type of Dettmers 2016, as in QLoRA).

  For each power of ten down to 1e-6, [0.1, 1] is divided into 2^n equal parts, where n bits remain. The values are the centers
  of these parts with both signs, and 0 and 1.
  """
  low, high, positive = np.float32(0.1), np.float32(1), []
  for exponent in range(7):
    parts = 2**exponent
    step, number = np.float64((high - low) / np.float32(parts)), np.arange(parts + 1)
    # Computed from the nearer end and rounded once, as torch does, so that all bits are equal.
    bounds = np.where(number < (parts + 1) // 2, low + step * number, high - step * (parts - number)).astype(np.float32)
    positive.append(np.float32(10.0 ** (exponent - 6)) * ((bounds[:-1] + bounds[1:]) / np.float32(2)))
  values = np.concatenate(positive)
  return np.sort(np.concatenate([-values, np.array([0, 1], np.float32), values])).astype(np.float32)


def dynamic_number(code: jax.Array, zero: Any = 0.0) -> jax.Array:
  """Compute the float32 entries of ``dynamic_map`` with a relative error up to 4e-7, without a gather, which is slow on
  TPUs. ``zero``: a float32 zero that is added to all constants."""
  code = code.astype(jnp.int32)
  number = jnp.abs(code - 127)  # 0, and 1 to 127 for both signs; 128 encodes 1
  low, step, exponent = zero, zero, 0
  for exponent in range(7):
    here, unit = number >= 2**exponent, 10.0 ** (exponent - 6)
    low = jnp.where(here, zero + (unit * (0.1 + 0.45 * 2.0**-exponent) - unit * 0.9), low)
    step = jnp.where(here, zero + unit * 0.9 * 2.0**-exponent, step)
  value = jnp.where(number == 128, zero + 1.0, low + step * number)
  return jnp.where(code < 127, -value, value)
