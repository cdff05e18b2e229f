"""``Precision``: every numeric choice of a layer, and the matrix product that applies these choices.

``Precision`` holds the ``precision:`` section of a configuration. Layers multiply two activations with ``Precision.einsum`` and
nothing else, and ``weight.product`` uses it for plain arrays.

A product of two bfloat16 or float16 numbers is exact in float32. A float32 result of such a product therefore equals the result
of casting both operands to float32, and the hardware computes it at the speed of the 16-bit units. The float32 flags are
implemented in this way.
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
  barrier_on_tpus,
  in_float32,
  on_one_cpu,
  rounded_sum,
  shared_sums,
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
  "float16_clamp",
  "float32_gate_logits",
  "float32_weight_sum",
  "matmul_precision",
  "matmul_dtype",
)
"""Keys that may differ between the layers of a model. They change neither parameters nor the values passed between layers."""


PRODUCT = "product"
"""``checkpoint_name`` of products without batch axes. A ``jax.checkpoint`` policy cannot see the products inside a custom
derivative, so policies select them by this name."""


@dataclass(frozen=True, kw_only=True)
class Precision:
  """The dtypes of a model and the operations that are kept in float32.

  Attributes:
    dtype: activations and the operands of matrix products.
    weight_dtype: stored parameters.
    grad_dtype: gradients as the optimizer sees them.
    residual_dtype: the residual stream. None means ``dtype``, except that it means float32 when ``dtype`` is float16, because
      the backward pass overflows in a float16 residual stream.
    float32_qk_product: q.k is accumulated and kept in float32, never rounded to ``dtype``.
    float32_logits: attention mask and softmax in float32.
    indexer_float32_logits: sparse indexer: q.k, relu and the weighted sum over heads in float32.
    float32_gate_product: MLP act(gate) * up in float32; "auto" is on when the gate's dtype is float16.
    float16_clamp: float16 only: saturate the MLP product at +-65280 and zero an MLP output that is still not finite.
    float32_vision_pool: Gemma 4 vision pooler: scale and standardize in float32.
    float32_gate_logits: router logits in float32.
    float32_weight_sum: the weighted sum over experts in float32.
    cast_logits_to_fp32: return logits in float32.
    logits_dot_in_fp32: operands of the last product in float32.
    matmul_precision: ``jax.lax.Precision`` of every product.
    matmul_dtype: operands of the large products by weights and of the products of their gradients. "dtype" uses ``dtype``;
      "float8" converts each tensor with one scale for that tensor (``float8``).
    reduction_dtype: dtype of partial sums that are added over devices, such as gradients of weights. "float32": each device
      contributes its float32 accumulator and the total is rounded once, as on one device. "dtype": each device rounds its
      partial sum first.
  """

  dtype: Dtype = "bfloat16"
  weight_dtype: StoredDtype = "float32"
  grad_dtype: Dtype = "float32"
  residual_dtype: Dtype | None = None
  float32_qk_product: bool = True
  float32_logits: bool = True
  indexer_float32_logits: bool = True
  float32_gate_product: Literal["auto", True, False] = "auto"
  float16_clamp: bool = True
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

  # The dtype of each operation, by the keys above. Layers read these properties, so that every decision is made once.

  @property
  def branch_dtype(self) -> str:
    """The dtype of the output of a mixer or a feed-forward layer. A float16 output could overflow, and the norm or the residual
    stream that reads it computes in float32 in that case."""
    return "float32" if self.dtype == "float16" else self.dtype

  @property
  def qk_dtype(self) -> str:
    """The dtype of the q.k products of attention."""
    return "float32" if self.float32_qk_product else self.dtype

  @property
  def softmax_dtype(self) -> str:
    """The dtype of the attention mask, the softmax and the probabilities."""
    return "float32" if self.float32_logits else self.dtype

  @property
  def gate_dtype(self) -> str:
    """The dtype of gate, up and act(gate) * up of an MLP."""
    keep = self.dtype == "float16" if self.float32_gate_product == "auto" else self.float32_gate_product
    return "float32" if keep else self.dtype

  @property
  def expert_dtype(self) -> str:
    """The dtype of the products of experts, which share one kernel: the wider of ``gate_dtype`` and ``branch_dtype``."""
    return self.gate_dtype if self.branch_dtype == self.dtype else self.branch_dtype

  @property
  def pool_dtype(self) -> str:
    """The dtype in which the vision pooler of Gemma 4 scales and standardizes."""
    return "float32" if self.float32_vision_pool else self.dtype

  @property
  def logits_dtype(self) -> str:
    """The dtype of logits."""
    return "float32" if self.cast_logits_to_fp32 else self.dtype

  @property
  def for_logits(self) -> "Precision":
    """The precision of the last product."""
    return self.exact if self.logits_dot_in_fp32 else self

  @property
  def for_router(self) -> "Precision":
    """The precision of a router: its norm and its product."""
    return self.exact if self.float32_gate_logits else self

  @property
  def for_weight_sum(self) -> "Precision":
    """The precision of the weighted sum over experts. A float16 sum could overflow, so it is float32 then."""
    return self.exact if self.float32_weight_sum or self.dtype == "float16" else self

  @property
  def for_indexer(self) -> "Precision":
    """The precision of the head weights of a sparse indexer."""
    return self.exact if self.indexer_float32_logits else self

  @property
  def indexer_dtype(self) -> str:
    """The dtype of the index products and index scores of a sparse indexer."""
    return self.for_indexer.dtype

  @property
  def indexer_sum_precision(self) -> str | None:
    """``jax.lax.Precision`` of the weighted sum over index heads; None: JAX's default."""
    return "highest" if self.indexer_float32_logits else None

  def in_layer(self, **values: Any) -> "Precision":
    """Return the precision of one layer, with some of ``LAYER_KEYS`` replaced. The dtype of the residual stream stays the same.

    Raises:
      ValueError: a key in ``values`` cannot differ between layers.
    """
    if wrong := set(values) - set(LAYER_KEYS):
      raise ValueError(
        f"precision: {', '.join(sorted(wrong))} cannot differ between layers, because parameters or the values passed between "
        f"layers depend on it\n  fix: set it for the complete model; these keys may differ: {', '.join(LAYER_KEYS)}"
      )
    return replace(self, **{"residual_dtype": self.residual, **values})

  @property
  def exact(self) -> "Precision":
    """The precision for products that are computed in float32 with float32 operands, independent of the layer's ``dtype``."""
    return replace(self, dtype="float32", matmul_precision="highest")

  def cast(self, x: jax.Array) -> jax.Array:
    """Cast x to the dtype of activations."""
    return x.astype(self.dtype)

  def plus(self, x: jax.Array, p: jax.Array) -> jax.Array:
    """Add a parameter, rounded to ``dtype``, to x [..., *p.shape]. The result has the dtype of x.

    The gradient of the parameter is summed in float32 over the rows of all devices, whatever the dtype of the cotangent is.
    """
    return _plus(self.dtype, *vary_alike(x, p))

  def einsum(
    self,
    spec: str,
    x: jax.Array,
    y: jax.Array,
    *,
    out: str | None = None,
    unbounded: bool = False,
    large: bool = False,
  ) -> jax.Array:
    """Multiply two arrays. Operands are rounded to ``dtype`` and accumulated in float32.

    Args:
      spec: einsum specification of two operands.
      x: first operand, any dtype.
      y: second operand, any dtype.
      out: dtype of the result. "float32" returns the float32 accumulator; None rounds it to ``dtype``.
      unbounded: an operand is not normalized (the residual stream) and may exceed the range of float16. With ``dtype``
        float16 the operands and the result are then float32.
      large: the product multiplies by a weight of an attention or MLP layer, so ``matmul_dtype`` applies to it.

    Returns:
      The product, in float32 or ``dtype``.
    """
    # On a CPU the leading axes are merged for the product and restored afterwards.
    spec, x, leading = _by_rows(_spelled_out(spec, x.ndim), x)
    made = self._multiply(spec, x, y, out or self.dtype, unbounded, large)
    return made.reshape(*leading, *made.shape[1:]) if leading else made

  def _multiply(self, spec: str, x: jax.Array, y: jax.Array, out: str, unbounded: bool, large: bool) -> jax.Array:
    # An unnormalized operand does not fit float16: compute this product in float32.
    if unbounded and self.dtype == "float16":
      x, y = x.astype(jnp.float32), y.astype(jnp.float32)
      return jnp.einsum(spec, x, y, precision=self.matmul_precision)
    # y is a weight if x starts with an axis that y does not have. Its gradient is then summed in float32 before it is rounded.
    if self.dtype == "float32" and y.dtype != jnp.float32 and spec[0] not in spec.partition("->")[0].partition(",")[2]:
      y = in_float32(y)
    x, y = self.cast(x), self.cast(y)
    # float32 products add up in float32 in any case. So do 16-bit ones, unless ``reduction_dtype`` is "dtype".
    parts = "none" if self.dtype == "float32" or self.reduction_dtype == "dtype" else shared_sums()
    low = large and self.matmul_dtype == "float8"
    # The custom derivative is needed for float8 operands, for a result wider than its operands, and for float32 partial sums.
    if low or (self.dtype != "float32" and (out != self.dtype or parts != "none")):
      how = _How(spec, self.matmul_precision, jnp.dtype(out), parts, low)
      made: Any = _product(how, *vary_alike(x, y))
      return made if how.batched else checkpoint_name(made, PRODUCT)
    return jnp.einsum(spec, x, y, precision=self.matmul_precision)

  def grouped(self, x_MD: jax.Array, y_EDF: jax.Array, sizes_E: jax.Array, by: Name, *, out: str | None = None) -> jax.Array:
    """Multiply each group of consecutive rows of x by its own matrix. Return [M, F]; operands and result are in ``dtype``.

    Args:
      x_MD: rows, sorted by group.
      y_EDF: one matrix for each group.
      sizes_E: int32, number of rows in each group.
      by: name of the kernel.
      out: dtype of the result. "float32" returns the float32 sums; float32 operands and their gradients then keep the range of
        float32. None: ``dtype``.
    """
    if out not in (None, self.dtype):
      # The kernel rounds float32 operands itself, so that their gradients keep the range of float32.
      x, y = (a if a.dtype == jnp.float32 else self.cast(a) for a in (x_MD, y_EDF))
      return kernel(by).sums(x, y, sizes_E, self.dtype, self.matmul_precision)
    return kernel(by).run(self.cast(x_MD), self.cast(y_EDF), sizes_E, self.matmul_precision)


_TILE_BYTES = 1 << 30  # largest float32 piece of a weight's gradient that devices add up at once
_LARGE_BYTES = 1 << 24  # devices may add up several gradients at once if they are smaller than this, such as those of adapters


def _spelled_out(spec: str, rank: int) -> str:
  """Replace "..." in an einsum specification by letters, so that derivatives may sum over these axes. rank: of operand one."""
  if "..." not in spec:
    return spec
  named = len(spec.split(",")[0].replace("...", ""))
  return spec.replace("...", "zyxwvu"[: rank - named])


def _by_rows(spec: str, x: jax.Array) -> tuple[str, jax.Array, tuple[int, ...]]:
  """On a CPU, merge the leading axes that x and the result share and the other operand does not have.

  XLA for CPUs transposes the operands of a general product by copying them, but multiplies transposed matrices without a copy.
  Without the merge, the gradient of a weight (a sum over rows and positions) needed a transposed copy of the cotangent.

  Returns:
    The specification, x, and the sizes of the merged axes. The sizes are () if nothing changed.
  """
  operands, out = spec.split("->")
  first, second = operands.split(",")
  count = 0
  while first[count : count + 1] == out[count : count + 1] != "" and first[count] not in second:
    count += 1
  # A single leading axis needs no merge, and other platforms transpose without a copy.
  if count < 2 or not on_one_cpu():
    return spec, x, ()
  rows = x.reshape(math.prod(x.shape[:count]), *x.shape[count:])
  return f"{first[count - 1 :]},{second}->{out[count - 1 :]}", rows, x.shape[:count]


@dataclass(frozen=True)
class _How:
  """The settings of a product.

  Attributes:
    spec: einsum specification that contains only letters.
    precision: ``jax.lax.Precision``.
    out: dtype of the result.
    parts: which sums are added over devices (``partition.shared_sums``).
    low: the operands of the product, and of the products of its backward pass, are float8 numbers.
  """

  spec: str
  precision: str
  out: jnp.dtype
  parts: Literal["none", "weights", "all"]
  low: bool

  @property
  def batched(self) -> bool:
    """True if some axis occurs in both operands and in the result."""
    operands, out = self.spec.split("->")
    first, second = operands.split(",")
    return not set(first).isdisjoint(set(second) & set(out))

  def rounded(self, spec: str, total: jax.Array, dtype: Any) -> jax.Array:
    """Round a product to a dtype. If devices add up partial sums, round after the addition.

    The mesh axis ``tensor`` may split heads and hidden sizes, so a sum over them is partial on each device. No mesh axis
    splits D, the width of the residual stream."""
    operands, out = spec.split("->")
    first, second = operands.split(",")
    summed = set(first) & set(second) - set(out)
    shared = self.parts == "all" and total.dtype == jnp.float32 and not summed <= {"D"}
    return rounded_sum(total, dtype) if shared else total.astype(dtype)

  def operand(self, x: jax.Array, dtype: str = float8.NUMBERS) -> jax.Array | float8.Scaled:
    """The operand as the product reads it."""
    return float8.scaled(x, dtype) if self.low else x

  def multiply(self, spec: str, x: Any, y: Any, dtype: Any) -> jax.Array:
    """Multiply two operands. ``dtype`` is that of the result. None means the dtype of the operands, if they are not float8."""
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
  # Partial sums that devices add up stay float32 until they are added.
  wide = jnp.float32 if how.parts == "all" else how.out
  return how.rounded(how.spec, how.multiply(how.spec, how.operand(x), how.operand(y), wide), how.out)


def _product_fwd(how, x, y):
  # The float8 operands are not saved. x may feed several weights, which would save one float8 copy each, and x itself is saved
  # in any case.
  return _product(how, x, y), (x, y)


def _product_bwd(how, saved, g):
  """Compute the gradients with operands as narrow as those of the forward pass, as fused attention kernels do.

  A product of a float32 cotangent and a bfloat16 operand would run as a float32 product, many times slower. The cotangent can
  be rounded to bfloat16 because bfloat16 has the range of float32. float16 does not have that range, so the other operand is
  converted to float32 instead. A float8 operand has its own scale, so the cotangent is converted without rounding it first.
  """
  # Bring the cotangent and the saved operands to one dtype.
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
  # Choose the dtype of each gradient. The gradient of a weight is a sum over rows, and only x has the axis of rows.
  of_weight = how.parts == "weights" and x_axes[0] not in y_axes
  own = saved[0].dtype if how.low else None
  of_x = jnp.float32 if how.parts == "all" else own
  of_y = jnp.float32 if how.parts == "all" or of_weight else own
  of_dx = f"{result},{y_axes}->{x_axes}"
  # The gradient of x sums over the axes of the result that x does not have.
  dx = how.multiply(of_dx, g, y, of_x)

  def dy_of(g):
    total = how.multiply(f"{result},{x_axes}->{y_axes}", g, x, of_y)
    late = total.dtype == jnp.float32 and adds_up_whole_weights()
    return rounded_sum(total, saved[1].dtype) if late else total.astype(saved[1].dtype)

  # Pieces are cut along an axis that the weight and the result share.
  kept = next(a for a in y_axes if a in result)
  in_y, in_g, columns = y_axes.index(kept), result.index(kept), saved[1].shape[y_axes.index(kept)]
  # Compute the gradient of a large table in pieces. Each piece is added over devices in float32 and rounded before the next
  # one, because the float32 gradient of the complete table would not fit in memory.
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
  # Round the gradient of x last, after devices have added their partial sums.
  dx = how.rounded(of_dx, dx, saved[0].dtype)
  return barrier_on_tpus(dx, dy) if of_weight and saved[1].size * 4 >= _LARGE_BYTES else (dx, dy)


_product.defvjp(_product_fwd, _product_bwd)
