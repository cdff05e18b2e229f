"""Reads a model's parameters one at a time, in slices, for the risk estimate. The complete tree is never in memory.

C inputs and F outputs of a linear map.
"""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from maxtext_like.errors import NonFiniteError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import Param
from maxtext_like.models.naming import row_names

Path = tuple[str, ...]
Index = tuple[int | slice, ...]

CHUNK = 1 << 24  # elements that are read at a time, 64 MiB in float32


class Reader(Protocol):
  """Reads a part of one parameter."""

  def __call__(self, path: Path, index: Index) -> np.ndarray:
    """Return params[path][index] of the decoder's tree as float32. The index is basic, with one entry for every axis."""
    ...


class Parameters:
  """The parameters of a decoder, or of one of its layers, read on demand."""

  def __init__(self, decoder: Decoder, read: Reader, prefix: Path = (), row: int | None = None):
    self._decoder, self._read, self._prefix, self._row = decoder, read, prefix, row
    self._spec: Any = decoder.params()

  def layer(self, number: int) -> "Parameters":
    """Return the parameters of one layer of the decoder."""
    stack, row, name = self._decoder.locate(number)
    return self._at((stack, name), row)

  def part(self, *keys: str) -> "Parameters":
    """Return the parameters below a key."""
    return self._at((*self._prefix, *keys), self._row)

  def stacked(self, row: int, *keys: str) -> "Parameters":
    """Return row ``row`` of the stacked parameters below a key (the layers of a vision tower)."""
    return self._at((*self._prefix, *keys), row)

  def _at(self, prefix: Path, row: int | None) -> "Parameters":
    return Parameters(self._decoder, self._read, prefix, row)

  def __contains__(self, key: str) -> bool:
    node = self._spec
    for name in self._prefix:
      node = node[name]
    return key in node

  def _find(self, keys: Path) -> tuple[Path, Param, tuple[int, ...]]:
    """Return the path, the declaration and the shape without the axis of rows."""
    path = (*self._prefix, *keys)
    node = self._spec
    for name in path:
      node = node[name]
    return path, node, node.shape if self._row is None else node.shape[1:]

  def vector(self, *keys: str) -> np.ndarray:
    """Return a complete small parameter as float64: a norm's scale, a bias, a scalar."""
    path, _, shape = self._find(keys)
    return self._checked(path, tuple(slice(None) for _ in shape)).astype(np.float64)

  def scale(self, *keys: str, plus_one: bool = False) -> np.ndarray:
    """Return a norm's scale, float64 [D]."""
    return self.vector(*keys, "scale") + plus_one

  def columns(self, *keys: str, inputs: int = 1, lead: tuple[int, ...] = ()) -> Iterator[np.ndarray]:
    """Yield a linear map [C, F] in chunks of outputs, float32.

    Args:
      keys: path of the parameter.
      inputs: number of its leading axes that are inputs.
      lead: fixed indices of leading axes, such as the number of an expert.
    """
    path, _, shape = self._find(keys)
    shape = shape[len(lead) :]
    size = math.prod(shape[:inputs])
    step = max(CHUNK // max(size * math.prod(shape[inputs + 1 :]), 1), 1)
    whole = tuple(slice(None) for _ in shape)
    for start in range(0, shape[inputs], step):
      index = (*lead, *whole[:inputs], slice(start, min(start + step, shape[inputs])), *whole[inputs + 1 :])
      yield self._checked(path, index).reshape(size, -1)

  def rows(self, *keys: str) -> Iterator[np.ndarray]:
    """Yield an array in chunks of its first axis, float32 [rows, the rest]."""
    path, _, shape = self._find(keys)
    width = math.prod(shape[1:])
    step = max(CHUNK // max(width, 1), 1)
    whole = tuple(slice(None) for _ in shape[1:])
    for start in range(0, shape[0], step):
      yield self._checked(path, (slice(start, min(start + step, shape[0])), *whole)).reshape(-1, width)

  def row_peaks(self, *keys: str) -> tuple[np.ndarray, np.ndarray]:
    """Return, over the rows of a table, the largest magnitude and the root mean square of every column, float64."""
    peak, squares, count = np.zeros(1), np.zeros(1), 0
    for chunk in self.rows(*keys):
      peak = np.maximum(peak, np.abs(chunk).max(axis=0))
      squares = squares + np.square(chunk).sum(axis=0, dtype=np.float64)
      count += chunk.shape[0]
    return peak.astype(np.float64), np.sqrt(squares / count)

  def _checked(self, path: Path, index: Index) -> np.ndarray:
    full = index if self._row is None else (self._row, *index)
    values = self._read(path, full)
    if not np.isfinite(values).all():
      name = row_names(self._decoder, path)[self._row or 0]
      raise NonFiniteError(f"{name} contains numbers that are not finite, so everything computed from it is not finite either")
    return values
