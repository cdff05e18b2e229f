"""Stochastic rounding of updated parameters, so that updates below half a spacing are not lost in 16-bit weights.

A bfloat16 weight of 1 has its neighbours 0.0039 below and 0.0078 above: an update of 1e-3 rounds to nothing, step after
step. Rounded up or down at random, with probabilities that make the mean exact, it arrives on average (Gupta et al. 2015;
Zamirai et al. 2020 for bfloat16 training).

Around that average numbers wander: by bits drawn anew in each step, about the root of a sixth of the steps in spacings, however
small the updates, so that a falling learning rate ends no closer. Here a number's bits are drawn once, and go on from step to
step by the golden ratio of their range (Weyl 1916): even in each step, and even over any stretch of steps. Of updates that stay
the same a spacing or two at most is then missing, after a thousand steps too; of those that turn within tens of steps, as
moments make them, the errors' variance is about a third.
"""

import math
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.models.naming import path_keys

Tree = Any
_GOLDEN = np.uint32(0x9E3779B9)  # 2**32 over the golden ratio; odd, so that 2**32 steps take all numbers


@dataclass(frozen=True)
class StochasticRounding:
  """Rounds updated parameters to the dtype that they are stored in.

  The random bits are a function of seed, step, the parameter's path, its layer and the number's place in it: the same on any
  number of devices, after a restart, and wherever a step takes the layers one by one.

  Attributes:
    seed: of the run.
  """

  seed: int

  def __call__(
    self, exact: Tree, like: Tree, step: jax.Array, row: jax.Array | None = None, begin: jax.Array | int = 0
  ) -> Tree:
    """Parameters in the dtypes of ``like``.

    Args:
      exact: tree of float32 arrays, None where nothing is trained.
      like: the parameters before the update.
      step: int32 scalar.
      row: int32 scalar, which row of its stack the tree is; None: all of every stack.
      begin: numbers before these in each array, of which they are a part; of what lies in no stack.
    """
    key, turn = jax.random.key(self.seed), jnp.asarray(step, jnp.uint32) * _GOLDEN

    def rounded(path, x, p):
      if p.dtype == jnp.float32:
        return x
      own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
      if row is None and not path_keys(path)[0].startswith("stack_"):
        return stochastic_round(x, p.dtype, random_bits(own, x.shape, begin) + turn)
      shape = x.shape if row is not None else x.shape[1:]
      bits = lambda row: random_bits(jax.random.fold_in(own, row), shape) + turn
      return stochastic_round(x, p.dtype, bits(row) if row is not None else jax.vmap(bits)(jnp.arange(len(x))))

    return jax.tree_util.tree_map_with_path(rounded, exact, like)


def random_bits(key: jax.Array, shape: tuple[int, ...], begin: jax.Array | int = 0) -> jax.Array:
  """uint32 of that shape, uniform: a hash of each number's place and the key.

  ``jax.random.bits`` takes a hundred operations a number, which is most of what Adafactor's update of a 31B model computes.
  Rounding needs no more than that bits are even and neighbours have nothing to do with each other. Beyond 2**32 numbers they
  come again.

  Args:
    key: of threefry, ``jax.random.key``'s default.
    shape: of the result.
    begin: the place of its first number.
  """
  first, second = jax.random.key_data(key)
  place = jnp.full(shape, begin, jnp.uint32)
  for axis in range(len(shape)):
    stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
    place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
  return _mixed(_mixed(place + first) ^ second)


def _mixed(x: jax.Array) -> jax.Array:
  """A permutation of the uint32, each bit of which hangs on all bits of x (lowbias32, https://github.com/skeeto/hash-prospector)."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
  x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
  return x ^ (x >> 15)


def stochastic_round(x: jax.Array, dtype: Any, bits: jax.Array) -> jax.Array:
  """Rounds float32 numbers to one of their two neighbours in a narrower format, the nearer the likelier: the mean is exact.

  Numbers that the format holds stay as they are, and so do NaN and infinity. Beyond the largest finite number, bfloat16 and
  float16 round to nearest (infinity); float8 saturates, where a plain cast makes NaN (e4m3) or infinity (e5m2).

  Args:
    x: float32, any shape.
    dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.
    bits: uint32 of x's shape, uniform.
  """
  info = jnp.finfo(dtype)
  largest = float(info.max)
  if dtype == jnp.bfloat16:
    # On the bits, since bfloat16's subnormal numbers are float32's, which most machines flush to zero in arithmetic.
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32)
    found = jax.lax.bitcast_convert_type((raw + (bits >> 16)) & jnp.uint32(0xFFFF0000), jnp.float32)
  else:
    exponent = (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23 & 0xFF) - 127
    unit = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent, int(info.minexp)) - int(info.nmant))
    steps = x / unit  # exact: a power of two
    below = jnp.floor(steps)
    chance = (bits >> 8).astype(jnp.float32) * 2.0**-24
    found = (below + (chance < steps - below).astype(jnp.float32)) * unit
  inside = jnp.abs(x) <= largest
  if info.bits == 8:
    found, x = jnp.clip(found, -largest, largest), jnp.where(jnp.isnan(x), x, jnp.clip(x, -largest, largest))
  return jnp.where(inside, found, x).astype(dtype)


def stays_finite(x: jax.Array, dtype: Any) -> jax.Array:
  """Bool of x's shape: what ``stochastic_round`` makes of the numbers is finite, whatever the bits."""
  return ~jnp.isnan(x) if jnp.finfo(dtype).bits == 8 else jnp.isfinite(x.astype(dtype))
