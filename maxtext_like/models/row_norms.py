"""Norms of parameter trees, kept apart by layer: one pass over the arrays gives the global norm and says where it broke.

R rows: the arrays of single layers; a stacked leaf has one for each of its layers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.decoder import Decoder
from maxtext_like.models.naming import ADAPTER, parameter_name, path_keys, row_names
from maxtext_like.sharding import host_memory

Tree = Any
Axes = tuple[int, ...] | None

_LARGE = 2.0**40  # sums of squares up to here stay in float32, whatever the number of terms
_DOWN = 2.0**-96  # and squares of numbers beyond it do after this


class Norm(NamedTuple):
  """A Euclidean norm as ``scaled * unit``, float32 scalars: ``scaled`` is finite for finite numbers, ``unit`` is 1 or 2^96."""

  scaled: jax.Array
  unit: jax.Array

  @property
  def value(self) -> jax.Array:
    """The norm itself, infinite where float32 ends."""
    return self.scaled * self.unit

  def above(self, limit: float | jax.Array) -> jax.Array:
    """Bool scalar: the norm, even one beyond float32, is above a limit, which is not below 0."""
    return self.scaled > limit / self.unit


class Squares(NamedTuple):
  """Sums of squares by row, float32 [R], in two parts, so that no square of a finite number is infinite (Blue 1978).

  Attributes:
    small: of the numbers up to 2^40, and NaN where there is one.
    large: of the others, times 2^-192, and infinity where there is one.
  """

  small: jax.Array
  large: jax.Array

  @property
  def finite(self) -> jax.Array:
    """Bool [R]: all numbers of a row are."""
    return jnp.isfinite(self.small) & jnp.isfinite(self.large)

  def norm(self) -> Norm:
    """Of all rows together."""
    return _norm(jnp.sum(self.small), jnp.sum(self.large))

  def largest(self) -> jax.Array:
    """Float32 scalar that no number exceeds in magnitude, infinite or NaN where one is."""
    # A rounded sum of squares is no smaller than its largest term; squares below 1e-38 are gone.
    return _norm(jnp.max(self.small), jnp.max(self.large)).value * 1.001 + 1e-18

  def on_host(self) -> np.ndarray:
    """The sums themselves, float64 [R]."""
    with np.errstate(over="ignore"):
      return np.asarray(self.small, np.float64) + np.asarray(self.large, np.float64) * _DOWN**-2


class SoFar(NamedTuple):
  """Of arrays that come part by part: sums of squares of all so far, float32 scalars in the two parts of ``Squares``, and the
  share that they are expected to have of those of all, float32 scalar."""

  small: jax.Array
  large: jax.Array
  share: jax.Array

  @classmethod
  def nothing(cls) -> "SoFar":
    """Before the first part."""
    return cls(*[jnp.zeros((), jnp.float32)] * 3)

  def with_part(self, squares: Squares, share: jax.Array) -> "SoFar":
    """And of one part more, whose own share is ``share``."""
    return SoFar(self.small + jnp.sum(squares.small), self.large + jnp.sum(squares.large), self.share + share)

  def norm(self) -> Norm:
    """Of all of them."""
    return _norm(self.small, self.large)


def _norm(small: jax.Array, large: jax.Array) -> Norm:
  huge = large > 0
  return Norm(jnp.sqrt(jnp.where(huge, large, small)), jnp.where(huge, 1 / _DOWN, 1.0))


def row_squares(tree: Tree) -> Squares:
  """The sums of squares of every layer's array: a stacked leaf gives one number for each of its rows.

  One sum in one pass; where one is not finite, a second pass makes two of it.
  """
  plain = plain_squares(tree)
  return jax.lax.cond(jnp.all(plain.finite), lambda: plain, lambda: split_squares(tree))


def plain_squares(tree: Tree) -> Squares:
  """What ``row_squares`` gives where no square leaves float32; where one does, the sum of its row is infinite."""
  plain = _sums(tree, jnp.square)
  return Squares(plain, jnp.zeros_like(plain))


def sums_of_rows(tree: Tree) -> jax.Array:
  """Float32 [R], the sum of every layer's array."""
  return _sums(tree, lambda x: x)


def split_squares(tree: Tree) -> Squares:
  """What ``row_squares`` gives, without a square that leaves float32 anywhere in the program."""
  return Squares(_sums(tree, lambda x: _terms(x)[0]), _sums(tree, lambda x: _terms(x)[1]))


def squares_of_arrays(tree: Tree, *, rows: bool) -> tuple[Tree, Tree]:
  """What ``split_squares`` gives, as two trees: ``small`` and ``large`` of every array.

  Args:
    tree: of arrays.
    rows: those of stacks have a first axis of layers, which each have a number; False: no array has one.
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
  """What ``small`` and ``large`` of ``Squares`` are the sums of."""
  x = x.astype(jnp.float32)
  beyond = jnp.abs(x) > _LARGE
  # Behind a barrier, since XLA on a GPU writes an array of constant zeros where a loop's sums begin with one alike.
  zero = jax.lax.optimization_barrier(jnp.zeros((), jnp.float32))
  return jnp.square(jnp.where(beyond, zero, x)), jnp.square(jnp.where(beyond, x * _DOWN, zero))


def _pair(over: tuple[int, ...], x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Both sums of an array over these axes."""
  small, large = _terms(x)
  return jnp.sum(small, axis=over), jnp.sum(large, axis=over)


def _pair_in_one_pass(over: tuple[int, ...], x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The same as one reduction: of two a GPU reads the array twice. (A CPU would add one number after the other.)"""
  zeros = (jnp.zeros((), jnp.float32),) * 2
  return jax.lax.reduce(_terms(x), zeros, lambda so_far, more: tuple(map(jnp.add, so_far, more)), over)


def _sums(tree: Tree, terms: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """Float32 [R], ``terms`` of every row summed."""
  together = functools.partial(_sums_of_kernels, terms=terms)
  return jax.lax.platform_dependent(tree, cuda=together, default=lambda tree: _joined(tree, _sum(terms), {}))


def _sums_of_kernels(tree: Tree, terms: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """The same in few kernels: a step has hundreds of these sums, and a GPU takes longer to start most of them than to run.

  Vectors (norms, biases) of one shape are summed together; and what reads the sums reads them from one array, where XLA would
  take a total, a maximum and a test of every part by itself.
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
  """One number of every row in one array: ``of`` (an array, axes), for some arrays of the tree what is known."""
  parts = []
  for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
    over = tuple(range(1, x.ndim)) if _in_stack(path) else None
    if x.dtype.itemsize == 1:  # codes of a quantised weight, which are no numbers of their own; frozen, and looked at when read
      parts.append(jnp.zeros(1 if over is None else x.shape[0], jnp.float32))
    else:
      parts.append(jnp.atleast_1d(known[i] if i in known else of(x, over)))
  return jnp.concatenate(parts)


def _in_stack(path: tuple[Any, ...]) -> bool:
  keys = path_keys(path)
  return keys[keys[0] == ADAPTER].startswith("stack_")  # an adapter repeats the paths of the model


def clip(tree: Tree, norm: Norm, largest: float | jax.Array) -> Tree:
  """The tree in float32, times ``largest / norm`` where the norm is larger.

  Finite numbers stay finite and in proportion, also where their norm is beyond float32.

  Args:
    tree: of arrays.
    norm: of the tree.
    largest: not below 0, nor above 2^79.
  """
  clipped = norm.above(largest)
  # Half of the way down before the factor, which may be large by as much as the unit is, and half behind it.
  down, factor = jnp.where(clipped, 1 / jnp.sqrt(norm.unit), 1.0), jnp.where(clipped, largest / norm.scaled, 1.0)
  return jax.tree.map(lambda x: x.astype(jnp.float32) * down * factor * down, tree)


def largest_clipped(largest: float) -> float:
  """What no number of a tree exceeds that ``clip`` was given: a norm is rounded."""
  return largest * 1.001


def row_labels(decoder: Decoder, tree: Tree) -> list[str]:
  """The parameter names behind the entries of ``row_squares``, as ``layers.7.mlp.down``."""
  return [name for path, _ in jax.tree_util.tree_leaves_with_path(tree) for name in row_names(decoder, path_keys(path))]


def row_peaks(tree: Tree) -> jax.Array:
  """The largest magnitude in every layer's array, float32 [R], infinite where a number is not finite."""
  return _joined(tree, _peak, {})


def state_peaks(opt_state: Tree, params: Tree) -> jax.Array:
  """The largest magnitude in every array of an optimizer state, float32 [R], infinite where a number is not finite.

  Args:
    opt_state: arrays; counters are left out.
    params: the trained parameters: a moment of a stacked one has its rows, but for factored ones.
  """
  peaks = []
  for _, keys, x in _moments(opt_state):
    over = tuple(range(1, x.ndim)) if _stacked(keys, x, params) else None
    peaks.append(jnp.atleast_1d(_peak(x, over)))
  return jnp.concatenate(peaks) if peaks else jnp.zeros(0)


def state_rows(opt_state: Tree, params: Tree) -> int:
  """R of ``state_peaks``."""
  return sum(x.shape[0] if _stacked(keys, x, params) else 1 for _, keys, x in _moments(opt_state))


def _peak(x: jax.Array, over: Axes) -> jax.Array:
  if host_memory.is_there(x):  # a row at a time: all together need not have room on the device
    rows = jax.lax.map(lambda i: _peak(host_memory.row(x, i), None), jnp.arange(x.shape[0]))
    return jnp.max(rows) if over is None else rows
  return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x.astype(jnp.float32)), jnp.inf), axis=over, initial=0.0)


def peaks_of_arrays(opt_state: Tree) -> Tree:
  """The largest magnitude of each array, float32 scalars, infinite where a number is not finite; None for counters."""
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  return jax.tree.map(lambda x: _peak(x, None) if is_float(x) else None, opt_state)


def peaks_of_rows(peaks: Tree, opt_state: Tree, params: Tree) -> jax.Array:
  """What ``state_peaks`` gives, of the peaks of every row.

  Args:
    peaks: float32 [rows] for every array of floats, rows being those of its layer's stack, or 1.
    opt_state, params: as of ``state_peaks``.
  """
  found = []
  for rows, (_, keys, x) in zip(jax.tree.leaves(peaks), _moments(opt_state), strict=True):
    found.append(rows if _stacked(keys, x, params) else jnp.max(rows, keepdims=True))
  return jnp.concatenate(found) if found else jnp.zeros(0)


def state_labels(decoder: Decoder, opt_state: Tree, params: Tree) -> list[str]:
  """The names behind the entries of ``state_peaks``, as ``mu.layers.7.mlp.down`` and ``moment_rows.layers.7.mlp.down``."""
  found = []
  for kind, keys, x in _moments(opt_state):
    names = row_names(decoder, keys) if _stacked(keys, x, params) else [parameter_name(decoder, keys)]
    found += [f"{kind}.{name}" for name in names]
  return found


def _moments(opt_state: Tree) -> list[tuple[str, tuple[str, ...], Any]]:
  """(field of the optimizer's state and factor, path of the parameter, array) of every array of floats."""
  found = []
  for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
    if jnp.issubdtype(x.dtype, jnp.floating):
      own = [i for i, entry in enumerate(path) if isinstance(entry, jax.tree_util.DictKey)]
      kind = [entry.name for entry in path[: own[0]] if isinstance(entry, jax.tree_util.GetAttrKey)]
      factor = [name for name in path_keys(path[own[-1] + 1 :]) if name != "scale"]  # of blocks, which stands for the moment
      found.append(("_".join([kind[-1], *factor]), path_keys(path[own[0] : own[-1] + 1]), x))
  return found


def _stacked(keys: tuple[str, ...], x: Any, params: Tree) -> bool:
  for key in keys:
    params = params[key]
  # As many numbers as the parameter, or fewer along one axis: scales of blocks.
  return keys[0].startswith("stack_") and len(x.shape) == len(params.shape) and x.shape[0] == params.shape[0]
