"""How a stored weight multiplies: the interface between layers and the representation of their weights.

Layers multiply by parameters only through ``product`` and read rows of tables only through ``lookup``. A plain array multiplies
as ``Precision`` says. Any other object in the tree of parameters (a quantized array, or an adapter on top of a weight) is a
``Weight``: a registered pytree with its own product.

The axes that a product sums over are declared in ``Param.contracts`` and follow from the equation of the product
(``Equation.summed``). The axes and shapes of scales and adapters are derived from one of these two.
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
  barrier_on_tpus,
  by_copy,
  on_one_gpu,
  repeated,
  rounded_sum,
  rows_of,
  vary_alike,
  weight_copies,
  zero_after,
)
from maxtext_like.layers.precision import Precision


@dataclass(frozen=True)
class Groups:
  """Rows sorted by the entry of a weight that each is multiplied by, such as tokens sorted by their expert.

  Attributes:
    sizes: int32 [E], number of rows of each entry.
    kernel: name of the grouped kernel.
  """

  sizes: jax.Array
  kernel: Name = "ragged_dot"


@dataclass(frozen=True)
class Product:
  """A product of activations and a weight: everything but the operands. Call it with x and an array or a ``Weight``.

  Attributes:
    precision: selects the dtype of the operands, see ``Precision.einsum``.
    equation: einsum specification with x first, "BTD,DNH->BTNH". With ``groups``, an axis that only the weight has is the axis
      of groups: "MD,EDF->MF" for rows sorted by expert.
    groups: the rows of x that belong to each entry of the weight's first axis.
    out, unbounded, large: as in ``Precision.einsum``. With ``groups`` only ``out`` applies, as in ``Precision.grouped``.
  """

  precision: Precision
  equation: str
  groups: Groups | None = None
  out: str | None = None
  unbounded: bool = False
  large: bool = False

  def __call__(self, x: jax.Array, weight: Any) -> jax.Array:
    # A quantized or adapted weight has its own product.
    if isinstance(weight, Weight):
      return weight.product(self, x)
    # Experts: one matrix per group of rows.
    if self.groups is not None:
      return self.precision.grouped(x, weight, self.groups.sizes, self.groups.kernel, out=self.out)
    flags = {"out": self.out, "unbounded": self.unbounded, "large": self.large}
    return _by_matrix(self.precision, Equation.of(self.equation), x, weight, **flags)


class Weight(abc.ABC):
  """A weight that is not a plain array. A subclass is registered as a pytree; its leaves are the stored and trained arrays."""

  cuts_rows: ClassVar[bool] = False
  """True if a loop over the rows of a stack passes the leaves of all rows and the row's number (``in_row``) to the body,
  instead of the leaves of one row."""

  def in_row(self, number: jax.Array) -> "Weight":
    """Return the weight of one row if the leaves are those of all rows (see ``cuts_rows``)."""
    raise NotImplementedError

  def own_row(self) -> "Weight":
    """Return the weight with only the leaves of this row."""
    return self

  def after(self, x: jax.Array) -> tuple[jax.Array, "Weight"]:
    """Return x and the weight. If the weight's array must be computed, it is computed after x."""
    return x, self

  @abc.abstractmethod
  def product(self, how: Product, x: jax.Array) -> jax.Array:
    """Multiply x by this weight."""

  @abc.abstractmethod
  def lookup(self, precision: Precision, index: jax.Array) -> jax.Array:
    """Read rows; see the function ``lookup``."""

  @abc.abstractmethod
  def values(self, dtype: str) -> jax.Array:
    """Return the array that this weight represents, in ``dtype``."""

  @abc.abstractmethod
  def cast(self, precision: Precision) -> "Weight":
    """Cast the stored arrays; see the function ``cast``."""


def product(
  precision: Precision,
  equation: str,
  x: jax.Array,
  weight: Any,
  *,
  groups: Groups | None = None,
  out: str | None = None,
  unbounded: bool = False,
  large: bool = False,
) -> jax.Array:
  """Multiply x by a weight, an array or a ``Weight``. The other arguments are the attributes of ``Product``."""
  return Product(precision, equation, groups, out, unbounded, large)(x, weight)


def products(
  precision: Precision, equation: str, x: jax.Array, weights: Sequence[Any], *, large: bool = False
) -> list[jax.Array]:
  """Multiply x by several weights.

  On one GPU, plain weights are concatenated and multiplied with one product. The gradient of x is then one product, rounded
  once, instead of a sum of one product for each weight. float8 weights stay separate, because each tensor has its own scale.

  Args:
    precision, x, large: as in ``product``.
    equation: as in ``product``. It holds for every weight; their first axis that x does not have may differ in size.
    weights: arrays or ``Weight``.
  """
  e = Equation.of(equation)
  # Concatenate only plain arrays, on one GPU, in one dtype.
  own = [w.values(precision.dtype) if isinstance(w, Rounded) else w for w in weights]
  apart = len(own) == 1 or not on_one_gpu() or precision.matmul_dtype == "float8"
  if apart or not all(isinstance(w, jax.Array) for w in own):
    return [product(precision, equation, x, w, large=large) for w in weights]
  # Concatenate along the first axis that x does not have, and split the result along it.
  axis = next(a for a in e.weight if a not in e.x)
  at = e.weight.index(axis)
  joined = jnp.concatenate([precision.cast(w) for w in own], axis=at)
  made = product(precision, equation, x, joined, large=large)
  return list(jax.lax.split(made, [w.shape[at] for w in own], e.result.index(axis)))


def lookup(precision: Precision, weight: Any, index: jax.Array) -> jax.Array:
  """Read rows of a table, [*index.shape, ...] in ``dtype``. An index beyond the table is clamped."""
  if isinstance(weight, Weight):
    return weight.lookup(precision, index)
  # On TPUs, the barrier avoids a second copy of the table in another layout.
  (weight,) = barrier_on_tpus(weight)
  copies = weight_copies()
  if copies == 1 or index.shape[0] % copies:
    return precision.cast(rows(weight, index))
  # Each copy of the table looks up its own rows. Its gradients are then added on its own devices first, and the copies last.
  every = by_copy(repeated(weight, copies, 0))
  found = jax.vmap(rows)(every, index.reshape(copies, -1, *index.shape[1:]))
  return precision.cast(found.reshape(*index.shape, *weight.shape[1:]))


def rows(table: jax.Array, index: jax.Array) -> jax.Array:
  """Return table[index]. The gradient of a table row is summed in float32 over all positions that read it, as in PyTorch.

  A token may occur in thousands of positions. A bfloat16 sum stops growing when it is 256 times the summand."""
  # float32 tables need no special gradient.
  if table.dtype.itemsize > 2:
    return table[index]
  like = jax.ShapeDtypeStruct(table.shape, table.dtype)

  @jax.custom_vjp
  def read(table, index):
    return table[index]

  def backward(index, gradient):
    # Scatter-add the gradients of all positions into a float32 table.
    zero, gradient = zero_after(gradient.astype(jnp.float32))
    total = jnp.broadcast_to(zero, like.shape).at[index].add(gradient)
    return rounded_sum(total, like.dtype), None

  read.defvjp(lambda table, index: (table[index], index), backward)
  return read(*vary_alike(table, index))


def values(precision: Precision, weight: Any) -> jax.Array:
  """Return the array that products multiply by, in ``dtype``."""
  return weight.values(precision.dtype) if isinstance(weight, Weight) else precision.cast(weight)


def cast(precision: Precision, weight: Any) -> Any:
  """Cast a weight to the form that products read, before it is sent to other devices. A plain array is cast to ``dtype``."""
  return weight.cast(precision) if isinstance(weight, Weight) else precision.cast(weight)


def cuts_rows(x: Any) -> bool:
  """True if x is a ``Weight`` with ``Weight.cuts_rows``."""
  return isinstance(x, Weight) and x.cuts_rows


def own_rows(weights: Any) -> Any:
  """Return a tree of weights that hold only the leaves of one row. ``shard_map`` needs this form, because it splits
  leaves."""
  return jax.tree.map(lambda w: w.own_row() if cuts_rows(w) else w, weights, is_leaf=cuts_rows)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded(Weight):
  """A plain array together with a copy in the narrower dtype that most products multiply by.

  Attributes:
    stored: the array in its storage dtype.
    narrow: the array rounded to the narrower dtype.
  """

  stored: jax.Array
  narrow: jax.Array

  def _of(self, dtype: str) -> jax.Array:
    return self.narrow if self.narrow.dtype == dtype else self.stored

  def product(self, how: Product, x: jax.Array) -> jax.Array:
    # An unbounded product is float32, so it uses the stored array.
    dtype = how.precision.dtype
    return how(x, self.stored if how.unbounded and dtype == "float16" else self._of(dtype))

  def lookup(self, precision: Precision, index: jax.Array) -> jax.Array:
    return lookup(precision, self.stored, index)

  def values(self, dtype: str) -> jax.Array:
    return self._of(dtype).astype(dtype)

  def cast(self, precision: Precision) -> Any:
    return self.values(precision.dtype)


def unstacked(spec: Spec, params: Any, precision: Precision | None) -> list[Any]:
  """Return the parameters of each layer of an unrolled stack.

  Args:
    spec: spec of the stack.
    params: tree with the structure of the spec; a leaf may be a ``Weight``.
    precision: precision of all layers, if they keep all their inputs until the backward pass. On one GPU, plain weights are
      then rounded to ``dtype`` before they are cut into layers. Their gradients are concatenated in ``dtype`` and become
      float32 where the update reads them. If each layer rounded its own weights, the gradients would be concatenated in
      float32, which takes twice the time. None if layers recompute, so that the rounded weights of all layers are not kept in
      memory, or if the layers differ in dtype.

  Returns:
    The trees of the layers, first to last.
  """
  declared, tree = jax.tree.flatten(spec)
  rounds = precision if on_one_gpu() else None

  def rows(param: Any, weight: Any) -> list[Any]:
    if (
      rounds and param.contracts and isinstance(weight, jax.Array) and weight.dtype.itemsize > jnp.dtype(rounds.dtype).itemsize
    ):
      # Round the complete stack, and cut both copies.
      return [Rounded(*both) for both in zip(rows_of(weight), rows_of(rounds.cast(weight)), strict=True)]
    # Cut every array of the weight into rows.
    leaves, own = jax.tree.flatten(weight)
    return [own.unflatten(row) for row in zip(*map(rows_of, leaves), strict=True)]

  of_each = [rows(p, w) for p, w in zip(declared, tree.flatten_up_to(params), strict=True)]
  return [tree.unflatten(row) for row in zip(*of_each, strict=True)]


@dataclass(frozen=True)
class Equation:
  """The axis letters of an equation "x,weight->result"."""

  x: str
  weight: str
  result: str

  @classmethod
  def of(cls, equation: str) -> "Equation":
    """Parse an equation."""
    operands, result = equation.split("->")
    x, weight = operands.split(",")
    return cls(x, weight, result)

  @property
  def summed(self) -> str:
    """The axes that the product sums over."""
    return "".join(a for a in self.weight if a in self.x and a not in self.result)


def _by_matrix(precision: Precision, e: Equation, x: jax.Array, weight: jax.Array, **how: Any) -> jax.Array:
  """Multiply by a weight of more than two axes as by a matrix: merge neighboring axes that are summed, and those that are
  kept.

  The gradient of the weight is then also a matrix. A TPU adds a matrix over devices with a reduce-scatter, so that each device
  receives its part. For [D, N, H], whose memory layout has D in the middle, it uses an all-reduce. On one device nothing
  is sent, and the product keeps its original form, because merging changes the last digits.
  """
  # Find the runs of summed and of kept axes. Merging needs each run to be contiguous in the other operand or the result too.
  mesh = jax.sharding.get_abstract_mesh()
  runs = ["".join(run) for _, run in itertools.groupby(e.weight, key=lambda axis: axis in e.summed)]
  alike = all(run in (e.x if run[0] in e.summed else e.result) for run in runs)
  if mesh.empty or mesh.size == 1 or len(runs) == len(e.weight) or not alike:
    return precision.einsum(f"{e.x},{e.weight}->{e.result}", x, weight, **how)
  # Replace each run by one axis, multiply, and split the axes of the result again.
  sizes = dict(zip(e.x + e.weight, x.shape + weight.shape, strict=True))
  merged = sizes | {run[0]: math.prod(sizes[axis] for axis in run) for run in runs}
  x_axes, result, matrix = e.x, e.result, "".join(run[0] for run in runs)
  for run in runs:
    x_axes, result = x_axes.replace(run, run[0]), result.replace(run, run[0])
  x, weight = (a.reshape([merged[axis] for axis in axes]) for a, axes in ((x, x_axes), (weight, matrix)))
  return precision.einsum(f"{x_axes},{matrix}->{result}", x, weight, **how).reshape([sizes[axis] for axis in e.result])
