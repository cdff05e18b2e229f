"""A number that names the weights of a model: the same for the same numbers, whatever file or devices they came from."""

import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.checkpoint.tree import flatten

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def fingerprint(params: Any) -> str:
  """64 hexadecimal digits of names, shapes, dtypes and every bit of the arrays.

  Computed where the arrays lie, in one reading of them; sums of integers modulo 2^32 come out alike on any devices.
  """
  flat = flatten(params)
  sums = jax.device_get(jax.jit(lambda arrays: {name: _sums(x) for name, x in arrays.items()})(flat))
  lines = [f"{name} {list(x.shape)} {x.dtype} {[int(n) for n in sums[name]]}" for name, x in sorted(flat.items())]
  return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sums(x: jax.Array) -> jax.Array:
  """uint32 [2] of an array's bits, each times an odd number that depends on its place, so that none can be exchanged."""
  bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
  place = jnp.zeros((), jnp.uint32)
  for axis in range(x.ndim):
    stride = math.prod(x.shape[axis + 1 :]) % 2**32
    place = place + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
  keys = [(place * jnp.uint32(factor) ^ (place >> 15)) | jnp.uint32(1) for factor in (0x9E3779B1, 0x85EBCA77)]
  return jnp.stack([jnp.sum(bits * key, dtype=jnp.uint32) for key in keys])
