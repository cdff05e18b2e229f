"""Dropout (Srivastava et al. 2014) with masks that depend only on the seed, step, row, array, layer and position in the row.

The random numbers have no state that advances from step to step. The masks are therefore the same after a resume, on another
mesh, with other microbatches, and when the backward pass recomputes a layer.

B rows of a batch.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

ROWS = "dropout"
"""Batch entry in training: uint32 [B, 2], the key of each row. It is split over devices and microbatches together with the
rows."""


def row_keys(seed: int, step: jax.Array, count: int) -> jax.Array:
  """Return uint32 [count, 2]: the keys of the rows of a batch.

  Args:
    seed: seed of the run.
    step: int32 scalar.
    count: number of rows of the complete batch.
  """
  # One key for the step, mixed with the number of each row.
  key = jax.random.key_data(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step))
  return folded(key, jnp.arange(count))


def folded(keys: jax.Array, numbers: jax.Array) -> jax.Array:
  """Derive a key for each integer: uint32 [*numbers.shape, *keys.shape] from keys [..., 2]."""
  numbers = numbers.astype(jnp.uint32).reshape(numbers.shape + (1,) * keys.ndim)
  # Mix the number before and after combining it with the keys, so that neighboring numbers give unrelated keys.
  both = _mixed(numbers + jnp.array([0x9E3779B9, 0x7F4A7C15], jnp.uint32))
  return _mixed(_mixed(keys ^ both) + jnp.flip(both, -1))


def _mixed(x: jax.Array) -> jax.Array:
  """Mix the bits of uint32 numbers: each input bit flips each output bit with probability 1/2 (lowbias32, Wellons 2018).

  The function needs 8 operations per number. A JAX generator needs about 100, for every element of every adapter input."""
  x = (x ^ x >> 16) * jnp.uint32(0x7FEB352D)
  x = (x ^ x >> 15) * jnp.uint32(0x846CA68B)
  return x ^ x >> 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dropout:
  """Dropout for the inputs of one array in one layer.

  Attributes:
    keys: uint32 [B, 2], keys of the rows of the batch.
    rate: fraction of elements that are set to zero.
  """

  keys: jax.Array
  rate: float = dataclasses.field(metadata={"static": True})

  def __call__(self, x: jax.Array) -> jax.Array:
    """Set elements of x to zero. The caller must divide the result by ``1 - rate``.

    Args:
      x: [B * n, ...], n consecutive entries for each row.

    Raises:
      ValueError: the size of the first axis is not a multiple of B.
    """
    rows = self.keys.shape[0]
    if x.shape[0] % rows:
      raise ValueError(
        f"dropout: {x.shape[0]} entries are not a multiple of the {rows} rows of the batch, so they cannot be assigned to rows"
      )
    shape = (rows, x.shape[0] // rows, *x.shape[1:])
    # Number the elements of each row, and hash these numbers with the key of the row.
    place, size = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(1, len(shape))):
      place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(size)
      size *= shape[axis]
    first, second = (self.keys[:, i].reshape(rows, *(1,) * (len(shape) - 1)) for i in (0, 1))
    bits = _mixed(_mixed(place + first) ^ second)
    # An element is kept if its hash is above the rate.
    kept = bits >= jnp.uint32(min(round(self.rate * 2**32), 2**32 - 1))
    return jnp.where(kept.reshape(x.shape), x, jnp.zeros((), x.dtype))
