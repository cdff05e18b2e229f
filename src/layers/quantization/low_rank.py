"""Low-rank adapters of a weight: LoRA (Hu et al. 2021), ``W + scale * A B``, and DoRA (Liu et al. 2024), which also trains the
norm of each output, ``m * (W + scale * A B) / |W + scale * A B|``.

An adapted weight replaces the weight in the tree of parameters, so layers do not change. The factors follow from the ``Param``
of the weight: A has the axes that products sum over, B the other ones. Each expert has its own factors.

R rank. A is [*groups, *summed, R], B is [*groups, R, *kept], magnitudes are [*groups, *kept]. ``groups`` is the axis of
experts, if the weight has one.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.dropout import Dropout
from maxtext_like.layers.param import Param, constant, fan_in, stack
from maxtext_like.layers.partition import joint_gradients
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.weight import Equation, Product, Weight, cast, lookup, values

LETTERS = "abcdefg"


@dataclass(frozen=True)
class Layout:
  """The axes of a weight that each factor has.

  Attributes:
    rank: number of axes of the weight, for one layer.
    summed: axes that products sum over.
    grouped: the first axis is that of experts.
  """

  rank: int
  summed: tuple[int, ...]
  grouped: bool

  @classmethod
  def of(cls, p: Param) -> "Layout":
    """Create the layout of a declared weight.

    Raises:
      ValueError: no product multiplies by it.
    """
    own = one_layer(p)
    if not own.contracts:
      raise ValueError(
        f"adapter: an array with the axes {own.axes} is not multiplied by anything, so it cannot have a low-rank adapter"
      )
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
  """Return the declaration without the axis of a stack."""
  return p if p.rows is None else dataclasses.replace(p, shape=p.shape[1:], axes=p.axes[1:], rows=None)


def factors(p: Param, rank: int, *, dora: bool = False) -> dict[str, Param]:
  """Declare the factors of a weight: "lora_a", with initial values for its number of inputs, and "lora_b", zeros; all float32.

  Args:
    p: the weight, of one layer or stacked.
    rank: R.
    dora: add "lora_magnitude". Its initial value is the norm of the weight (``LowRank.norms``), which the caller must set.
  """
  own, layout = one_layer(p), Layout.of(p)
  pick = lambda of, axes: tuple(of[i] for i in axes)
  # A has the summed axes and the rank, B the rank and the kept axes.
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
  if dora:
    # DoRA has one magnitude per output.
    outputs = (*layout.group, *layout.kept)
    spec["lora_magnitude"] = Param(pick(own.shape, outputs), pick(own.axes, outputs), "float32", constant(1.0))
  return spec if p.rows is None else stack(spec, p.rows)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank(Weight):
  """base + scale * a b.

  Attributes:
    base: an array or a ``Weight``.
    a, b: float32, see ``factors``.
    layout: the axes of the factors.
    scale: alpha / R, or alpha / sqrt(R) (Kalajdzievski 2023).
    magnitude: float32, the trained norm of each output (DoRA); None: the norm is not changed.
    dropout: dropout of the input of a, in training. It does not apply to looked-up rows.
  """

  base: Any
  a: jax.Array
  b: jax.Array
  layout: Layout = dataclasses.field(metadata={"static": True})
  scale: float = dataclasses.field(metadata={"static": True})
  magnitude: jax.Array | None = None
  dropout: Dropout | None = None

  def product(self, how: Product, x: jax.Array) -> jax.Array:
    """Add the low-rank product to that of the base.

    The intermediate result is float32, because a float16 one could overflow. With groups it is float32 only if the sums are.
    The two products are small, so ``matmul_dtype`` does not apply to them."""
    # Find the letters of each factor in the equation.
    e, groups = Equation.of(how.equation), how.groups
    group = "".join(e.weight[i] for i in self.layout.group)
    summed = "".join(e.weight[i] for i in self.layout.summed)
    kept = "".join(e.weight[i] for i in self.layout.kept)
    inner = "".join(c for c in e.x if c not in summed) + "r"
    to_inner = f"{e.x},{group}{summed}r->{inner}"
    by_a = dataclasses.replace(how, equation=to_inner, out="float32" if groups is None else how.out, large=False)
    by_b = dataclasses.replace(how, equation=f"{inner},{group}r{kept}->{e.result}", large=False)
    # Multiply by a and by b, and add the product of the base.
    scale = self.scale if self.dropout is None else self.scale / (1 - self.dropout.rate)
    with jax.named_scope("lora"):
      seen = x if self.dropout is None else self.dropout(x)
      seen, a = joint_gradients(seen, self.a)
      low = by_a(seen, a) * scale
      low, b = joint_gradients(low, self.b)
      added = by_b(low, b)
    total = how(x, self.base) + added
    if self.magnitude is None:
      return total
    # DoRA: scale each output to its magnitude. This rounds a second time, by a factor of about one.
    with jax.named_scope("dora"):
      own = self
      # A quantized base is dequantized a second time for its norms, after the product, instead of keeping its values.
      if isinstance(self.base, Weight):
        own = dataclasses.replace(self, base=self.base.after(jax.lax.stop_gradient(total))[1])
      factor = own._factor(how.precision)
      if groups is not None:  # each row has the factor of its expert
        factor = jnp.repeat(factor, groups.sizes, axis=0, total_repeat_length=total.shape[0])
      else:
        factor = factor[tuple(slice(None) if c in group + kept else None for c in e.result if c != ".")]
      return (total.astype(jnp.float32) * factor).astype(total.dtype)

  def _factor(self, precision: Precision) -> jax.Array:
    """Return float32 [*groups, *kept]: the factor that gives each output its magnitude."""
    assert self.magnitude is not None
    return self.magnitude / self.norms(precision)

  def norms(self, precision: Precision) -> jax.Array:
    """Return float32 [*groups, *kept]: the norm of each output of base + scale * a b, or 1 if it is zero.

    No gradient passes through it, as in the paper (4.3). The norm is computed without the sum, to save an array of the size
    of the weight: |w + s A b|^2 = |w|^2 + 2 s (A^T w) b + s^2 b^T (A^T A) b.
    """
    base, a, b = jax.lax.stop_gradient((self.base, self.a, self.b))
    # The three terms of the square: cross term, adapter, base.
    w = values(precision, base)
    letters = LETTERS[: self.layout.rank]
    group, summed, kept = (
      "".join(letters[i] for i in axes) for axes in (self.layout.group, self.layout.summed, self.layout.kept)
    )
    crossed = self._crossed(precision, a, w)
    inner = jnp.einsum(f"{group}{summed}r,{group}{summed}q->{group}rq", a, a, precision="highest")
    total = crossed * 2 + self.scale * jnp.einsum(f"{group}rq,{group}q{kept}->{group}r{kept}", inner, b, precision="highest")
    own = jnp.sum(jnp.square(w.astype(jnp.float32)), axis=self.layout.summed)
    squares = own + self.scale * jnp.sum(b * total, axis=len(group))
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 1)

  def _crossed(self, precision: Precision, a: jax.Array, w: jax.Array) -> jax.Array:
    """Compute A^T w, float32 [*groups, rank, *kept], with matrices.

    XLA for CPUs (JAX 0.10 to 0.12) fails with "Unsupported element type for DotThunk" on bfloat16 arrays with more axes if
    the first axis is summed and the result is float32."""
    # Reshape both factors to matrices, multiply, and restore the kept axes.
    group, summed, kept = self.layout.group, self.layout.summed, self.layout.kept
    sizes = lambda axes: [w.shape[i] for i in axes]
    inputs = math.prod(sizes(summed))
    matrix = w.transpose(*group, *summed, *kept).reshape(*sizes(group), inputs, math.prod(sizes(kept)))
    a = a.reshape(*sizes(group), inputs, a.shape[-1])
    crossed = precision.einsum("gsr,gsk->grk" if group else "sr,sk->rk", a, matrix, out="float32")
    return crossed.reshape(*crossed.shape[:-1], *sizes(kept))

  def lookup(self, precision: Precision, index: jax.Array) -> jax.Array:
    """Read rows of the table, and add those of the adapter."""
    # The table's rows are an axis of B if products sum over its columns, else of A.
    by_row = 0 not in self.layout.summed
    rows = jnp.moveaxis(self.b[:, index], 0, -1) if by_row else self.a[index]
    other = jnp.moveaxis(self.a, -1, 0) if by_row else self.b
    out = lookup(precision, self.base, index) + precision.cast(jnp.tensordot(rows, other, 1) * self.scale)
    if self.magnitude is None:
      return out
    factor = self._factor(precision)
    factor = factor[index].reshape(*index.shape, *(1,) * (out.ndim - index.ndim)) if by_row else factor
    return precision.cast(out.astype(jnp.float32) * factor)

  def values(self, dtype: str) -> jax.Array:
    """Return the sum of base and adapter in a dtype."""
    return merged(
      values(Precision(dtype="float32"), self.base), self.a, self.b, self.layout, self.scale, self.magnitude
    ).astype(dtype)

  def cast(self, precision: Precision) -> "LowRank":
    """Cast the base to ``dtype``. The products cast the factors."""
    return dataclasses.replace(self, base=cast(precision, self.base))


def merged(
  base: jax.Array, a: jax.Array, b: jax.Array, layout: Layout, scale: float, magnitude: jax.Array | None = None
) -> jax.Array:
  """Return the sum of base and adapter, float32. All arguments may have a leading axis of layers."""
  letters = LETTERS[: layout.rank]
  pick = lambda axes: "".join(letters[i] for i in axes)
  group = pick(layout.group)
  spec = f"...{group}{pick(layout.summed)}r,...{group}r{pick(layout.kept)}->...{letters}"
  total = base.astype(jnp.float32) + scale * jnp.einsum(spec, a, b, precision="highest")
  return total if magnitude is None else with_magnitude(total, layout, magnitude)


def with_magnitude(total: jax.Array, layout: Layout, magnitude: jax.Array) -> jax.Array:
  """Scale the outputs of a float32 weight to the norms of ``magnitude``. Both may have a leading axis of layers."""
  # Norm over the inputs of each output, counted from the last axis because of a possible axis of layers.
  axes = tuple(i - layout.rank for i in layout.summed)
  norms = jnp.sqrt(jnp.sum(jnp.square(total), axis=axes, keepdims=True))
  return total * (jnp.expand_dims(magnitude, axes) / jnp.where(norms > 0, norms, 1))
