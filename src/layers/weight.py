"""How a stored weight multiplies: the seam between the layers and what their weights are made of.

A layer multiplies its parameters through ``product`` and reads rows of its tables through ``lookup``, never by itself. A plain
array multiplies as ``Precision`` says. Whatever else may stand in its place in the tree of parameters (a quantised array, an
adapter on top of one) is a ``Weight``: a registered pytree that knows how it multiplies.

Which axes of a weight a product sums over stands once for what is stored, ``Param.contracts``, and once for what is computed,
the equation (``Equation.summed``); axes and shapes of scales and adapters follow from either.
"""

import abc
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from maxtext_like.layers.kernels.grouped_matmul.registry import Name
from maxtext_like.layers.param import Spec
from maxtext_like.layers.partition import (
  by_copy,
  on_one_gpu,
  own_zero,
  repeated,
  rounded_sum,
  rows_of,
  together,
  vary_alike,
  weight_copies,
)
from maxtext_like.layers.precision import Precision


@dataclass(frozen=True)
class Groups:
  """Rows that are sorted by the entry of a weight which each is multiplied with, as tokens by their expert.

  Attributes:
    sizes: int32 [E], rows of each entry.
    kernel: what multiplies them.
  """

  sizes: jax.Array
  kernel: Name = "ragged_dot"


class Weight(abc.ABC):
  """A weight that is no plain array. A subclass is registered as a pytree, whose leaves are what is stored and trained."""

  cuts_rows: ClassVar[bool] = False
  """A loop over the rows of a stack hands it all rows' leaves and the row's number (``in_row``), and not its own leaves."""

  def in_row(self, number: jax.Array) -> "Weight":
    """The weight of a row, where the leaves are those of all rows: see ``cuts_rows``."""
    raise NotImplementedError

  def alone(self) -> "Weight":
    """With the leaves of its own row."""
    return self

  def after(self, x: jax.Array) -> tuple[jax.Array, "Weight"]:
    """x, and the weight, whose array is made no sooner than x is there, where it has to be made."""
    return x, self

  @abc.abstractmethod
  def product(
    self,
    precision: Precision,
    equation: str,
    x: jax.Array,
    *,
    groups: Groups | None = None,
    float32: bool = False,
    unbounded: bool = False,
    large: bool = False,
  ) -> jax.Array:
    """See the function of this name."""

  @abc.abstractmethod
  def lookup(self, precision: Precision, index: jax.Array) -> jax.Array:
    """See the function of this name."""

  @abc.abstractmethod
  def values(self, dtype: str) -> jax.Array:
    """The array that it stands for, in a dtype."""

  @abc.abstractmethod
  def cast(self, precision: Precision) -> "Weight":
    """See the function of this name."""


def product(
  precision: Precision,
  equation: str,
  x: jax.Array,
  weight: Any,
  *,
  groups: Groups | None = None,
  float32: bool = False,
  unbounded: bool = False,
  large: bool = False,
) -> jax.Array:
  """x times a weight.

  Args:
    precision: dtype of operands and result, see ``Precision.einsum``.
    equation: as of einsum, x first: "BTD,DNH->BTNH". An axis of the weight alone, with ``groups``, is one of which each row of
      x has its own entry: "MD,EDF->MF" for rows sorted by expert.
    x: activations.
    weight: an array or a ``Weight``.
    groups: which rows of x belong to each entry of the weight's first axis.
    float32, unbounded, large: as of ``Precision.einsum``. With groups there is float32 only, of ``Precision.grouped``.
  """
  how = {"float32": float32, "unbounded": unbounded, "large": large}
  if isinstance(weight, Weight):
    return weight.product(precision, equation, x, groups=groups, **how)
  if groups is not None:
    return precision.grouped(x, weight, groups.sizes, groups.kernel, float32=float32)
  return _by_matrix(precision, Equation.of(equation), x, weight, **how)


def products(
  precision: Precision, equation: str, x: jax.Array, weights: Sequence[Any], *, large: bool = False
) -> list[jax.Array]:
  """x times several weights.

  On one GPU plain weights stand side by side and multiply at once. The gradient of x is one product then, rounded once, in
  place of one for each weight and additions. float8 has a scale for each tensor, and so keeps them apart.

  Args:
    precision, x, large: as of ``product``.
    equation: as of ``product``, of any of them; they may differ in the first axis that x has not got.
    weights: arrays or ``Weight``.
  """
  e = Equation.of(equation)
  own = [w.values(precision.dtype) if isinstance(w, Rounded) else w for w in weights]
  apart = len(own) == 1 or not on_one_gpu() or precision.matmul_dtype == "float8"
  if apart or not all(isinstance(w, jax.Array) for w in own):
    return [product(precision, equation, x, w, large=large) for w in weights]
  axis = next(a for a in e.weight if a not in e.x)
  at = e.weight.index(axis)
  beside = jnp.concatenate([precision.cast(w) for w in own], axis=at)
  made = product(precision, equation, x, beside, large=large)
  return list(jax.lax.split(made, [w.shape[at] for w in own], e.result.index(axis)))


def lookup(precision: Precision, weight: Any, index: jax.Array) -> jax.Array:
  """Rows of a table by their numbers, [*index.shape, ...] in ``dtype``; an index beyond the table is clamped."""
  if isinstance(weight, Weight):
    return weight.lookup(precision, index)
  (weight,) = together(weight)
  copies = weight_copies()
  if copies == 1 or index.shape[0] % copies:
    return precision.cast(rows(weight, index))
  # Each copy of the table gives its own rows, so that the gradients of each are added up where it lies, and then those of all.
  every = by_copy(repeated(weight, copies, 0))
  found = jax.vmap(rows)(every, index.reshape(copies, -1, *index.shape[1:]))
  return precision.cast(found.reshape(*index.shape, *weight.shape[1:]))


def rows(table: jax.Array, index: jax.Array) -> jax.Array:
  """table[index]. The gradient of a row adds up in float32 over all places that read it, as PyTorch's does: a token may stand
  in thousands, and a sum in bfloat16 grows no further once it is 256 times what is added."""
  if table.dtype.itemsize > 2:
    return table[index]
  like = jax.ShapeDtypeStruct(table.shape, table.dtype)

  @jax.custom_vjp
  def read(table, index):
    return table[index]

  def backward(index, gradient):
    zero, gradient = own_zero(gradient.astype(jnp.float32))
    total = jnp.broadcast_to(zero, like.shape).at[index].add(gradient)
    return rounded_sum(total, like.dtype), None

  read.defvjp(lambda table, index: (table[index], index), backward)
  return read(*vary_alike(table, index))


def values(precision: Precision, weight: Any) -> jax.Array:
  """The array that products multiply by, in ``dtype``."""
  return weight.values(precision.dtype) if isinstance(weight, Weight) else precision.cast(weight)


def cast(precision: Precision, weight: Any) -> Any:
  """The weight as products read it, before it travels to the devices that do: in ``dtype``, if it is a plain array."""
  return weight.cast(precision) if isinstance(weight, Weight) else precision.cast(weight)


def cuts_rows(x: Any) -> bool:
  """Whether it is a weight that does: see ``Weight.cuts_rows``."""
  return isinstance(x, Weight) and x.cuts_rows


def alone(weights: Any) -> Any:
  """A tree of weights, each with the leaves of its own row: what enters ``shard_map``, which splits leaves."""
  return jax.tree.map(lambda w: w.alone() if cuts_rows(w) else w, weights, is_leaf=cuts_rows)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded(Weight):
  """A plain array beside itself in the narrower dtype that most products multiply by.

  Attributes:
    stored: as it is.
    narrow: rounded.
  """

  stored: jax.Array
  narrow: jax.Array

  def _of(self, dtype: str) -> jax.Array:
    return self.narrow if self.narrow.dtype == dtype else self.stored

  def product(self, precision: Precision, equation: str, x: jax.Array, *, unbounded: bool = False, **how: Any) -> jax.Array:
    own = self.stored if unbounded and precision.dtype == "float16" else self._of(precision.dtype)
    return product(precision, equation, x, own, unbounded=unbounded, **how)

  def lookup(self, precision: Precision, index: jax.Array) -> jax.Array:
    return lookup(precision, self.stored, index)

  def values(self, dtype: str) -> jax.Array:
    return self._of(dtype).astype(dtype)

  def cast(self, precision: Precision) -> Any:
    return self.values(precision.dtype)


def unstacked(spec: Spec, params: Any, precision: Precision | None) -> list[Any]:
  """The parameters of each layer of a stack that is unrolled.

  Args:
    spec: of the stack.
    params: of the same structure; in the place of an array there may be a ``Weight``.
    precision: of all layers, if they keep what they read until the backward pass: on one GPU plain weights are rounded to
      ``dtype`` while they are stacked, so that their gradients are put together in ``dtype`` too, as they are made, and become
      float32 where the update reads them. Rounded layer by layer they would be put together in float32, which takes twice
      the time. None: layers keep less, and the rounded weights of all of them are not to be kept either; or their dtypes
      differ.

  Returns:
    The trees of the layers, first to last.
  """
  declared, tree = jax.tree.flatten(spec)
  rounds = precision if on_one_gpu() else None

  def rows(param: Any, weight: Any) -> list[Any]:
    if (
      rounds and param.contracts and isinstance(weight, jax.Array) and weight.dtype.itemsize > jnp.dtype(rounds.dtype).itemsize
    ):
      return [Rounded(*both) for both in zip(rows_of(weight), rows_of(rounds.cast(weight)), strict=True)]
    leaves, own = jax.tree.flatten(weight)
    return [own.unflatten(row) for row in zip(*map(rows_of, leaves), strict=True)]

  of_each = [rows(p, w) for p, w in zip(declared, tree.flatten_up_to(params), strict=True)]
  return [tree.unflatten(row) for row in zip(*of_each, strict=True)]


@dataclass(frozen=True)
class Equation:
  """The letters of "x,weight->result"."""

  x: str
  weight: str
  result: str

  @classmethod
  def of(cls, equation: str) -> "Equation":
    """Taken apart."""
    operands, result = equation.split("->")
    x, weight = operands.split(",")
    return cls(x, weight, result)

  @property
  def summed(self) -> str:
    """The axes that the product sums over."""
    return "".join(a for a in self.weight if a in self.x and a not in self.result)


def _by_matrix(precision: Precision, e: Equation, x: jax.Array, weight: jax.Array, **how: bool) -> jax.Array:
  """The product by a weight of more than two axes as one by a matrix: neighbours that it sums over are one axis of it, and
  neighbours that it hands on are the other.

  For the gradient's sake, which is a matrix then too. Of a matrix a TPU leaves each device its part of the sum over devices;
  of [D, N, H], whose layout has D in the middle, it sends all of them the whole. One device has nothing to send, and keeps the
  product as it stands, whose last digits are others.
  """
  mesh = jax.sharding.get_abstract_mesh()
  runs = ["".join(run) for _, run in itertools.groupby(e.weight, key=lambda axis: axis in e.summed)]
  alike = all(run in (e.x if run[0] in e.summed else e.result) for run in runs)
  if mesh.empty or mesh.size == 1 or len(runs) == len(e.weight) or not alike:
    return precision.einsum(f"{e.x},{e.weight}->{e.result}", x, weight, **how)
  sizes = dict(zip(e.x + e.weight, x.shape + weight.shape, strict=True))
  merged = sizes | {run[0]: math.prod(sizes[axis] for axis in run) for run in runs}
  x_axes, result, matrix = e.x, e.result, "".join(run[0] for run in runs)
  for run in runs:
    x_axes, result = x_axes.replace(run, run[0]), result.replace(run, run[0])
  x, weight = (a.reshape([merged[axis] for axis in axes]) for a, axes in ((x, x_axes), (weight, matrix)))
  return precision.einsum(f"{x_axes},{matrix}->{result}", x, weight, **how).reshape([sizes[axis] for axis in e.result])
