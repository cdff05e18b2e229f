"""Quantizes weights while they are read. Only one layer at a time is unquantized, on the host and on a device."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_like.layers.param import Param
from maxtext_like.layers.quantization.quantized import Arrays, Form, quantize, stored_params

Places = dict[str, NamedSharding]
ReadRow = Callable[[int | None], np.ndarray]


class QuantizedRows:
  """A weight whose layers arrive one at a time and are quantized at once.

  Every process gets the complete weight, because a scale may depend on all inputs.

  Args:
    form: storage format.
    p: the weight, of one layer or stacked.
    places: sharding of each stored array.
  """

  def __init__(self, form: Form, p: Param, places: Places):
    self.form, self._p, self._places = form, p, tuple(places.items())
    self.everywhere = NamedSharding(next(iter(places.values())).mesh, PartitionSpec())
    self._stored: Arrays | None = None

  def put(self, row: int | None, found: Any) -> None:
    """Quantizes a layer. Returns when that is done, which limits the layers in memory to one.

    Args:
      row: index of the layer; None if the weight is not stacked.
      found: the weight of the layer on all devices; or its codes and scales for blocks of 128 x 128.
    """
    if isinstance(found, dict):
      found = {name: x if isinstance(x, jax.Array) else self.on_devices(x) for name, x in found.items()}
    if row is None:
      self._stored = _kept(self.form, self._p, self._places)(found)
      return
    if self._stored is None:
      places, spec = dict(self._places), stored_params(self.form, self._p)
      self._stored = _empty(tuple((name, q.shape, q.dtype, places[name]) for name, q in spec.items()))
    run = _put(self.form, self._p, self._places) if isinstance(found, dict) else self.program(found.dtype).compiled()
    self._stored = jax.block_until_ready(run(self._stored, found, np.int32(row)))

  def program(self, dtype: Any) -> "Program":
    """Returns the program for layers of a dtype, so that it can be compiled before the first layer arrives."""
    return _program(self.form, self._p, self._places, str(dtype))

  def on_devices(self, x: np.ndarray) -> jax.Array:
    """Copies an array to every device."""
    return jax.make_array_from_callback(x.shape, self.everywhere, lambda index: x[index])

  def finished(self) -> Arrays:
    """Returns the stored arrays, after all layers."""
    assert self._stored is not None
    return self._stored


def read_quantized(form: Form, p: Param, places: Places, read: ReadRow) -> Arrays:
  """Reads a weight layer by layer and returns its quantized arrays on their devices.

  Args:
    form, p, places: as for ``QuantizedRows``.
    read: (index of a layer, None if the weight is not stacked) -> float32 weight of that layer, with or without an axis of 1.
  """
  rows = QuantizedRows(form, p, places)
  shape = p.shape if p.rows is None else p.shape[1:]
  for row in [None] if p.rows is None else range(p.rows):
    rows.put(row, rows.on_devices(read(row).reshape(shape)))
  return rows.finished()


def _stored(form: Form, p: Param, found: Any) -> Arrays:
  if not isinstance(found, dict):
    return quantize(form, p, found)
  shapes = {name: q.shape if p.rows is None else q.shape[1:] for name, q in stored_params(form, p).items()}
  return {name: x.reshape(shapes[name]) for name, x in found.items()}


@functools.lru_cache(maxsize=64)
def _kept(form: Form, p: Param, places: tuple[tuple[str, NamedSharding], ...]) -> Callable[..., Arrays]:
  return jax.jit(lambda found: _stored(form, p, found), out_shardings=dict(places))


@functools.lru_cache(maxsize=64)
def _put(form: Form, p: Param, places: tuple[tuple[str, NamedSharding], ...]) -> Any:
  """Returns a function (stored rows, weight or stored arrays of one row, row index) -> stored rows, in the same memory."""

  def put(stored: Arrays, found: Any, row: jax.Array) -> Arrays:
    own = _stored(form, p, found)
    return {name: jax.lax.dynamic_update_index_in_dim(x, own[name], row, 0) for name, x in stored.items()}

  return jax.jit(put, donate_argnums=0, out_shardings=dict(places))


class Program:
  """The function of ``_put`` for a stacked weight that is read in ``dtype``. Several threads may ask for it."""

  def __init__(self, form: Form, p: Param, places: tuple[tuple[str, NamedSharding], ...], dtype: str):
    self._form, self._p, self._places, self._dtype = form, p, places, dtype
    self._lock = threading.Lock()
    self._compiled: Callable[..., Arrays] | None = None

  def compiled(self) -> Callable[..., Arrays]:
    """Returns the function. It is compiled by the first call; other threads wait for that."""
    with self._lock:
      if (compiled := self._compiled) is None:
        everywhere, places = NamedSharding(self._places[0][1].mesh, PartitionSpec()), dict(self._places)
        spec = stored_params(self._form, self._p)
        stored = {name: jax.ShapeDtypeStruct(q.shape, q.dtype, sharding=places[name]) for name, q in spec.items()}
        layer = jax.ShapeDtypeStruct(self._p.shape[1:], self._dtype, sharding=everywhere)
        lowered = _put(self._form, self._p, self._places).lower(stored, layer, jax.ShapeDtypeStruct((), jnp.int32))
        compiled = self._compiled = lowered.compile()
      return compiled


@functools.lru_cache(maxsize=64)
def _program(form: Form, p: Param, places: tuple[tuple[str, NamedSharding], ...], dtype: str) -> Program:
  return Program(form, p, places, dtype)


def _empty(arrays: tuple[tuple[str, tuple[int, ...], str, NamedSharding], ...]) -> Arrays:
  places = {name: place for name, _, _, place in arrays}
  return jax.jit(lambda: {name: jnp.zeros(shape, dtype) for name, shape, dtype, _ in arrays}, out_shardings=places)()
