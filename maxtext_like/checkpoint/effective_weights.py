"""Reads weights as a run multiplies by them, quantized and with an adapter merged, one layer at a time."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from maxtext_like.layers.param import Param
from maxtext_like.layers.quantization.low_rank import Layout, merged
from maxtext_like.layers.quantization.quantized import quantize
from maxtext_like.models.adapter import WHOLE, Adapter
from maxtext_like.models.quantized_base import QuantizedBase

Path = tuple[str, ...]
Index = tuple[int | slice, ...]
Read = Callable[[Path, Index], np.ndarray]


class EffectiveWeights:
  """Returns ``params[path][index]`` in float32, quantized and merged, on top of a reader of the stored weights."""

  def __init__(self, read: Read, base: QuantizedBase | None, adapter: Adapter | None = None, factors: Any = None):
    """
    Args:
      read: reader of the stored weights.
      base: which weights are quantized, and how; None if none are.
      adapter: the adapter to merge; None if there is none.
      factors: arrays of the adapter.
    """
    self._read, self._base, self._adapter, self._factors = read, base, adapter, factors
    self._layer: tuple[Any, np.ndarray] = (None, np.empty(0))

  def __call__(self, path: Path, index: Index) -> np.ndarray:
    """Uses basic indexing with one entry for every axis. The first axis of a stack takes a number."""
    p = self._changed().get(path)
    if self._adapter is not None and path in self._adapter.whole:
      return np.asarray(self._own(path)[WHOLE][index], np.float32)
    if p is None:
      return self._read(path, index)
    row = None if p.rows is None else index[0]
    if self._layer[0] != (path, row):
      self._layer = ((path, row), self._whole(path, p, row))
    return self._layer[1][index if row is None else index[1:]]

  def _changed(self) -> dict[Path, Param]:
    return dict(self._base.weights if self._base else {}) | dict(self._adapter.weights if self._adapter else {})

  def _own(self, path: Path) -> dict[str, Any]:
    """Returns the adapter's entry at the path of an array."""
    node = self._factors
    for key in path:
      node = node[key]
    return node

  def _whole(self, path: Path, p: Param, row: Any) -> np.ndarray:
    """Returns the weight of one layer."""
    lead = () if row is None else (row,)
    shape = p.shape[len(lead) :]
    if p.axes[len(lead)] == "expert":  # a file may store each expert separately
      rest = (slice(None),) * (len(shape) - 1)
      x: Any = np.stack([self._read(path, (*lead, e, *rest)) for e in range(shape[0])])
    else:
      x = self._read(path, (*lead, *(slice(None) for _ in shape)))
    if self._base is not None and path in self._base.weights:
      base = self._base
      x = jax.jit(lambda x: base.values(path, quantize(base.form, p, x), "float32"))(x)
    if self._adapter is not None and path in self._adapter.weights:
      own = {name: value if row is None else value[row] for name, value in self._own(path).items()}
      a, b, magnitude = own["lora_a"], own["lora_b"], own.get("lora_magnitude")
      x = merged(jax.numpy.asarray(x), a, b, Layout.of(p), self._adapter.size(path, row)[1], magnitude)
    return np.asarray(x, np.float32)
