"""Stochastic rounding of updated parameters, so that small updates are not lost in 16-bit weights.

The neighbors of a bfloat16 weight of 1 are 0.0039 below and 0.0078 above: an update of 1e-3 rounds to nothing in every step.
Rounding up or down at random, with probabilities that make the mean exact, keeps it on average (Gupta et al. 2015; Zamirai et
al. 2020 for bfloat16 training).

With independent random bits in each step, weights perform a random walk around that average: after n steps about sqrt(n / 6)
spacings, however small the updates, so a decaying learning rate does not end closer to the optimum. Here the bits of each
number are drawn once and advance each step by the golden ratio of their range (Weyl 1916). They are uniform within a step and
over any series of steps. The error for constant updates is then at most one or two spacings, even after a thousand steps. For
updates that change sign within tens of steps, as with momentum, the variance of the error is about a third.
"""

import math
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.param import path_keys

Tree = Any
_GOLDEN = np.uint32(0x9E3779B9)  # 2**32 divided by the golden ratio; odd, so that 2**32 steps visit all numbers


@dataclass(frozen=True)
class StochasticRounding:
  """Rounds updated parameters to the dtype that they are stored in.

  The random bits are a function of the seed, the step, the parameter's path, its layer and the position in the array. They are
  the same on any number of devices, after a restart, and in a step that updates layer by layer.

  Attributes:
    seed: seed of the run.
  """

  seed: int

  def __call__(
    self, exact: Tree, like: Tree, step: jax.Array, row: jax.Array | None = None, begin: jax.Array | int = 0
  ) -> Tree:
    """Round parameters to the dtypes of ``like``.

    Args:
      exact: tree of float32 arrays, None for parameters that are not trained.
      like: the parameters before the update.
      step: int32 scalar, the step index.
      row: int32 scalar, row of the stack if the tree is one row; None if it has all rows of every stack.
      begin: number of elements before the first one, if the arrays are pieces of larger arrays outside the stacks.
    """
    # The bits of this step: those of the parameter, advanced by the golden ratio.
    turn = jnp.asarray(step, jnp.uint32) * _GOLDEN
    leaves, structure = jax.tree_util.tree_flatten_with_path(exact)
    before = structure.flatten_up_to(like)
    # The keys are derived together, because threefry is 200 operations even for a single key. The barrier prevents XLA from
    # compiling them into the kernel of every leaf.
    codes = np.array([zlib.crc32(jax.tree_util.keystr(path).encode()) for path, _ in leaves], np.uint32)
    keys = jax.vmap(_fold_in, (None, 0))(jax.random.key_data(jax.random.key(self.seed)), codes)
    if row is not None:
      keys = jax.vmap(_fold_in, (0, None))(keys, row)
    keys = jax.lax.optimization_barrier(keys)

    def rounded(i, path, x, p):
      if p.dtype == jnp.float32:
        return x
      # A leaf outside the stacks has one key, a row of a stack its own.
      if row is not None or not path_keys(path)[0].startswith("stack_"):
        return stochastic_round(x, p.dtype, random_bits(keys[i], x.shape, begin) + turn)
      # A row has the same bits whether the stack is rounded at once or row by row.
      bits = jax.vmap(lambda row: random_bits(_fold_in(keys[i], row), x.shape[1:]) + turn)
      return stochastic_round(x, p.dtype, bits(jnp.arange(len(x))))

    made = [rounded(i, path, x, p) for i, ((path, x), p) in enumerate(zip(leaves, before, strict=True))]
    return structure.unflatten(made)


def _fold_in(key: jax.Array, number: Any) -> jax.Array:
  """``jax.random.fold_in`` for key data."""
  return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), number))


def random_bits(key: jax.Array, shape: tuple[int, ...], begin: jax.Array | int = 0) -> jax.Array:
  """Return uniform uint32 of this shape: a hash of each element's position and the key.

  ``jax.random.bits`` takes a hundred operations per number, most of the work in Adafactor's update of a 31B model. Rounding
  only needs uniform bits that are independent between neighboring elements. Beyond 2**32 elements the bits repeat.

  Args:
    key: data of a threefry key, uint32 [2].
    shape: shape of the result.
    begin: position of its first element.
  """
  # The linear position of each element.
  first, second = key
  place = jnp.full(shape, begin, jnp.uint32)
  for axis in range(len(shape)):
    stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
    place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
  return _mixed(_mixed(place + first) ^ second)


def _mixed(x: jax.Array) -> jax.Array:
  """Permute the uint32 so that each bit depends on all bits of x (lowbias32, https://github.com/skeeto/hash-prospector)."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
  x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
  return x ^ (x >> 15)


def stochastic_round(x: jax.Array, dtype: Any, bits: jax.Array) -> jax.Array:
  """Round float32 numbers to one of their two neighbors in a narrower format, the nearer with the higher probability.

  The expected result equals x. Representable numbers, NaN and infinity stay the same. Beyond the largest finite number,
  bfloat16 and float16 round to nearest (infinity); float8 saturates, where a plain cast gives NaN (e4m3) or infinity (e5m2).

  Args:
    x: float32, any shape.
    dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.
    bits: uint32 of x's shape, uniform.
  """
  info = jnp.finfo(dtype)
  largest = float(info.max)
  if dtype == jnp.bfloat16:
    # Work on the bits: bfloat16 has float32's subnormal numbers, which most machines flush to zero in arithmetic.
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32)
    found = jax.lax.bitcast_convert_type((raw + (bits >> 16)) & jnp.uint32(0xFFFF0000), jnp.float32)
  else:
    # The spacing of the narrow format at x.
    exponent = (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23 & 0xFF) - 127
    unit = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent, int(info.minexp)) - int(info.nmant))
    steps = x / unit  # exact, because unit is a power of two
    below = jnp.floor(steps)
    chance = (bits >> 8).astype(jnp.float32) * 2.0**-24
    found = (below + (chance < steps - below).astype(jnp.float32)) * unit
  # Numbers outside the finite range are cast or saturated.
  inside = jnp.abs(x) <= largest
  if info.bits == 8:
    found, x = jnp.clip(found, -largest, largest), jnp.where(jnp.isnan(x), x, jnp.clip(x, -largest, largest))
  return jnp.where(inside, found, x).astype(dtype)


def stays_finite(x: jax.Array, dtype: Any) -> jax.Array:
  """Bool of x's shape: True if ``stochastic_round`` gives a finite number for every value of the bits."""
  return ~jnp.isnan(x) if jnp.finfo(dtype).bits == 8 else jnp.isfinite(x.astype(dtype))
