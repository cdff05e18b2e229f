"""Weights in 4, 8 or 16 bits that stay as they are: what is stored, how it is made of a weight, and what it stands for.

What is stored follows from the ``Param`` of the weight. Every expert, and every layer of a stack, is quantised by itself, as
the files of a checkpoint have them apart. A product dequantises the weight to ``dtype``, and its backward pass once more, so
that nothing but the codes is kept between the two.

K all inputs (axes that products sum over) as one axis, M all outputs, E experts, B blocks along K.
"""

import abc
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxtext_like.layers.param import Param, constant, stack
from maxtext_like.layers.partition import as_stored
from maxtext_like.layers.precision import PRODUCT, Precision
from maxtext_like.layers.quantization.low_rank import Layout, one_layer
from maxtext_like.layers.sharding_rules import RULES, Rules
from maxtext_like.layers.weight import Groups, Weight, product

FormName = Literal["bfloat16", "nf4", "int8", "fp8_block"]
Arrays = dict[str, jax.Array]

CODES = "codes"
"""The one array that every form has, of the weight's own axes; the others say what it means."""
SCALES = "scales"

NF4 = np.array(
  [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
  ],
  np.float32,
)  # fmt: skip
"""The 16 numbers of NormalFloat (Dettmers et al. 2023, appendix E)."""


def dynamic_map() -> np.ndarray:
  """float32 [256]: the numbers that block maxima are rounded to (the signed dynamic type of Dettmers 2016, as in QLoRA).

  For every power of ten down to 1e-6 the middles of so many equal parts of [0.1, 1] as its bits leave, both signs; 0 and 1.
  """
  low, high, positive = np.float32(0.1), np.float32(1), []
  for exponent in range(7):
    parts = 2**exponent
    step, number = np.float64((high - low) / np.float32(parts)), np.arange(parts + 1)
    # From the nearer end, and rounded once, as torch does: these numbers are the same to the last bit.
    bounds = np.where(number < (parts + 1) // 2, low + step * number, high - step * (parts - number)).astype(np.float32)
    positive.append(np.float32(10.0 ** (exponent - 6)) * ((bounds[:-1] + bounds[1:]) / np.float32(2)))
  values = np.concatenate(positive)
  return np.sort(np.concatenate([-values, np.array([0, 1], np.float32), values])).astype(np.float32)


def dynamic_number(code: jax.Array) -> jax.Array:
  """float32 entries of ``dynamic_map``, computed to 4e-7 of each: without a gather, which a TPU has no unit for."""
  code = code.astype(jnp.int32)
  number = jnp.abs(code - 127)  # 0, and 1 to 127 for both signs; 128 is 1
  zero = _zero(code)
  low, step, exponent = zero, zero, 0
  for exponent in range(7):
    here, unit = number >= 2**exponent, 10.0 ** (exponent - 6)
    low = jnp.where(here, zero + (unit * (0.1 + 0.45 * 2.0**-exponent) - unit * 0.9), low)
    step = jnp.where(here, zero + unit * 0.9 * 2.0**-exponent, step)
  value = jnp.where(number == 128, zero + 1.0, low + step * number)
  return jnp.where(code < 127, -value, value)


@dataclass(frozen=True)
class Plan:
  """A weight's axes as quantisation sees them: experts, inputs, outputs.

  Attributes:
    experts: E, or () where there are none.
    inputs, outputs: sizes.
    axes: logical axes of (the experts,) the inputs and the outputs: of the first of each, which is split if any is.
  """

  experts: tuple[int, ...]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  axes: tuple[str | None, ...]

  @classmethod
  def of(cls, p: Param) -> "Plan":
    """That of a declared weight, of one layer or stacked.

    Raises:
      ValueError: it is no map from inputs to outputs, as a table.
    """
    own, layout = one_layer(p), Layout.of(p)
    lead = len(layout.group)
    by_rows = own.axes[0] == "vocab"  # whichever of its axes an addition to it sums over
    if by_rows or layout.summed != tuple(range(lead, lead + len(layout.summed))) or not layout.kept:
      raise ValueError(f"an array of the axes {own.axes} is a table and no map, and cannot be quantised")
    pick = lambda axes: tuple(own.shape[i] for i in axes)
    names = tuple(own.axes[i] for i in (*layout.group, layout.summed[0], layout.kept[0]))
    return cls(pick(layout.group), pick(layout.summed), pick(layout.kept), names)

  @property
  def K(self) -> int:
    """Inputs."""
    return math.prod(self.inputs)

  @property
  def M(self) -> int:
    """Outputs."""
    return math.prod(self.outputs)

  def matrix(self, x: jax.Array) -> jax.Array:
    """[E?, K, M] of a weight as it is declared, whose number of experts is its own."""
    return x.reshape(*x.shape[: len(self.experts)], self.K, self.M)

  def declared(self, x: jax.Array) -> jax.Array:
    """The opposite."""
    return x.reshape(*x.shape[: len(self.experts)], *self.inputs, *self.outputs)

  @property
  def input(self) -> int:
    """The axis of K in ``matrix``."""
    return len(self.experts)


@dataclass(frozen=True)
class Form(abc.ABC):
  """A way to store weights."""

  name: ClassVar[FormName]
  input_block: ClassVar[int] = 1
  """Inputs that share a number, which no mesh axis may part that a product's sum or result is split over."""
  output_block: ClassVar[int] = 1
  """The same of outputs, all of them as one axis."""

  @abc.abstractmethod
  def params(self, plan: Plan) -> dict[str, Param]:
    """What is stored of a weight of one layer."""

  @abc.abstractmethod
  def quantise(self, plan: Plan, x: jax.Array) -> Arrays:
    """Of a weight [E?, K, M] in float32."""

  @abc.abstractmethod
  def values(self, plan: Plan, stored: Arrays, dtype: str) -> jax.Array:
    """[E?, K, M] in a dtype, rounded once."""


def _stored(plan: Plan, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: str) -> Param:
  lead = len(plan.experts)
  return Param((*plan.experts, *shape), (*plan.axes[:lead], *axes), dtype, constant(0), trainable=False)


def _blocks(size: int, block: int) -> int:
  return -(-size // block)


def _padded(x: jax.Array, axis: int, block: int) -> jax.Array:
  """With zeros up to a whole number of blocks."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, -x.shape[axis] % block)
  return jnp.pad(x, widths) if widths[axis][1] else x


def _spread(x: jax.Array, axis: int, block: int, size: int) -> jax.Array:
  """Each entry of an axis so many times, and of that the first ``size``; a view, where a gather would be slow."""
  shape = (*x.shape[: axis + 1], block, *x.shape[axis + 1 :])
  wide = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
  return wide if wide.shape[axis] == size else jax.lax.slice_in_dim(wide, 0, size, axis=axis)


def _nonzero(x: jax.Array) -> jax.Array:
  return jnp.where(x == 0, 1, x)


def _sum(x: jax.Array) -> jax.Array:
  """Of the last axis, pair by pair: the same bits on every kind of device."""
  while x.shape[-1] > 1:
    x = _padded(x, x.ndim - 1, 2)
    x = x[..., ::2] + x[..., 1::2]
  return x[..., 0]


def _nearest(x: jax.Array, codebook: np.ndarray) -> jax.Array:
  """uint8 numbers of the nearest entries of a sorted codebook."""
  middles = ((codebook[:-1].astype(np.float64) + codebook[1:]) / 2).astype(np.float32)
  if len(codebook) <= 16:
    return sum(((x > middle).astype(jnp.uint8) for middle in middles), jnp.zeros(x.shape, jnp.uint8))
  return jnp.searchsorted(jnp.asarray(middles), x).astype(jnp.uint8)


def _zero(codes: jax.Array) -> jax.Array:
  """float32 zero, to add to a constant among all codes: jax takes what depends on nothing out of a loop that it differentiates,
  at full size, and a GPU would keep and read an array in the place of every constant. XLA knows it for a zero."""
  return (codes[(0,) * codes.ndim] & 0).astype(jnp.float32)


def _chosen(codes: jax.Array, codebook: np.ndarray) -> jax.Array:
  """float32 entries of a codebook of 16, by halves, which is no gather either."""
  entries: list[Any] = [_zero(codes) + value for value in codebook]
  for bit in range(4):
    high = (codes >> bit) & 1 == 1
    entries = [jnp.where(high, b, a) for a, b in zip(entries[::2], entries[1::2], strict=True)]
  return entries[0]


@dataclass(frozen=True)
class BFloat16Form(Form):
  """16 bits each, as most checkpoints come."""

  name: ClassVar[FormName] = "bfloat16"

  def params(self, plan: Plan) -> dict[str, Param]:
    return {CODES: _stored(plan, (plan.K, plan.M), plan.axes[plan.input :], "bfloat16")}

  def quantise(self, plan: Plan, x: jax.Array) -> Arrays:
    return {CODES: x.astype(jnp.bfloat16)}

  def values(self, plan: Plan, stored: Arrays, dtype: str) -> jax.Array:
    return stored[CODES].astype(dtype)


@dataclass(frozen=True)
class NF4Form(Form):
  """4 bits each, one of 16 numbers times the largest of a block of 64 inputs (QLoRA, Dettmers et al. 2023).

  Double quantisation, as bitsandbytes has it: those maxima, less their mean, are 8 bits of ``dynamic_map`` times the largest of
  256 of them, counted through the inputs of the first output, then of the next. 4.127 bits a weight.
  """

  name: ClassVar[FormName] = "nf4"
  input_block: ClassVar[int] = 64
  maxima: ClassVar[int] = 256

  def params(self, plan: Plan) -> dict[str, Param]:
    B, axes = _blocks(plan.K, self.input_block), plan.axes[plan.input :]
    return {
      CODES: _stored(plan, (B * self.input_block // 2, plan.M), axes, "uint8"),
      SCALES: _stored(plan, (B, plan.M), axes, "uint8"),
      "scale_scales": _stored(plan, (_blocks(B * plan.M, self.maxima),), (None,), "float32"),
      "scale_mean": _stored(plan, (), (), "float32"),
    }

  def quantise(self, plan: Plan, x: jax.Array) -> Arrays:
    axis, lead, B = plan.input, x.shape[: plan.input], _blocks(plan.K, self.input_block)
    x = _padded(x, axis, self.input_block).reshape(*lead, B, self.input_block, plan.M)
    largest = jnp.max(jnp.abs(x), axis=axis + 1)
    codes = _nearest(x * jnp.expand_dims(1 / _nonzero(largest), axis + 1), NF4)
    # A byte has inputs i and i + 32 of a block: its halves lie apart as tiles of a TPU do, and nothing is woven together again.
    first, second = jnp.split(codes, 2, axis=axis + 1)
    listed = jnp.swapaxes(largest, axis, axis + 1).reshape(*lead, -1)
    total = _sum(listed)
    # A number that no compiler knows: by a known one it multiplies, and leaves out a rounding where the mean is taken off.
    mean = total / (listed.shape[-1] + 0 * total)
    centred = _padded(listed - mean[..., None], axis, self.maxima).reshape(*lead, -1, self.maxima)
    most = jnp.max(jnp.abs(centred), axis=-1)
    rounded = _nearest(centred * (1 / _nonzero(most))[..., None], dynamic_map()).reshape(*lead, -1)[..., : B * plan.M]
    scales = jnp.swapaxes(rounded.reshape(*lead, plan.M, B), axis, axis + 1)
    return {
      CODES: (first << 4 | second).reshape(*lead, -1, plan.M), SCALES: scales, "scale_scales": most, "scale_mean": mean
    }  # fmt: skip

  def values(self, plan: Plan, stored: Arrays, dtype: str) -> jax.Array:
    axis, B = plan.input, _blocks(plan.K, self.input_block)
    codes, lead = stored[CODES], stored[CODES].shape[: plan.input]
    most = _spread(stored["scale_scales"], axis, self.maxima, B * plan.M).reshape(*lead, plan.M, B)
    largest = dynamic_number(stored[SCALES]) * jnp.swapaxes(most, axis, axis + 1) + stored["scale_mean"][..., None, None]
    codes = codes.reshape(*lead, B, 1, self.input_block // 2, plan.M)
    each = (codes >> jnp.array([4, 0], jnp.uint8).reshape(2, 1, 1) & 15).reshape(*lead, B, self.input_block, plan.M)
    x = (_chosen(each, NF4) * jnp.expand_dims(largest, axis + 1)).astype(dtype).reshape(*lead, -1, plan.M)
    return x if x.shape[axis] == plan.K else jax.lax.slice_in_dim(x, 0, plan.K, axis=axis)


@dataclass(frozen=True)
class Int8Form(Form):
  """8 bits each, whole numbers up to 127 times a number of the output."""

  name: ClassVar[FormName] = "int8"

  def params(self, plan: Plan) -> dict[str, Param]:
    axes = plan.axes[plan.input :]
    return {
      CODES: _stored(plan, (plan.K, plan.M), axes, "int8"),
      SCALES: _stored(plan, (plan.M,), axes[1:], "float32"),
    }

  def quantise(self, plan: Plan, x: jax.Array) -> Arrays:
    scales = jnp.max(jnp.abs(x), axis=plan.input) / 127
    codes = jnp.round(x / jnp.expand_dims(_nonzero(scales), plan.input))
    return {CODES: jnp.clip(codes, -127, 127).astype(jnp.int8), SCALES: scales}

  def values(self, plan: Plan, stored: Arrays, dtype: str) -> jax.Array:
    return (stored[CODES].astype(jnp.float32) * jnp.expand_dims(stored[SCALES], plan.input)).astype(dtype)


@dataclass(frozen=True)
class Float8BlockForm(Form):
  """float8 e4m3 times a number of a block of 128 inputs and 128 outputs, as DeepSeek V3's checkpoints are stored."""

  name: ClassVar[FormName] = "fp8_block"
  input_block: ClassVar[int] = 128
  output_block: ClassVar[int] = 128
  largest: ClassVar[float] = 448.0

  def params(self, plan: Plan) -> dict[str, Param]:
    axes = plan.axes[plan.input :]
    grid = (_blocks(plan.K, self.input_block), _blocks(plan.M, self.output_block))
    return {
      CODES: _stored(plan, (plan.K, plan.M), axes, "float8_e4m3fn"),
      SCALES: _stored(plan, grid, axes, "float32"),
    }

  def quantise(self, plan: Plan, x: jax.Array) -> Arrays:
    axis, lead = plan.input, x.shape[: plan.input]
    whole = _padded(_padded(x, axis, self.input_block), axis + 1, self.output_block)
    grid = whole.reshape(*lead, -1, self.input_block, whole.shape[-1] // self.output_block, self.output_block)
    scales = jnp.max(jnp.abs(grid), axis=(axis + 1, axis + 3)) / self.largest
    # Beyond the range astype gives NaN; a rounded quotient may be.
    codes = jnp.clip(x / self._each(plan, _nonzero(scales)), -self.largest, self.largest).astype(jnp.float8_e4m3fn)
    return {CODES: codes, SCALES: scales}

  def values(self, plan: Plan, stored: Arrays, dtype: str) -> jax.Array:
    return (stored[CODES].astype(jnp.float32) * self._each(plan, stored[SCALES])).astype(dtype)

  def _each(self, plan: Plan, scales: jax.Array) -> jax.Array:
    """[E?, K, M]: the scale of every weight."""
    return _spread(_spread(scales, plan.input, self.input_block, plan.K), plan.input + 1, self.output_block, plan.M)


@dataclass(frozen=True)
class Outline(Form):
  """What a form stores, of which nothing is computed: where shapes alone are asked for, as tracing a form's own numbers takes
  most of the time.

  Attributes:
    of: the form.
  """

  of: Form

  def params(self, plan: Plan) -> dict[str, Param]:
    return self.of.params(plan)

  def quantise(self, plan: Plan, x: jax.Array) -> Arrays:
    return self.of.quantise(plan, x)

  def values(self, plan: Plan, stored: Arrays, dtype: str) -> jax.Array:
    return jnp.broadcast_to(stored[CODES].reshape(-1)[0].astype(dtype), (*plan.experts, plan.K, plan.M))


FORMS: dict[FormName, Form] = {form.name: form for form in (BFloat16Form(), NF4Form(), Int8Form(), Float8BlockForm())}


def stored_params(form: Form, p: Param) -> dict[str, Param]:
  """The declared arrays in the place of a weight, of one layer or stacked.

  Raises:
    ValueError: it is a table.
  """
  spec = form.params(Plan.of(p))
  return spec if p.rows is None else stack(spec, p.rows)


def quantise(form: Form, p: Param, x: jax.Array) -> Arrays:
  """What is stored of one layer's weight; p: of one layer or stacked."""
  plan = Plan.of(p)
  return form.quantise(plan, plan.matrix(x.astype(jnp.float32)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised(Weight):
  """A weight of one layer that is stored in a form, and is not trained.

  Attributes:
    stored: see ``Form``; with a row, of all layers of a stack.
    row: which layer of the stack it is, int32; None: what is stored is of one layer.
    form: of it.
    param: the weight that it stands for.
    rules: how it is split over the mesh in use. What is stored is fetched from the devices that share it before it is
      dequantised: that is the least that can travel, and no block need lie on one of them.
    dtype: that it is dequantised to; None: the ``dtype`` of whatever multiplies it.
  """

  cuts_rows: ClassVar[bool] = True

  stored: Arrays
  row: jax.Array | None = dataclasses.field(default=None, kw_only=True)
  form: Form = dataclasses.field(metadata={"static": True})
  param: Param = dataclasses.field(metadata={"static": True})
  rules: Rules = dataclasses.field(default=RULES, metadata={"static": True})
  dtype: str | None = dataclasses.field(default=None, metadata={"static": True})

  @jax.named_scope("dequantise")
  def values(self, dtype: str) -> jax.Array:
    """The weight as it is declared."""
    plan = Plan.of(self.param)
    axes = {name: p.axes for name, p in self.form.params(plan).items()}
    stored = {name: self.rules.whole(self._of_row(x), *axes[name]) for name, x in self.stored.items()}
    return plan.declared(self.form.values(plan, stored, dtype))

  def _of_row(self, x: jax.Array) -> jax.Array:
    return x if self.row is None else as_stored(jax.lax.dynamic_index_in_dim(x, self.row, keepdims=False))

  def in_row(self, number: jax.Array) -> "Quantised":
    """Cut out where it multiplies: what all layers of a row store, a compiler would cut out before the first of them."""
    return dataclasses.replace(self, row=number)

  def alone(self) -> "Quantised":
    return dataclasses.replace(self, stored={name: self._of_row(x) for name, x in self.stored.items()}, row=None)

  def after(self, x: jax.Array) -> tuple[jax.Array, "Quantised"]:
    """x, and the weight, which is dequantised no sooner than x is there: as it depends on nothing else, a compiler would make
    the weights of all layers of a row whole before the first of them."""
    if self.row is None:
      return jax.lax.optimization_barrier((x, self))
    x, row = jax.lax.optimization_barrier((x, self.row))
    return x, dataclasses.replace(self, row=row)

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
    """By the dequantised weight."""
    sizes = None if groups is None else groups.sizes
    how = _How(precision, equation, None if groups is None else groups.kernel, float32, unbounded, large)
    out: Any = _product(how, x, sizes, self)
    return checkpoint_name(out, PRODUCT) if groups is None else out

  def lookup(self, precision: Precision, index: jax.Array) -> jax.Array:
    """Rows of a table, which is none of these.

    Raises:
      TypeError: always.
    """
    raise TypeError(f"a weight stored in {self.form.name} is no table")

  def cast(self, precision: Precision) -> "Quantised":
    """The same codes, for they are what travels, and the dtype that they are to become."""
    return dataclasses.replace(self, dtype=precision.dtype)


@dataclass(frozen=True)
class _How:
  """A product without its operands."""

  precision: Precision
  equation: str
  kernel: Any
  float32: bool
  unbounded: bool
  large: bool

  def __call__(self, x: jax.Array, sizes: jax.Array | None, weight: Quantised) -> jax.Array:
    groups = None if sizes is None else Groups(sizes, self.kernel)
    values = weight.values(weight.dtype or self.precision.dtype)
    flags = {"groups": groups, "float32": self.float32, "unbounded": self.unbounded, "large": self.large}
    return product(self.precision, self.equation, x, values, **flags)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _How, x: jax.Array, sizes: jax.Array | None, weight: Quantised) -> Any:
  """The product; its backward pass dequantises again."""
  x, weight = weight.after(x)
  return how(x, sizes, weight)


def _product_forward(how, x, sizes, weight):
  return _product(how, x, sizes, weight), (x, sizes, weight)


def _product_backward(how, saved, g):
  x, sizes, weight = saved
  g, weight = weight.after(g)
  (dx,) = jax.vjp(lambda x: how(x, sizes, weight), x)[1](g)
  return dx, None, None


_product.defvjp(_product_forward, _product_backward)
