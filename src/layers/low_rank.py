"""A weight with a trained low-rank addition: LoRA (Hu et al. 2021), ``W + scale * A B``.

It stands in the tree of parameters where the weight stood, so that no layer knows of it. The factors of every weight follow
from its ``Param``: the axes that products sum over go to A, the others to B, and experts have factors of their own.

R rank. [*groups, *summed, R] and [*groups, R, *kept]: ``groups`` is the axis of experts, where a weight has one.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.param import Param, constant, fan_in, stack
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.weight import Equation, Groups, Weight, cast, lookup, product

LETTERS = "abcdefg"


@dataclass(frozen=True)
class Layout:
  """How the axes of a weight are divided between its factors.

  Attributes:
    rank: number of axes of the weight, in one layer.
    summed: those that its products sum over.
    grouped: the first axis is that of experts.
  """

  rank: int
  summed: tuple[int, ...]
  grouped: bool

  @classmethod
  def of(cls, p: Param) -> "Layout":
    """That of a declared weight.

    Raises:
      ValueError: nothing is multiplied by it.
    """
    own = one_layer(p)
    if not own.contracts:
      raise ValueError(f"an array of the axes {own.axes} multiplies nothing, and can have no low-rank addition")
    return cls(len(own.shape), own.contracts, own.axes[0] == "expert")

  @property
  def group(self) -> tuple[int, ...]:
    """The axis of experts."""
    return (0,) if self.grouped else ()

  @property
  def kept(self) -> tuple[int, ...]:
    """The axes of a product's result."""
    return tuple(i for i in range(self.rank) if i not in (*self.group, *self.summed))


def one_layer(p: Param) -> Param:
  """The same without the axis of a stack."""
  return p if p.rows is None else dataclasses.replace(p, shape=p.shape[1:], axes=p.axes[1:], rows=None)


def factors(p: Param, rank: int) -> dict[str, Param]:
  """The declared factors of a weight: "lora_a", drawn as wide as its inputs, and "lora_b", zeros; both float32.

  Args:
    p: the weight, of one layer or stacked.
    rank: R.
  """
  own, layout = one_layer(p), Layout.of(p)
  pick = lambda of, axes: tuple(of[i] for i in axes)
  a, b = (*layout.group, *layout.summed), layout.kept
  inputs = tuple(range(len(layout.group), len(a)))
  spec = {
    "lora_a": Param((*pick(own.shape, a), rank), (*pick(own.axes, a), None), "float32", fan_in(*inputs)),
    "lora_b": Param(
      (*pick(own.shape, layout.group), rank, *pick(own.shape, b)),
      (*pick(own.axes, layout.group), None, *pick(own.axes, b)),
      "float32",
      constant(0.0),
    ),
  }
  return spec if p.rows is None else stack(spec, p.rows)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank(Weight):
  """base + scale * a b.

  Attributes:
    base: an array or a ``Weight``.
    a, b: float32, see ``factors``.
    layout: which axes are whose.
    scale: alpha / R, or alpha / sqrt(R) (Kalajdzievski 2023).
  """

  base: Any
  a: jax.Array
  b: jax.Array
  layout: Layout = dataclasses.field(metadata={"static": True})
  scale: float = dataclasses.field(metadata={"static": True})

  def product(
    self,
    precision: Precision,
    equation: str,
    x: jax.Array,
    *,
    groups: Groups | None = None,
    float32: bool = False,
    unbounded: bool = False,
  ) -> jax.Array:
    """The two products beside the base's. What stands between them is float32 where groups allow it: in float16 it is no
    more bounded than the base's result."""
    e = Equation.of(equation)
    group = "".join(e.weight[i] for i in self.layout.group)
    summed = "".join(e.weight[i] for i in self.layout.summed)
    kept = "".join(e.weight[i] for i in self.layout.kept)
    inner = "".join(c for c in e.x if c not in summed) + "r"
    wide = {} if groups is not None else {"float32": True, "unbounded": unbounded}
    given = {"groups": groups, "float32": float32, "unbounded": unbounded}
    with jax.named_scope("lora"):
      low = product(precision, f"{e.x},{group}{summed}r->{inner}", x, self.a, groups=groups, **wide) * self.scale
      added = product(precision, f"{inner},{group}r{kept}->{e.result}", low, self.b, **given)
    return product(precision, equation, x, self.base, **given) + added

  def lookup(self, precision: Precision, index: jax.Array) -> jax.Array:
    """Rows of the table and of the addition."""
    rows = self.a[index] if 0 in self.layout.summed else jnp.moveaxis(self.b[:, index], 0, -1)
    if 0 in self.layout.summed:
      added = jnp.tensordot(rows, self.b, 1)
    else:
      added = jnp.tensordot(rows, jnp.moveaxis(self.a, -1, 0), 1)
    return lookup(precision, self.base, index) + precision.cast(added * self.scale)

  def cast(self, precision: Precision) -> "LowRank":
    """The base in ``dtype``; the factors are cast by their products."""
    return dataclasses.replace(self, base=cast(precision, self.base))


def merged(base: jax.Array, a: jax.Array, b: jax.Array, layout: Layout, scale: float) -> jax.Array:
  """The weight that base and addition stand for, float32; a stack's rows lead in all three."""
  letters = LETTERS[: layout.rank]
  pick = lambda axes: "".join(letters[i] for i in axes)
  group = pick(layout.group)
  spec = f"...{group}{pick(layout.summed)}r,...{group}r{pick(layout.kept)}->...{letters}"
  return base.astype(jnp.float32) + scale * jnp.einsum(spec, a, b, precision="highest")
