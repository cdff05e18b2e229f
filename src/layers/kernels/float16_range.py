"""Numbers of float32's range as operands of 16-bit products: float16 ones get a power of two, which is exact both ways.

Of what is scaled so, numbers down to 2^-28 of the largest keep all of float16's digits, and those further down err by less than
2^-39 of it: far less than a float32 sum does. bfloat16 has the range itself.

M rows, S columns, G groups.
"""

from typing import Any

import jax
import jax.numpy as jnp

_UP_TO = 2.0**14
"""What the largest number becomes at least. It stays below twice that, or four times where a logarithm is a little off: within
float16."""


def power_of_two(x: jax.Array) -> jax.Array:
  """The largest that is not above x, between 2**-126 and 2**126, float32, to the bit: an exp2 that is a little off would round
  what is multiplied by it."""
  return jnp.ldexp(jnp.float32(1), jnp.clip(jnp.floor(jnp.log2(x)), -126, 126).astype(jnp.int32))


def by_row(x_MS: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """x in a 16-bit dtype, and float32 [M, 1], what each row is to be multiplied with to be x. What is not finite stays so."""
  if not _scaled(x_MS, dtype):
    return x_MS.astype(dtype), jnp.ones((x_MS.shape[0], 1), jnp.float32)
  unit = _unit(_largest_of_rows(x_MS))[:, None]
  return (x_MS * (1 / unit)).astype(dtype), unit


def by_group(x_MS: jax.Array, sizes_G: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """The same with float32 [G], one for all rows of a group; sizes: int32, rows of each, behind which there may be more."""
  groups = sizes_G.shape[0]
  if not _scaled(x_MS, dtype):
    return x_MS.astype(dtype), jnp.ones((groups,), jnp.float32)
  group = jnp.searchsorted(jnp.cumsum(sizes_G), jnp.arange(x_MS.shape[0]), side="right")
  largest = jax.ops.segment_max(_largest_of_rows(x_MS), group, groups + 1, indices_are_sorted=True)
  unit = _unit(largest)
  return (x_MS * (1 / unit)[group][:, None]).astype(dtype), unit[:groups]


def _scaled(x: jax.Array, dtype: Any) -> bool:
  return jnp.dtype(dtype) == jnp.float16 and x.dtype != jnp.float16


def _largest_of_rows(x: jax.Array) -> jax.Array:
  """float32 [M]: the largest finite magnitude."""
  return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), axis=1).astype(jnp.float32)


def _unit(largest: jax.Array) -> jax.Array:
  return power_of_two(jnp.where(largest > 0, largest / _UP_TO, 1.0))  # of no rows the largest is -inf
