"""Dropout (Srivastava et al. 2014) whose masks are a function of what they are for: seed, step, row of the batch, array and
layer, and the place in the row. No generator has a state, so that a run that goes on, another mesh, microbatches and a second
computation in the backward pass have the same masks.

B rows of a batch.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

ROWS = "dropout"
"""Of a batch in training: uint32 [B, 2], the key of each row. It travels with the rows to their devices and microbatches."""


def row_keys(seed: int, step: jax.Array, count: int) -> jax.Array:
  """uint32 [count, 2]: the keys of the rows of a batch.

  Args:
    seed: of the run.
    step: int32 scalar.
    count: rows of the whole batch.
  """
  key = jax.random.key_data(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step))
  return folded(key, jnp.arange(count))


def folded(keys: jax.Array, numbers: jax.Array) -> jax.Array:
  """uint32 [*numbers.shape, *keys.shape]: keys [..., 2] for each of some whole numbers."""
  numbers = numbers.astype(jnp.uint32).reshape(numbers.shape + (1,) * keys.ndim)
  both = _mixed(numbers + jnp.array([0x9E3779B9, 0x7F4A7C15], jnp.uint32))
  return _mixed(_mixed(keys ^ both) + jnp.flip(both, -1))


def _mixed(x: jax.Array) -> jax.Array:
  """A permutation of uint32 in which each bit of x turns each bit of the result half of the time (lowbias32, Wellons 2018):
  eight operations, where a generator of JAX takes a hundred, for each number of every input of an adapter."""
  x = (x ^ x >> 16) * jnp.uint32(0x7FEB352D)
  x = (x ^ x >> 15) * jnp.uint32(0x846CA68B)
  return x ^ x >> 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dropout:
  """Of the inputs of one array in one layer.

  Attributes:
    keys: uint32 [B, 2], of the batch's rows.
    rate: share of the numbers that are zero.
  """

  keys: jax.Array
  rate: float = dataclasses.field(metadata={"static": True})

  def __call__(self, x: jax.Array) -> jax.Array:
    """x with zeros; what is left still has to be divided by ``1 - rate``.

    Args:
      x: [B * n, ...], n entries of each row, in order.

    Raises:
      ValueError: its first axis is no multiple of B.
    """
    rows = self.keys.shape[0]
    if x.shape[0] % rows:
      raise ValueError(f"dropout of {x.shape[0]} entries of {rows} rows: nobody knows which are whose")
    shape = (rows, x.shape[0] // rows, *x.shape[1:])
    place, size = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(1, len(shape))):
      place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(size)
      size *= shape[axis]
    first, second = (self.keys[:, i].reshape(rows, *(1,) * (len(shape) - 1)) for i in (0, 1))
    bits = _mixed(_mixed(place + first) ^ second)
    kept = bits >= jnp.uint32(min(round(self.rate * 2**32), 2**32 - 1))
    return jnp.where(kept.reshape(x.shape), x, jnp.zeros((), x.dtype))
