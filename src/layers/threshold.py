"""Finds thresholds in long rows of numbers without sorting them, by a search over the digits of the threshold."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def ordered(x: jax.Array) -> jax.Array:
  """Prepare numbers for comparison: -0 equals 0, and NaN of either sign equals inf.

  A NaN is therefore selected, and makes the result non-finite. Otherwise the fault would remain unnoticed."""
  return jnp.where(jnp.isnan(x), jnp.inf, jnp.where(x == 0, 0, x))


def rank(x: jax.Array) -> jax.Array:
  """Map numbers (of 16 or 32 bits) to uint32 above 0 in the same order."""
  # Flip the bits of negative numbers, so that the bits are ordered like the numbers.
  bits = jax.lax.bitcast_convert_type(ordered(x.astype(jnp.float32)), jnp.uint32)
  return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def count(found: jax.Array) -> jax.Array:
  """Count the true elements along the last axis."""
  return jnp.sum(found, axis=-1, dtype=jnp.int32)


def largest(holds: Callable[[jax.Array], jax.Array], bits: int, like: jax.Array, *, digit: int = 4) -> jax.Array:
  """Find the largest uint32 [..., 1] for which a condition holds. The condition must hold for all smaller numbers too.

  Args:
    holds: maps numbers uint32 [..., n, 1] to bool [..., n].
    bits: number of bits to search, rounded up to a multiple of ``digit``.
    like: any uint32 array [..., 1]; only its shape and sharding are used.
    digit: bits found in one pass over the row, by comparing it with 2 ** digit - 1 numbers.
  """

  def step(i, found):
    # Try all values of the next digit at once, and keep the largest that holds.
    place = (digit * (digits - 1 - i)).astype(jnp.uint32)
    larger = found | (jnp.arange(1, 1 << digit, dtype=jnp.uint32) << place)
    return found | (count(holds(larger[..., None])).astype(jnp.uint32)[..., None] << place)

  digits = -(-bits // digit)
  return jax.lax.fori_loop(0, digits, step, like & jnp.uint32(0))
