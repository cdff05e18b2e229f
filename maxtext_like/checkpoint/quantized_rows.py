"""Quantizes weights while they are read. Only one layer at a time is unquantized, on the host and on a device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_like.layers.param import Param
from maxtext_like.layers.quantization.quantized import CODES, SCALES, Arrays, Float8BlockForm, Form, quantize, stored_params

Places = dict[str, NamedSharding]
ReadRow = Callable[[int | None], np.ndarray]
ReadFloat8 = Callable[[int | None], tuple[np.ndarray, np.ndarray] | None]


def read_quantized(form: Form, p: Param, places: Places, read: ReadRow, read_float8: ReadFloat8 = lambda row: None) -> Arrays:
  """Reads a weight and returns its quantized arrays on its devices.

  Every process reads the complete weight, because a scale may depend on all inputs.

  Args:
    form: storage format.
    p: the weight, of one layer or stacked.
    places: sharding of each stored array.
    read: (index of a layer, None if the weight is not stacked) -> float32 weight of that layer, with or without an axis of 1.
    read_float8: the same for codes and scales of blocks of 128 x 128; returns None if the file has none.
  """
  spec = stored_params(form, p)
  own = {name: q.shape if p.rows is None else q.shape[1:] for name, q in spec.items()}
  everywhere = NamedSharding(next(iter(places.values())).mesh, PartitionSpec())
  shape = p.shape if p.rows is None else p.shape[1:]

  def on_devices(x: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(x.shape, everywhere, lambda index: x[index])

  stored = None
  for row in range(p.rows or 1):
    number = None if p.rows is None else row
    given = read_float8(number) if isinstance(form, Float8BlockForm) else None
    if given is None:
      found: Any = on_devices(read(number).reshape(shape))
    else:
      parts = dict(zip((CODES, SCALES), given, strict=True))
      found = {name: on_devices(x.reshape(own[name])) for name, x in parts.items()}
    if p.rows is None:
      return _kept(form, p, tuple(places.items()))(found)
    if stored is None:
      stored = _empty(tuple((name, q.shape, q.dtype, places[name]) for name, q in spec.items()))
    stored = _put(form, p, tuple(places.items()))(stored, found, np.int32(row))
    jax.block_until_ready(stored)  # limits host memory to one layer
  assert stored is not None
  return stored


def _stored(form: Form, p: Param, found: Any) -> Arrays:
  return found if isinstance(found, dict) else quantize(form, p, found)


@functools.lru_cache(maxsize=64)
def _kept(form: Form, p: Param, places: tuple[tuple[str, NamedSharding], ...]) -> Callable[..., Arrays]:
  return jax.jit(lambda found: _stored(form, p, found), out_shardings=dict(places))


@functools.lru_cache(maxsize=64)
def _put(form: Form, p: Param, places: tuple[tuple[str, NamedSharding], ...]) -> Callable[..., Arrays]:
  """Returns a function (stored rows, weight or stored arrays of one row, row index) -> stored rows, in the same memory."""

  def put(stored: Arrays, found: Any, row: jax.Array) -> Arrays:
    own = _stored(form, p, found)
    return {name: jax.lax.dynamic_update_index_in_dim(x, own[name], row, 0) for name, x in stored.items()}

  return jax.jit(put, donate_argnums=0, out_shardings=dict(places))


def _empty(arrays: tuple[tuple[str, tuple[int, ...], str, NamedSharding], ...]) -> Arrays:
  places = {name: place for name, _, _, place in arrays}
  return jax.jit(lambda: {name: jnp.zeros(shape, dtype) for name, shape, dtype, _ in arrays}, out_shardings=places)()
