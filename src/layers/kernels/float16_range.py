"""Scaling of float32 numbers to operands of 16-bit products. float16 operands are scaled by a power of two, which is exact.

Scaled numbers down to 2^-28 of the largest one keep all digits of float16. Smaller ones have an error below 2^-39 of the
largest one, which is far less than the error of a float32 sum. bfloat16 has the range of float32 and needs no scale.

M rows, S columns, G groups.
"""

from typing import Any

import jax
import jax.numpy as jnp

_UP_TO = 2.0**14
"""Lower bound of the scaled largest number. It stays below twice this bound, or four times if a logarithm is slightly off, and
so within float16."""


def power_of_two(x: jax.Array) -> jax.Array:
  """Return the largest power of two that is at most x, clipped to 2**-126 and 2**126, as an exact float32.

  ldexp is used because exp2 may be slightly off, which would round the numbers that are multiplied by it."""
  return jnp.ldexp(jnp.float32(1), jnp.clip(jnp.floor(jnp.log2(x)), -126, 126).astype(jnp.int32))


def by_row(x_MS: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """Return x in a 16-bit dtype, and float32 [M, 1]: the factor that restores each row. Non-finite numbers stay non-finite."""
  if not _scaled(x_MS, dtype):
    return x_MS.astype(dtype), jnp.ones((x_MS.shape[0], 1), jnp.float32)
  unit = _unit(_largest_of_rows(x_MS))[:, None]
  return (x_MS * (1 / unit)).astype(dtype), unit


def by_group(x_MS: jax.Array, sizes_G: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """Do the same with one factor for all rows of a group, float32 [G]. sizes: int32, rows of each group; more rows may
  follow."""
  groups = sizes_G.shape[0]
  if not _scaled(x_MS, dtype):
    return x_MS.astype(dtype), jnp.ones((groups,), jnp.float32)
  # Find the group of each row, and the largest magnitude of each group.
  group = jnp.searchsorted(jnp.cumsum(sizes_G), jnp.arange(x_MS.shape[0]), side="right")
  largest = jax.ops.segment_max(_largest_of_rows(x_MS), group, groups + 1, indices_are_sorted=True)
  unit = _unit(largest)
  return (x_MS * (1 / unit)[group][:, None]).astype(dtype), unit[:groups]


def _scaled(x: jax.Array, dtype: Any) -> bool:
  return jnp.dtype(dtype) == jnp.float16 and x.dtype != jnp.float16


def _largest_of_rows(x: jax.Array) -> jax.Array:
  """Return float32 [M]: the largest finite magnitude of each row."""
  return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), axis=1).astype(jnp.float32)


def _unit(largest: jax.Array) -> jax.Array:
  return power_of_two(jnp.where(largest > 0, largest / _UP_TO, 1.0))  # the maximum over no rows is -inf
