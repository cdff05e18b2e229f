"""Precision: every numeric choice of a layer, obeyed in one place.

``Precision`` holds the ``precision:`` section of a configuration; its ``einsum`` is the only matrix product of activations that
layers use, and what ``weight.product`` multiplies plain arrays with.

A product of two bfloat16 or float16 numbers is exact in float32, so asking the product for a float32 result gives what
casting both operands up would give, at the speed of the low-precision units. That is how the float32 flags are honoured.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext_like.layers.kernels.grouped_matmul.registry import Name, kernel
from maxtext_like.layers.partition import (
  adds_up_whole_weights,
  in_float32,
  on_one_cpu,
  rounded_sum,
  shared_sums,
  together,
  vary_alike,
)
from maxtext_like.layers.quantization import float8

Dtype = Literal["float32", "bfloat16", "float16"]
StoredDtype = Literal["float32", "bfloat16", "float16"]

LAYER_KEYS = (
  "dtype",
  "float32_qk_product",
  "float32_logits",
  "indexer_float32_logits",
  "float32_gate_product",
  "float16_rescue",
  "float32_gate_logits",
  "float32_weight_sum",
  "matmul_precision",
  "matmul_dtype",
)
"""What may differ between the layers of a model: it changes neither parameters nor what travels from layer to layer."""


PRODUCT = "product"
"""Name of products without batch axes for policies of ``jax.checkpoint``, which see none inside a derivative of our own."""


@dataclass(frozen=True, kw_only=True)
class Precision:
  """The dtypes of a model and the operations that are kept in float32.

  Attributes:
    dtype: activations and the operands of matrix products.
    weight_dtype: stored parameters.
    grad_dtype: gradients as the optimizer sees them.
    residual_dtype: the residual stream; None is ``dtype``, but float32 when ``dtype`` is float16, whose backward pass
      overflows there.
    float32_qk_product: q.k accumulated and kept in float32, never rounded to ``dtype``.
    float32_logits: attention mask and softmax in float32.
    indexer_float32_logits: sparse indexer: q.k, relu and the weighted sum over heads in float32.
    float32_gate_product: MLP act(gate) * up in float32; "auto" is on when the gate's dtype is float16.
    float16_rescue: float16 only: saturate the MLP product at +-65280 and zero an MLP output that is still not finite.
    float32_vision_pool: Gemma 4 vision pooler: scale and standardise in float32.
    float32_gate_logits: router logits in float32.
    float32_weight_sum: the weighted sum over experts in float32.
    cast_logits_to_fp32: logits are handed on in float32.
    logits_dot_in_fp32: operands of the last product in float32.
    matmul_precision: ``jax.lax.Precision`` of every product.
    matmul_dtype: operands of the large products by weights, and of those of their gradients: "dtype", or "float8", each tensor
      with a scale of its own (``float8``).
    reduction_dtype: of sums that devices share, as a gradient's over rows: "float32", each hands on its part as it was
      accumulated, and the whole is rounded once, as on one device; "dtype", each rounds its part first.
  """

  dtype: Dtype = "bfloat16"
  weight_dtype: StoredDtype = "float32"
  grad_dtype: Dtype = "float32"
  residual_dtype: Dtype | None = None
  float32_qk_product: bool = True
  float32_logits: bool = True
  indexer_float32_logits: bool = True
  float32_gate_product: Literal["auto", True, False] = "auto"
  float16_rescue: bool = True
  float32_vision_pool: bool = True
  float32_gate_logits: bool = True
  float32_weight_sum: bool = True
  cast_logits_to_fp32: bool = True
  logits_dot_in_fp32: bool = False
  matmul_precision: Literal["default", "high", "highest"] = "default"
  matmul_dtype: Literal["dtype", "float8"] = "dtype"
  reduction_dtype: Literal["float32", "dtype"] = "float32"

  @property
  def residual(self) -> str:
    """The dtype of the residual stream."""
    return self.residual_dtype or ("float32" if self.dtype == "float16" else self.dtype)

  @property
  def float32_branches(self) -> bool:
    """Whether a mixer or a feed-forward hands on its last sum in float32: with float16 it could overflow, and the norm or the
    residual stream that takes it is float32 then."""
    return self.dtype == "float16"

  def in_layer(self, **values: Any) -> "Precision":
    """The precision of a layer in which some of ``LAYER_KEYS`` differ; the residual stream stays as it is.

    Raises:
      ValueError: a key that belongs to the whole model.
    """
    if wrong := set(values) - set(LAYER_KEYS):
      raise ValueError(f"{', '.join(sorted(wrong))} cannot differ between layers; {', '.join(LAYER_KEYS)} can")
    return replace(self, **{"residual_dtype": self.residual, **values})

  @property
  def exact(self) -> "Precision":
    """Of products that are kept in float32, operands and all, whatever the rest of the layer is."""
    return replace(self, dtype="float32", matmul_precision="highest")

  def cast(self, x: jax.Array) -> jax.Array:
    """x in the dtype of activations."""
    return x.astype(self.dtype)

  def plus(self, x: jax.Array, p: jax.Array) -> jax.Array:
    """x [..., *p.shape] and a parameter, which is rounded to ``dtype``; in the dtype of x.

    The parameter's gradient is a sum over rows of all devices, as a weight's is: a float32 one, whatever the cotangent is.
    """
    return _plus(self.dtype, *vary_alike(x, p))

  def einsum(
    self,
    spec: str,
    x: jax.Array,
    y: jax.Array,
    *,
    float32: bool = False,
    unbounded: bool = False,
    large: bool = False,
  ) -> jax.Array:
    """The product of two arrays, operands rounded to ``dtype`` and accumulated in float32.

    Args:
      spec: einsum specification of two operands.
      x: first operand, any dtype.
      y: second operand, any dtype.
      float32: hand on the float32 accumulator instead of rounding it to ``dtype``.
      unbounded: an operand is not normalised (the residual stream), so that float16 cannot hold it: with ``dtype``
        float16 the product is a float32 one, operands and result.
      large: one of the products that ``matmul_dtype`` is for: of an attention or an MLP layer, by a weight.

    Returns:
      The product, float32 or ``dtype``.
    """
    spec, x, leading = _by_rows(_spelt_out(spec, x.ndim), x)
    out = self._multiply(spec, x, y, float32, unbounded, large)
    return out.reshape(*leading, *out.shape[1:]) if leading else out

  def _multiply(self, spec: str, x: jax.Array, y: jax.Array, float32: bool, unbounded: bool, large: bool) -> jax.Array:
    if unbounded and self.dtype == "float16":
      x, y = x.astype(jnp.float32), y.astype(jnp.float32)
      return jnp.einsum(spec, x, y, precision=self.matmul_precision)
    if self.dtype == "float32" and y.dtype != jnp.float32 and spec[0] not in spec.partition("->")[0].partition(",")[2]:
      y = in_float32(y)  # a weight, by which rows are multiplied
    x, y = self.cast(x), self.cast(y)
    parts = "none" if self.dtype == "float32" or self.reduction_dtype == "dtype" else shared_sums()
    low = large and self.matmul_dtype == "float8"
    if low or (self.dtype != "float32" and (float32 or parts != "none")):
      how = _How(spec, self.matmul_precision, jnp.dtype("float32" if float32 else self.dtype), parts, low)
      out: Any = _product(how, *vary_alike(x, y))
      return out if how.batched else checkpoint_name(out, PRODUCT)
    return jnp.einsum(spec, x, y, precision=self.matmul_precision)

  def grouped(self, x_MD: jax.Array, y_EDF: jax.Array, sizes_E: jax.Array, by: Name, *, float32: bool = False) -> jax.Array:
    """[M, F]: each of the groups of consecutive rows of x times its own matrix; operands and result in ``dtype``.

    Args:
      x_MD: rows, sorted by group.
      y_EDF: a matrix for each group.
      sizes_E: int32, rows of each group.
      by: the kernel.
      float32: hand on the float32 sums; operands that are float32, and their gradients, then keep its range.
    """
    if float32:
      x, y = (a if a.dtype == jnp.float32 else self.cast(a) for a in (x_MD, y_EDF))
      return kernel(by).sums(x, y, sizes_E, self.dtype, self.matmul_precision)
    return kernel(by).run(self.cast(x_MD), self.cast(y_EDF), sizes_E, self.matmul_precision)


# float32, of a gradient whose parts devices add up
_TILE_BYTES = 1 << 30
_LARGE_BYTES = 1 << 24  # of smaller ones, as an adapter's, several are added up at once


def _spelt_out(spec: str, rank: int) -> str:
  """An einsum specification with letters in the place of "...", which derivatives may sum over; rank: of the first operand."""
  if "..." not in spec:
    return spec
  named = len(spec.split(",")[0].replace("...", ""))
  return spec.replace("...", "zyxwvu"[: rank - named])


def _by_rows(spec: str, x: jax.Array) -> tuple[str, jax.Array, tuple[int, ...]]:
  """A product whose result begins with the same axes as x, none of them the other operand's, on a CPU with these as one axis.

  Its compiler turns axes of a product by copying, but for a matrix, whose product it reads turned: the gradient of a weight,
  summed over rows and positions, took a turned copy of the cotangent and of all that is computed on the way to it.

  Returns:
    Specification and x; the axes that have become one, () where nothing has changed.
  """
  operands, out = spec.split("->")
  first, second = operands.split(",")
  count = 0
  while first[count : count + 1] == out[count : count + 1] != "" and first[count] not in second:
    count += 1
  if count < 2 or not on_one_cpu():
    return spec, x, ()
  rows = x.reshape(math.prod(x.shape[:count]), *x.shape[count:])
  return f"{first[count - 1 :]},{second}->{out[count - 1 :]}", rows, x.shape[:count]


@dataclass(frozen=True)
class _How:
  """A product without its operands.

  Attributes:
    spec: with letters only.
    precision: ``jax.lax.Precision``.
    out: dtype of the result.
    parts: how much of it is summed in parts (``partition.shared_sums``).
    low: operands are float8 numbers, and those of the backward products.
  """

  spec: str
  precision: str
  out: jnp.dtype
  parts: Literal["none", "weights", "all"]
  low: bool

  @property
  def batched(self) -> bool:
    """Whether an axis is one of both operands and of the result."""
    operands, out = self.spec.split("->")
    first, second = operands.split(",")
    return not set(first).isdisjoint(set(second) & set(out))

  def rounded(self, spec: str, total: jax.Array, dtype: Any) -> jax.Array:
    """A product in a dtype. Of a sum over heads or a hidden size, which ``tensor`` splits, each device has a part; D, the width
    of the residual stream, is whole everywhere."""
    operands, out = spec.split("->")
    first, second = operands.split(",")
    summed = set(first) & set(second) - set(out)
    shared = self.parts == "all" and total.dtype == jnp.float32 and not summed <= {"D"}
    return rounded_sum(total, dtype) if shared else total.astype(dtype)

  def operand(self, x: jax.Array, dtype: str = float8.NUMBERS) -> jax.Array | float8.Scaled:
    """As it is multiplied."""
    return float8.scaled(x, dtype) if self.low else x

  def multiply(self, spec: str, x: Any, y: Any, dtype: Any) -> jax.Array:
    """The product of two operands; dtype: of the result, None: theirs, if they are not float8."""
    if self.low:
      return float8.product(spec, x, y, dtype)
    return jnp.einsum(spec, x, y, precision=self.precision, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _plus(dtype: str, x: jax.Array, p: jax.Array) -> Any:
  return (x + p.astype(dtype)).astype(x.dtype)


def _plus_bwd(dtype: str, p: jax.Array, g: jax.Array):
  return g, rounded_sum(jnp.sum(g.astype(jnp.float32), axis=tuple(range(g.ndim - p.ndim))), p.dtype)


_plus.defvjp(lambda dtype, x, p: (_plus(dtype, x, p), p), _plus_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _How, x: jax.Array, y: jax.Array) -> Any:
  wide = jnp.float32 if how.parts == "all" else how.out
  return how.rounded(how.spec, how.multiply(how.spec, how.operand(x), how.operand(y), wide), how.out)


def _product_fwd(how, x, y):
  # Not the float8 numbers: of a tensor that several weights multiply there would be as many copies, and it is there anyway.
  return _product(how, x, y), (x, y)


def _product_bwd(how, saved, g):
  """Backward products with operands as low as the forward's, as fused attention kernels do.

  A float32 cotangent against a bfloat16 operand would run as a float32 product, many times slower. bfloat16 has
  float32's range, so rounding the cotangent is safe; float16 has not, so there the operand is widened instead. float8 has a
  scale, and takes the cotangent as it comes.
  """
  x, y = saved
  if how.low:
    g = how.operand(g, float8.GRADIENTS)
  elif x.dtype == jnp.float16 and g.dtype == jnp.float32:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
  else:
    g = g.astype(x.dtype)
  x, y = how.operand(x), how.operand(y)
  operands, result = how.spec.split("->")
  x_axes, y_axes = operands.split(",")
  # The gradient of a weight is a sum over rows, which x begins with and a weight has not got.
  of_weight = how.parts == "weights" and x_axes[0] not in y_axes
  own = saved[0].dtype if how.low else None
  of_x = jnp.float32 if how.parts == "all" else own
  of_y = jnp.float32 if how.parts == "all" or of_weight else own
  of_dx = f"{result},{y_axes}->{x_axes}"
  dx = how.multiply(of_dx, g, y, of_x)

  def dy_of(g):
    total = how.multiply(f"{result},{x_axes}->{y_axes}", g, x, of_y)
    late = total.dtype == jnp.float32 and adds_up_whole_weights()
    return rounded_sum(total, saved[1].dtype) if late else total.astype(saved[1].dtype)

  kept = next(a for a in y_axes if a in result)
  in_y, in_g, columns = y_axes.index(kept), result.index(kept), saved[1].shape[y_axes.index(kept)]
  # float32 parts of a large table's gradient, each added up and rounded before the next: together they would not fit.
  least = -(-saved[1].size * 4 // _TILE_BYTES) if of_weight else 1
  tiles = next(n for n in range(least, columns + 1) if columns % n == 0)
  if tiles > 1:
    size = columns // tiles

    def tile(i):
      cut = lambda a: jax.lax.dynamic_slice_in_dim(a, i * size, size, in_g)
      return dy_of(g._replace(values=cut(g.values)) if how.low else cut(g))

    dy = jax.lax.map(tile, jnp.arange(tiles))
    dy = jnp.moveaxis(dy, 0, in_y).reshape(saved[1].shape)
  else:
    dy = dy_of(g)
  dx = how.rounded(of_dx, dx, saved[0].dtype)
  return together(dx, dy) if of_weight and saved[1].size * 4 >= _LARGE_BYTES else (dx, dy)


_product.defvjp(_product_fwd, _product_bwd)
