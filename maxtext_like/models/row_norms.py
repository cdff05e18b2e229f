"""Norms of parameter trees, separately for each layer. One pass over the arrays gives the global norm and the layer of a fault.

R rows: the arrays of single layers. A stacked leaf has one row for each of its layers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import path_keys
from maxtext_like.models.naming import ADAPTER, parameter_name, row_names
from maxtext_like.sharding import host_memory

Tree = Any
Axes = tuple[int, ...] | None

_LARGE = 2.0**40  # sums of squares of numbers up to here fit float32 for any number of terms
_DOWN = 2.0**-96  # factor on larger numbers, after which their squares fit float32 too


class Norm(NamedTuple):
  """A Euclidean norm as ``scaled * unit``, float32 scalars: ``scaled`` is finite for finite numbers, ``unit`` is 1 or 2^96."""

  scaled: jax.Array
  unit: jax.Array

  @property
  def value(self) -> jax.Array:
    """The norm, infinite if it exceeds float32."""
    return self.scaled * self.unit

  def above(self, limit: float | jax.Array) -> jax.Array:
    """Return a bool scalar: the norm is above a limit, which must not be negative. It also works for norms beyond float32."""
    return self.scaled > limit / self.unit


class Squares(NamedTuple):
  """Sums of squares by row, float32 [R]. There are two parts, so that no square of a finite number overflows (Blue 1978).

  Attributes:
    small: sum over numbers up to 2^40; NaN if there is a NaN.
    large: sum over larger numbers, times 2^-192; infinite if there is an infinity.
  """

  small: jax.Array
  large: jax.Array

  @property
  def finite(self) -> jax.Array:
    """bool [R]: all numbers of the row are finite."""
    return jnp.isfinite(self.small) & jnp.isfinite(self.large)

  def norm(self) -> Norm:
    """Return the norm over all rows."""
    return _norm(jnp.sum(self.small), jnp.sum(self.large))

  def largest(self) -> jax.Array:
    """Return a float32 scalar that no magnitude exceeds. It is infinite or NaN if one of them is."""
    # A rounded sum of squares is at least its largest term. Squares below 1e-38 are zero, which the last summand covers.
    return _norm(jnp.max(self.small), jnp.max(self.large)).value * 1.001 + 1e-18

  def on_host(self) -> np.ndarray:
    """Return the sums as float64 [R]."""
    with np.errstate(over="ignore"):
      return np.asarray(self.small, np.float64) + np.asarray(self.large, np.float64) * _DOWN**-2


class SoFar(NamedTuple):
  """Sums over arrays that arrive part by part.

  Attributes:
    small, large: float32 scalars, sums of squares so far, in the two parts of ``Squares``.
    share: float32 scalar, expected fraction of these sums in the total of all parts.
  """

  small: jax.Array
  large: jax.Array
  share: jax.Array

  @classmethod
  def nothing(cls) -> "SoFar":
    """The value before the first part."""
    return cls(*[jnp.zeros((), jnp.float32)] * 3)

  def with_part(self, squares: Squares, share: jax.Array) -> "SoFar":
    """Add a part, whose expected fraction of the total is ``share``."""
    return SoFar(self.small + jnp.sum(squares.small), self.large + jnp.sum(squares.large), self.share + share)

  def norm(self) -> Norm:
    """Return the norm over all parts so far."""
    return _norm(self.small, self.large)


def _norm(small: jax.Array, large: jax.Array) -> Norm:
  huge = large > 0
  return Norm(jnp.sqrt(jnp.where(huge, large, small)), jnp.where(huge, 1 / _DOWN, 1.0))


def row_squares(tree: Tree) -> Squares:
  """Return the sums of squares of every layer's array. A stacked leaf gives one number for each of its rows.

  The function needs one pass. If a sum is not finite, a second pass splits it in two parts.
  """
  plain = plain_squares(tree)
  return jax.lax.cond(jnp.all(plain.finite), lambda: plain, lambda: split_squares(tree))


def plain_squares(tree: Tree) -> Squares:
  """Compute ``row_squares`` for numbers whose squares fit float32. If a square overflows, the sum of its row is infinite."""
  plain = _sums(tree, jnp.square)
  return Squares(plain, jnp.zeros_like(plain))


def sums_of_rows(tree: Tree) -> jax.Array:
  """Return the sum of every layer's array, float32 [R]."""
  return _sums(tree, lambda x: x)


def split_squares(tree: Tree) -> Squares:
  """Compute ``row_squares`` without squares that overflow float32 anywhere in the program."""
  return Squares(_sums(tree, lambda x: _terms(x)[0]), _sums(tree, lambda x: _terms(x)[1]))


def squares_of_arrays(tree: Tree, *, rows: bool) -> tuple[Tree, Tree]:
  """Compute ``split_squares`` as two trees: ``small`` and ``large`` of every array.

  Args:
    tree: tree of arrays.
    rows: arrays of stacks have a first axis of layers, and one result for each of them. False: no array has this axis.
  """

  def sums(path, x):
    if x.dtype.itemsize == 1:
      return (jnp.zeros(x.shape[:1]),) * 2
    over = tuple(range(1, x.ndim)) if rows and _in_stack(path) else tuple(range(x.ndim))
    on_gpu, elsewhere = (functools.partial(pair, over) for pair in (_pair_in_one_pass, _pair))
    return jax.lax.platform_dependent(x, cuda=on_gpu, default=elsewhere)

  found = jax.tree_util.tree_map_with_path(sums, tree)
  return tuple(jax.tree.map(lambda _, pair, i=i: pair[i], tree, found) for i in (0, 1))  # pyright: ignore[reportReturnType]


def _terms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return the terms that ``small`` and ``large`` of ``Squares`` add up."""
  x = x.astype(jnp.float32)
  beyond = jnp.abs(x) > _LARGE
  # The zero is behind a barrier: XLA for GPUs would otherwise write an array of zeros where a loop starts with equal sums.
  zero = jax.lax.optimization_barrier(jnp.zeros((), jnp.float32))
  return jnp.square(jnp.where(beyond, zero, x)), jnp.square(jnp.where(beyond, x * _DOWN, zero))


def _pair(over: tuple[int, ...], x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return both sums of an array over these axes."""
  small, large = _terms(x)
  return jnp.sum(small, axis=over), jnp.sum(large, axis=over)


def _pair_in_one_pass(over: tuple[int, ...], x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return both sums with one reduction, because a GPU would read the array twice for two. On a CPU it would be sequential."""
  zeros = (jnp.zeros((), jnp.float32),) * 2
  return jax.lax.reduce(_terms(x), zeros, lambda so_far, more: tuple(map(jnp.add, so_far, more)), over)


def _sums(tree: Tree, terms: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """Return the sum of ``terms`` of every row, float32 [R]."""
  together = functools.partial(_sums_of_kernels, terms=terms)
  return jax.lax.platform_dependent(tree, cuda=together, default=lambda tree: _joined(tree, _sum(terms), {}))


def _sums_of_kernels(tree: Tree, terms: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """Compute the same with few kernels. A step has hundreds of these sums, and most take a GPU longer to start than to run.

  Vectors (norms, biases) of one shape are summed together. The barrier makes later operations read one array of sums. Otherwise
  XLA would compute a total, a maximum and a test for each part separately.
  """
  alike: dict[tuple[bool, tuple[int, ...]], list[tuple[int, jax.Array]]] = {}
  for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
    if x.ndim == 1 + _in_stack(path):
      alike.setdefault((_in_stack(path), x.shape), []).append((i, x.astype(jnp.float32)))
  sums = {}
  for vectors in alike.values():
    places, arrays = zip(*vectors, strict=True)
    rows = jnp.sum(terms(jax.lax.optimization_barrier(jnp.stack(arrays))), axis=-1)
    sums |= dict(zip(places, rows, strict=True))
  return jax.lax.optimization_barrier(_joined(tree, _sum(terms), sums))


def _sum(terms: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array, Axes], jax.Array]:
  return lambda x, over: jnp.sum(terms(x.astype(jnp.float32)), axis=over)


def _joined(tree: Tree, of: Callable[[jax.Array, Axes], jax.Array], known: dict[int, jax.Array]) -> jax.Array:
  """Concatenate one number for every row: ``of(array, axes)``, or the entry of ``known`` for some arrays of the tree."""
  parts = []
  for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
    over = tuple(range(1, x.ndim)) if _in_stack(path) else None
    if x.dtype.itemsize == 1:  # codes of a frozen quantized weight have no meaning as numbers; they are checked when loaded
      parts.append(jnp.zeros(1 if over is None else x.shape[0], jnp.float32))
    else:
      parts.append(jnp.atleast_1d(known[i] if i in known else of(x, over)))
  return jnp.concatenate(parts)


def _in_stack(path: tuple[Any, ...]) -> bool:
  keys = path_keys(path)
  return keys[keys[0] == ADAPTER].startswith("stack_")  # the tree of an adapter repeats the paths of the model


def clip(tree: Tree, norm: Norm, largest: float | jax.Array) -> Tree:
  """Return the tree in float32, multiplied by ``largest / norm`` if its norm is larger.

  Finite numbers stay finite and in proportion, also if their norm exceeds float32.

  Args:
    tree: tree of arrays.
    norm: norm of the tree.
    largest: from 0 to 2^79.
  """
  clipped = norm.above(largest)
  # The factor may be as large as the unit, so scale down by the square root of the unit before it and after it.
  down, factor = jnp.where(clipped, 1 / jnp.sqrt(norm.unit), 1.0), jnp.where(clipped, largest / norm.scaled, 1.0)
  return jax.tree.map(lambda x: x.astype(jnp.float32) * down * factor * down, tree)


def largest_clipped(largest: float) -> float:
  """Return a bound for the magnitudes of a tree after ``clip``, which is slightly larger because norms are rounded."""
  return largest * 1.001


def row_labels(decoder: Decoder, tree: Tree) -> list[str]:
  """Return the parameter names of the entries of ``row_squares``, such as ``layers.7.mlp.down``."""
  return [name for path, _ in jax.tree_util.tree_leaves_with_path(tree) for name in row_names(decoder, path_keys(path))]


def row_peaks(tree: Tree) -> jax.Array:
  """Return the largest magnitude in every layer's array, float32 [R], infinite if a number is not finite."""
  return _joined(tree, _peak, {})


def state_peaks(opt_state: Tree, params: Tree) -> jax.Array:
  """Return the largest magnitude in every array of an optimizer state, float32 [R], infinite if a number is not finite.

  Args:
    opt_state: arrays; counters are skipped.
    params: the trained parameters. A moment of a stacked parameter has its rows, except for factored moments.
  """
  peaks = []
  for _, keys, x in _moments(opt_state):
    over = tuple(range(1, x.ndim)) if _stacked(keys, x, params) else None
    peaks.append(jnp.atleast_1d(_peak(x, over)))
  return jnp.concatenate(peaks) if peaks else jnp.zeros(0)


def state_rows(opt_state: Tree, params: Tree) -> int:
  """Return R of ``state_peaks``."""
  return sum(x.shape[0] if _stacked(keys, x, params) else 1 for _, keys, x in _moments(opt_state))


def _peak(x: jax.Array, over: Axes) -> jax.Array:
  if host_memory.is_traced_on_host(x):  # one row at a time: the complete array may not fit on the device
    rows = jax.lax.map(lambda i: _peak(host_memory.row(x, i), None), jnp.arange(x.shape[0]))
    return jnp.max(rows) if over is None else rows
  return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x.astype(jnp.float32)), jnp.inf), axis=over, initial=0.0)


def peaks_of_arrays(opt_state: Tree) -> Tree:
  """Return the largest magnitude of each array, float32 scalars, infinite if a number is not finite; None for counters."""
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  return jax.tree.map(lambda x: _peak(x, None) if is_float(x) else None, opt_state)


def peaks_of_rows(peaks: Tree, opt_state: Tree, params: Tree) -> jax.Array:
  """Compute ``state_peaks`` from the peaks of every row.

  Args:
    peaks: float32 [rows] for every floating-point array. rows is the number of layers of its stack, or 1.
    opt_state, params: as in ``state_peaks``.
  """
  found = []
  for rows, (_, keys, x) in zip(jax.tree.leaves(peaks), _moments(opt_state), strict=True):
    found.append(rows if _stacked(keys, x, params) else jnp.max(rows, keepdims=True))
  return jnp.concatenate(found) if found else jnp.zeros(0)


def state_labels(decoder: Decoder, opt_state: Tree, params: Tree) -> list[str]:
  """Return the names of the entries of ``state_peaks``, such as ``mu.layers.7.mlp.down``, ``moment_rows.layers.7.mlp.down``."""
  found = []
  for kind, keys, x in _moments(opt_state):
    names = row_names(decoder, keys) if _stacked(keys, x, params) else [parameter_name(decoder, keys)]
    found += [f"{kind}.{name}" for name in names]
  return found


def _moments(opt_state: Tree) -> list[tuple[str, tuple[str, ...], Any]]:
  """Return (field of the optimizer state and factor, path of the parameter, array) for every floating-point array."""
  found = []
  for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
    if jnp.issubdtype(x.dtype, jnp.floating):
      own = [i for i, entry in enumerate(path) if isinstance(entry, jax.tree_util.DictKey)]
      kind = [entry.name for entry in path[: own[0]] if isinstance(entry, jax.tree_util.GetAttrKey)]
      factor = [name for name in path_keys(path[own[-1] + 1 :]) if name != "scale"]  # block scales count as the moment itself
      found.append(("_".join([kind[-1], *factor]), path_keys(path[own[0] : own[-1] + 1]), x))
  return found


def _stacked(keys: tuple[str, ...], x: Any, params: Tree) -> bool:
  for key in keys:
    params = params[key]
  # The array has the rank of the parameter. It may be smaller along one axis, if it holds scales of blocks.
  return keys[0].startswith("stack_") and len(x.shape) == len(params.shape) and x.shape[0] == params.shape[0]
