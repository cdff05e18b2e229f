"""Frozen weights stored in 4, 8 or 16 bits: the stored arrays, quantization and dequantization.

The stored arrays follow from the ``Param`` of the weight. Every expert and every layer of a stack is quantized separately, as
in checkpoint files. A product dequantizes the weight to ``dtype``. Its backward pass dequantizes again, so only the codes are
kept in memory between the two.

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

from maxtext_like.layers.kernels.quantized_matmul import MOST_ROWS, Name, quantized_matmul
from maxtext_like.layers.param import Param, constant, stack
from maxtext_like.layers.partition import as_stored
from maxtext_like.layers.precision import PRODUCT, Precision
from maxtext_like.layers.quantization.codebooks import NF4, dynamic_map, dynamic_number
from maxtext_like.layers.quantization.low_rank import Layout, one_layer
from maxtext_like.layers.sharding_rules import RULES, Rules
from maxtext_like.layers.weight import Equation, Groups, Product, Weight

FormName = Literal["bfloat16", "nf4", "int8", "fp8_block"]
Arrays = dict[str, jax.Array]

CODES = "codes"
"""Name of the array that every form has, in the axes of the weight. The other arrays are needed to decode it."""
SCALES = "scales"


@dataclass(frozen=True)
class MatrixView:
  """The axes of a weight in groups: experts, inputs, outputs.

  Attributes:
    experts: E, or () without experts.
    inputs, outputs: sizes.
    axes: logical axis names of the experts (if any), the inputs and the outputs. If the inputs or outputs have several axes,
      this is the name of the first, the only one that may be split.
  """

  experts: tuple[int, ...]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  axes: tuple[str | None, ...]

  @classmethod
  def of(cls, p: Param) -> "MatrixView":
    """Create the view of a declared weight, of one layer or stacked. Raise a ValueError if it is a table."""
    # Experts, then inputs, then outputs: other orders of axes are not supported.
    own, layout = one_layer(p), Layout.of(p)
    lead = len(layout.group)
    by_rows = own.axes[0] == "vocab"  # an embedding table, whichever axis an adapter for it sums over
    if by_rows or layout.summed != tuple(range(lead, lead + len(layout.summed))) or not layout.kept:
      raise ValueError(
        f"quantization: an array with the axes {own.axes} is a table, which maps no inputs to outputs, so it cannot be "
        "quantized"
      )
    pick = lambda axes: tuple(own.shape[i] for i in axes)
    names = tuple(own.axes[i] for i in (*layout.group, layout.summed[0], layout.kept[0]))
    return cls(pick(layout.group), pick(layout.summed), pick(layout.kept), names)

  @property
  def K(self) -> int:
    """Number of inputs."""
    return math.prod(self.inputs)

  @property
  def M(self) -> int:
    """Number of outputs."""
    return math.prod(self.outputs)

  def matrix(self, x: jax.Array) -> jax.Array:
    """Reshape a weight from its declared shape to [E?, K, M]. The number of experts may differ from the declared one."""
    return x.reshape(*x.shape[: len(self.experts)], self.K, self.M)

  def declared(self, x: jax.Array) -> jax.Array:
    """Reshape [E?, K, M] to the declared shape."""
    return x.reshape(*x.shape[: len(self.experts)], *self.inputs, *self.outputs)

  @property
  def input(self) -> int:
    """The axis of K in ``matrix``."""
    return len(self.experts)


@dataclass(frozen=True)
class Form(abc.ABC):
  """A format for storing weights."""

  name: ClassVar[FormName]
  table: ClassVar[np.ndarray | None] = None
  """Values of the codes, if a code is an index."""
  input_block: ClassVar[int] = 1
  """Number of inputs that share a scale. A mesh axis that splits a product's sum or result must not split these blocks."""
  output_block: ClassVar[int] = 1
  """The same for outputs, all of them as one axis."""

  @abc.abstractmethod
  def params(self, view: MatrixView) -> dict[str, Param]:
    """Declare the stored arrays of a weight of one layer."""

  @abc.abstractmethod
  def quantize(self, view: MatrixView, x: jax.Array) -> Arrays:
    """Quantize a weight [E?, K, M] in float32."""

  @abc.abstractmethod
  def values(self, view: MatrixView, stored: Arrays, dtype: str) -> jax.Array:
    """Dequantize to [E?, K, M] in a dtype, rounded once."""


def _stored(view: MatrixView, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: str) -> Param:
  lead = len(view.experts)
  return Param((*view.experts, *shape), (*view.axes[:lead], *axes), dtype, constant(0), trainable=False)


def _blocks(size: int, block: int) -> int:
  return -(-size // block)


def _padded(x: jax.Array, axis: int, block: int) -> jax.Array:
  """Pad an axis with zeros to a multiple of the block size."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, -x.shape[axis] % block)
  return jnp.pad(x, widths) if widths[axis][1] else x


def _spread(x: jax.Array, axis: int, block: int, size: int) -> jax.Array:
  """Repeat each entry of an axis ``block`` times and keep the first ``size``. It is a broadcast; a gather would be slow."""
  shape = (*x.shape[: axis + 1], block, *x.shape[axis + 1 :])
  wide = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
  return wide if wide.shape[axis] == size else jax.lax.slice_in_dim(wide, 0, size, axis=axis)


def _nonzero(x: jax.Array) -> jax.Array:
  return jnp.where(x == 0, 1, x)


def _sum(x: jax.Array) -> jax.Array:
  """Sum over the last axis by adding pairs, which gives the same bits on every kind of device."""
  while x.shape[-1] > 1:
    x = _padded(x, x.ndim - 1, 2)
    x = x[..., ::2] + x[..., 1::2]
  return x[..., 0]


def _nearest(x: jax.Array, codebook: np.ndarray) -> jax.Array:
  """Return the uint8 indices of the nearest entries of a sorted codebook."""
  middles = ((codebook[:-1].astype(np.float64) + codebook[1:]) / 2).astype(np.float32)
  if len(codebook) <= 16:
    return sum(((x > middle).astype(jnp.uint8) for middle in middles), jnp.zeros(x.shape, jnp.uint8))
  return jnp.searchsorted(jnp.asarray(middles), x).astype(jnp.uint8)


def _zero(codes: jax.Array) -> jax.Array:
  """Return a float32 zero that depends on the codes, to be added to constants.

  JAX moves computations that depend on no input out of a loop that it differentiates, at full size. A GPU would then store and
  read an array instead of each constant. XLA simplifies the addition of this zero."""
  return (codes[(0,) * codes.ndim] & 0).astype(jnp.float32)


def _chosen(codes: jax.Array, codebook: np.ndarray) -> jax.Array:
  """Look up a codebook of 16 entries with four selections, without a gather."""
  entries: list[Any] = [_zero(codes) + value for value in codebook]
  for bit in range(4):
    high = (codes >> bit) & 1 == 1
    entries = [jnp.where(high, b, a) for a, b in zip(entries[::2], entries[1::2], strict=True)]
  return entries[0]


@dataclass(frozen=True)
class BFloat16Form(Form):
  """16 bits per weight, the format of most checkpoints."""

  name: ClassVar[FormName] = "bfloat16"

  def params(self, view: MatrixView) -> dict[str, Param]:
    return {CODES: _stored(view, (view.K, view.M), view.axes[view.input :], "bfloat16")}

  def quantize(self, view: MatrixView, x: jax.Array) -> Arrays:
    return {CODES: x.astype(jnp.bfloat16)}

  def values(self, view: MatrixView, stored: Arrays, dtype: str) -> jax.Array:
    return stored[CODES].astype(dtype)


@dataclass(frozen=True)
class NF4Form(Form):
  """4 bits per weight: one of 16 values times the maximum of a block of 64 inputs (QLoRA, Dettmers et al. 2023).

  The block maxima are quantized too, as in bitsandbytes: their mean is subtracted, and the differences are stored in 8 bits
  (``dynamic_map``) relative to the maximum of 256 of them. The maxima are ordered by output, then by block. 4.127 bits per
  weight in total.
  """

  name: ClassVar[FormName] = "nf4"
  table: ClassVar[np.ndarray | None] = NF4
  input_block: ClassVar[int] = 64
  maxima: ClassVar[int] = 256

  def params(self, view: MatrixView) -> dict[str, Param]:
    B, axes = _blocks(view.K, self.input_block), view.axes[view.input :]
    return {
      CODES: _stored(view, (B * self.input_block // 2, view.M), axes, "uint8"),
      SCALES: _stored(view, (B, view.M), axes, "uint8"),
      "scale_scales": _stored(view, (_blocks(B * view.M, self.maxima),), (None,), "float32"),
      "scale_mean": _stored(view, (), (), "float32"),
    }

  def quantize(self, view: MatrixView, x: jax.Array) -> Arrays:
    # 4-bit codes, relative to the maximum of each block.
    axis, lead, B = view.input, x.shape[: view.input], _blocks(view.K, self.input_block)
    x = _padded(x, axis, self.input_block).reshape(*lead, B, self.input_block, view.M)
    largest = jnp.max(jnp.abs(x), axis=axis + 1)
    codes = _nearest(x * jnp.expand_dims(1 / _nonzero(largest), axis + 1), NF4)
    # A byte holds inputs i and i + 32 of a block. The two halves of a block are then contiguous, as in the tiles of a TPU, and
    # need not be interleaved.
    first, second = jnp.split(codes, 2, axis=axis + 1)
    # Quantize the block maxima: subtract their mean, and encode groups of 256.
    listed = jnp.swapaxes(largest, axis, axis + 1).reshape(*lead, -1)
    total = _sum(listed)
    # The added zero makes the divisor unknown to the compiler. XLA replaces division by a constant with a multiplication, and
    # fuses it with the following subtraction, which changes the rounding.
    mean = total / (listed.shape[-1] + 0 * total)
    centered = _padded(listed - mean[..., None], axis, self.maxima).reshape(*lead, -1, self.maxima)
    most = jnp.max(jnp.abs(centered), axis=-1)
    rounded = _nearest(centered * (1 / _nonzero(most))[..., None], dynamic_map()).reshape(*lead, -1)[..., : B * view.M]
    scales = jnp.swapaxes(rounded.reshape(*lead, view.M, B), axis, axis + 1)
    return {
      CODES: (first << 4 | second).reshape(*lead, -1, view.M), SCALES: scales, "scale_scales": most, "scale_mean": mean
    }  # fmt: skip

  def values(self, view: MatrixView, stored: Arrays, dtype: str) -> jax.Array:
    axis, B = view.input, _blocks(view.K, self.input_block)
    codes, lead = stored[CODES], stored[CODES].shape[: view.input]
    most = _spread(stored["scale_scales"], axis, self.maxima, B * view.M).reshape(*lead, view.M, B)
    largest = (
      dynamic_number(stored[SCALES], _zero(stored[SCALES].astype(jnp.int32))) * jnp.swapaxes(most, axis, axis + 1)
      + stored["scale_mean"][..., None, None]
    )
    codes = codes.reshape(*lead, B, 1, self.input_block // 2, view.M)
    each = (codes >> jnp.array([4, 0], jnp.uint8).reshape(2, 1, 1) & 15).reshape(*lead, B, self.input_block, view.M)
    x = (_chosen(each, NF4) * jnp.expand_dims(largest, axis + 1)).astype(dtype).reshape(*lead, -1, view.M)
    return x if x.shape[axis] == view.K else jax.lax.slice_in_dim(x, 0, view.K, axis=axis)


@dataclass(frozen=True)
class Int8Form(Form):
  """8 bits per weight: an integer up to 127 times a scale for each output."""

  name: ClassVar[FormName] = "int8"

  def params(self, view: MatrixView) -> dict[str, Param]:
    axes = view.axes[view.input :]
    return {
      CODES: _stored(view, (view.K, view.M), axes, "int8"),
      SCALES: _stored(view, (view.M,), axes[1:], "float32"),
    }

  def quantize(self, view: MatrixView, x: jax.Array) -> Arrays:
    # One scale for each output.
    scales = jnp.max(jnp.abs(x), axis=view.input) / 127
    codes = jnp.round(x / jnp.expand_dims(_nonzero(scales), view.input))
    return {CODES: jnp.clip(codes, -127, 127).astype(jnp.int8), SCALES: scales}

  def values(self, view: MatrixView, stored: Arrays, dtype: str) -> jax.Array:
    return (stored[CODES].astype(jnp.float32) * jnp.expand_dims(stored[SCALES], view.input)).astype(dtype)


@dataclass(frozen=True)
class Float8BlockForm(Form):
  """float8 e4m3 times a scale for each block of 128 inputs and 128 outputs, the format of DeepSeek V3's checkpoints."""

  name: ClassVar[FormName] = "fp8_block"
  input_block: ClassVar[int] = 128
  output_block: ClassVar[int] = 128
  largest: ClassVar[float] = 448.0

  def params(self, view: MatrixView) -> dict[str, Param]:
    axes = view.axes[view.input :]
    grid = (_blocks(view.K, self.input_block), _blocks(view.M, self.output_block))
    return {
      CODES: _stored(view, (view.K, view.M), axes, "float8_e4m3fn"),
      SCALES: _stored(view, grid, axes, "float32"),
    }

  def quantize(self, view: MatrixView, x: jax.Array) -> Arrays:
    axis, lead = view.input, x.shape[: view.input]
    whole = _padded(_padded(x, axis, self.input_block), axis + 1, self.output_block)
    grid = whole.reshape(*lead, -1, self.input_block, whole.shape[-1] // self.output_block, self.output_block)
    scales = jnp.max(jnp.abs(grid), axis=(axis + 1, axis + 3)) / self.largest
    # A quotient may be rounded beyond the range, where astype would give NaN: clip it.
    codes = jnp.clip(x / self._each(view, _nonzero(scales)), -self.largest, self.largest).astype(jnp.float8_e4m3fn)
    return {CODES: codes, SCALES: scales}

  def values(self, view: MatrixView, stored: Arrays, dtype: str) -> jax.Array:
    return (stored[CODES].astype(jnp.float32) * self._each(view, stored[SCALES])).astype(dtype)

  def _each(self, view: MatrixView, scales: jax.Array) -> jax.Array:
    """Expand the scales to [E?, K, M], one for every weight."""
    return _spread(_spread(scales, view.input, self.input_block, view.K), view.input + 1, self.output_block, view.M)


@dataclass(frozen=True)
class ShapesOnly(Form):
  """A form with the stored arrays of another form but without its computation. Use it if only shapes are needed, because
  tracing the dequantization takes most of the time.

  Attributes:
    of: the other form.
  """

  of: Form

  def params(self, view: MatrixView) -> dict[str, Param]:
    return self.of.params(view)

  def quantize(self, view: MatrixView, x: jax.Array) -> Arrays:
    return self.of.quantize(view, x)

  def values(self, view: MatrixView, stored: Arrays, dtype: str) -> jax.Array:
    return jnp.broadcast_to(stored[CODES].reshape(-1)[0].astype(dtype), (*stored[CODES].shape[: view.input], view.K, view.M))


FORMS: dict[FormName, Form] = {form.name: form for form in (BFloat16Form(), NF4Form(), Int8Form(), Float8BlockForm())}


def stored_params(form: Form, p: Param) -> dict[str, Param]:
  """Declare the stored arrays of a weight, of one layer or stacked. Raise a ValueError if it is a table."""
  spec = form.params(MatrixView.of(p))
  return spec if p.rows is None else stack(spec, p.rows)


def quantize(form: Form, p: Param, x: jax.Array) -> Arrays:
  """Quantize the weight x of one layer. p: its declaration, of one layer or stacked."""
  view = MatrixView.of(p)
  return form.quantize(view, view.matrix(x.astype(jnp.float32)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized(Weight):
  """A frozen weight of one layer, stored in a ``Form``.

  Attributes:
    stored: the arrays of the form; if ``row`` is set, those of all layers of a stack.
    row: index of the layer in the stack, int32; None if ``stored`` holds one layer.
    form: the form.
    param: declaration of the weight.
    rules: sharding on the current mesh. The stored arrays are gathered before they are dequantized. This sends the fewest
      bytes, and blocks may be split over devices.
    dtype: dtype of the dequantized weight; None: ``dtype`` of the layer.
    kernel: kernel for products of few rows.
    by_output: the codes are transposed, as that kernel reads them (``for_few_rows``).
  """

  cuts_rows: ClassVar[bool] = True

  stored: Arrays
  row: jax.Array | None = dataclasses.field(default=None, kw_only=True)
  form: Form = dataclasses.field(metadata={"static": True})
  param: Param = dataclasses.field(metadata={"static": True})
  rules: Rules = dataclasses.field(default=RULES, metadata={"static": True})
  dtype: str | None = dataclasses.field(default=None, metadata={"static": True})
  kernel: Name = dataclasses.field(default="xla", metadata={"static": True})
  by_output: bool = dataclasses.field(default=False, metadata={"static": True})

  @jax.named_scope("dequantize")
  def values(self, dtype: str) -> jax.Array:
    """Dequantize to the declared shape."""
    view = MatrixView.of(self.param)
    axes = {name: p.axes for name, p in self.form.params(view).items()}
    stored = {name: self._of_row(x) for name, x in self.stored.items()}
    if self.by_output:
      stored[CODES] = jnp.swapaxes(stored[CODES], -1, -2)
    stored = {name: self.rules.whole(x, *axes[name]) for name, x in stored.items()}
    return view.declared(self.form.values(view, stored, dtype))

  def _of_row(self, x: jax.Array) -> jax.Array:
    return x if self.row is None else as_stored(jax.lax.dynamic_index_in_dim(x, self.row, keepdims=False))

  def in_row(self, number: jax.Array) -> "Quantized":
    """Keep the row number instead of slicing. The product slices the row, because XLA would slice the weights of all layers of
    a row before the first layer runs."""
    return dataclasses.replace(self, row=number)

  def own_row(self) -> "Quantized":
    return dataclasses.replace(self, stored={name: self._of_row(x) for name, x in self.stored.items()}, row=None)

  def after(self, x: jax.Array) -> tuple[jax.Array, "Quantized"]:
    """Return x, and the weight behind a barrier, so that it is dequantized after x is computed.

    Dequantization depends on no other value. Without the barrier, XLA would dequantize the weights of all layers of a row
    before the first layer runs."""
    if self.row is None:
      return jax.lax.optimization_barrier((x, self))
    x, row = jax.lax.optimization_barrier((x, self.row))
    return x, dataclasses.replace(self, row=row)

  def product(self, how: Product, x: jax.Array) -> jax.Array:
    """Multiply x by the dequantized weight."""
    if how.groups is None:
      made: Any = _product(how, None, x, None, self)
      return checkpoint_name(made, PRODUCT)
    # The sizes of the groups are an operand of the custom derivative.
    return _product(dataclasses.replace(how, groups=None), how.groups.kernel, x, how.groups.sizes, self)

  def of_experts(self, chosen: jax.Array) -> "Quantized":
    """Return the weight with only these experts, int32 [.]."""
    stored = {name: jnp.take(self._of_row(x), chosen, axis=0, mode="clip") for name, x in self.stored.items()}
    return dataclasses.replace(self, stored=stored, row=None)

  def for_few_rows(self) -> "Quantized":
    """Return the weight with its codes in the order that the kernel for few rows reads, if that kernel multiplies by it."""
    if self.kernel == "xla" or self.by_output or MatrixView.of(self.param).experts:
      return self
    codes = jnp.swapaxes(self.stored[CODES], -1, -2)
    return dataclasses.replace(self, stored=self.stored | {CODES: codes}, by_output=True)

  def by_kernel(self, how: Product, x: jax.Array) -> jax.Array | None:
    """Multiply by the kernel for few rows. Return None if it does not support this product."""
    p, e, view = how.precision, Equation.of(how.equation), MatrixView.of(self.param)
    if not self.by_output or x.size > MOST_ROWS * view.K:
      return None
    if {self.dtype or p.dtype, p.dtype} != {"bfloat16"} or (how.large and p.matmul_dtype == "float8"):
      return None
    # The product must be one of matrices: sums over the last axes of x, and the other axes in their order.
    n = len(view.inputs)
    if e.x[-n:] != e.weight[:n] or e.result != e.x[:-n] + e.weight[n:]:
      return None
    rows, stored = x.reshape(-1, view.K).astype(jnp.bfloat16), {name: self._of_row(a) for name, a in self.stored.items()}
    made = quantized_matmul(self.form.name, rows, stored, view.M, values=self.form.table)
    return made.astype(how.out or p.dtype).reshape(*x.shape[:-n], *view.outputs)

  def lookup(self, precision: Precision, index: jax.Array) -> jax.Array:
    """Raise a TypeError: a quantized weight is never a table."""
    raise TypeError(f"quantization: a weight stored in {self.form.name} cannot be read as a table")

  def cast(self, precision: Precision) -> "Quantized":
    """Keep the codes, which are what devices exchange, and set the dtype to dequantize to."""
    return dataclasses.replace(self, dtype=precision.dtype)


def _dequantized_product(how: Product, kernel: Any, x: jax.Array, sizes: jax.Array | None, weight: Quantized) -> jax.Array:
  # Fewer rows than experts, as in generation: dequantize only as many experts as there are rows, first those that have rows.
  if sizes is not None and len(x) < len(sizes):
    chosen = jnp.argsort(sizes == 0, stable=True)[: len(x)]
    sizes, weight = sizes[chosen], weight.of_experts(chosen)
  groups = None if sizes is None else Groups(sizes, kernel)
  return dataclasses.replace(how, groups=groups)(x, weight.values(weight.dtype or how.precision.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(how: Product, kernel: Any, x: jax.Array, sizes: jax.Array | None, weight: Quantized) -> Any:
  """Multiply by the dequantized weight. The backward pass dequantizes it again.

  Args:
    how: the product without its groups.
    kernel: name of the grouped kernel; None without groups.
    x: activations.
    sizes: rows of each group; None without groups.
    weight: the weight.
  """
  x, weight = weight.after(x)
  made = weight.by_kernel(how, x) if sizes is None else None
  return _dequantized_product(how, kernel, x, sizes, weight) if made is None else made


def _product_forward(how, kernel, x, sizes, weight):
  return _product(how, kernel, x, sizes, weight), (x, sizes, weight)


def _product_backward(how, kernel, saved, g):
  x, sizes, weight = saved
  g, weight = weight.after(g)
  (dx,) = jax.vjp(lambda x: _dequantized_product(how, kernel, x, sizes, weight), x)[1](g)
  return dx, None, None


_product.defvjp(_product_forward, _product_backward)
