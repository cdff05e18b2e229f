"""Matrix products of float8 numbers. Each tensor is scaled when it is multiplied; there is no history and no state.

Forward operands use the e4m3 format. Gradients use e5m2, because their numbers differ more in size (Micikevicius et al. 2022).
A tensor is divided by the smallest power of two that brings its largest number into the range of the format. A power of two is
used instead of max / 448 because scaling by it is exact in every dtype. The rounding of 1.3 to 1.25 or to 1.375 then does
not depend on the other numbers of the tensor, such as other rows, the parts of other devices, or the prompt before a generated
token. Only numbers about 2^14 times smaller than the largest one are affected.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_like.layers.partition import as_declared, on_gpu

NUMBERS = "float8_e4m3fn"  # 3 mantissa bits, up to 448
GRADIENTS = "float8_e5m2"  # 2 mantissa bits, up to 57344

# The largest number of a format is 1.75 * 2^_TOP.
_TOP = {NUMBERS: 8, GRADIENTS: 15}
_BITS = 23  # mantissa bits of float32
_ABOVE = (1 << _BITS) - 1 - (3 << _BITS - 2)  # adding this to the bits of a float32 rounds the exponent up if mantissa > 1.75


class Scaled(NamedTuple):
  """A tensor in float8.

  Attributes:
    values: float8, of any shape.
    scale: float32 scalar, a power of two. The tensor equals values * scale.
  """

  values: jax.Array
  scale: jax.Array


SCOPE = "to_float8"
"""Named scope of the conversion: largest numbers, scales and casts."""


@jax.named_scope(SCOPE)
def scaled(x: jax.Array, dtype: str) -> Scaled:
  """Round x to float8, to nearest.

  Nothing is clipped, because the scale follows from the largest finite number. A non-finite number becomes NaN at its position,
  so it affects exactly the sums that contain it. A tensor of zeros stays zero.

  Args:
    x: float32, bfloat16 or float16 array of any shape.
    dtype: ``NUMBERS`` or ``GRADIENTS``.
  """
  # Find the power of two from the bits of the largest finite number.
  largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0).astype(jnp.float32)
  exponent = (jax.lax.bitcast_convert_type(largest, jnp.int32) + _ABOVE >> _BITS) - _TOP[dtype]
  # Keep the exponent and that of its inverse in the range of normal numbers. A tensor of zeros gets the smallest scale.
  exponent = jnp.clip(exponent, 1, 253)
  scale, inverse = (jax.lax.bitcast_convert_type(e << _BITS, jnp.float32) for e in (exponent, 254 - exponent))
  wide = jnp.float32 if x.dtype == jnp.float16 else x.dtype  # a dtype that holds every power of two that float32 holds
  small = x.astype(wide) * inverse.astype(wide)
  # Map non-finite numbers to NaN first: a cast may saturate, as on NVIDIA GPUs, and would turn infinity into 448.
  values = jnp.where(jnp.isfinite(small), small, jnp.nan).astype(dtype)
  # NVIDIA's products sum over the last axis of both operands, so most tensors are needed in two memory orders. XLA writes both
  # in one pass if the first has a fixed layout. Otherwise it transposes the wider input, and then the result.
  return Scaled(as_declared(values), scale)


def product(spec: str, x: Scaled, y: Scaled, dtype: jax.typing.DTypeLike) -> jax.Array:
  """Multiply two tensors, accumulated in float32.

  The operands are float8 arrays, and the result is scaled. Casting to float8 and back would not work: a compiler may remove
  such a pair of casts (XLA does on GPUs, where it may keep excess precision), and it selects float8 kernels only for float8
  operands.

  Args:
    spec: einsum specification of two operands that contains only letters. An axis of only one operand must not be summed.
    x, y: operands. GPUs do not support a product of two ``GRADIENTS``.
    dtype: dtype of the result.
  """
  # Find the batch axes and the summed axes.
  operands, result = spec.split("->")
  x_axes, y_axes = operands.split(",")
  if result[0] in y_axes and result[0] not in x_axes:
    x, y, x_axes, y_axes = y, x, y_axes, x_axes
  batch = [a for a in x_axes if a in y_axes and a in result]
  summed = [a for a in x_axes if a in y_axes and a not in result]
  numbers = lambda axes, of: tuple(axes.index(a) for a in of)
  dims = (
    (numbers(x_axes, summed), numbers(y_axes, summed)),
    (numbers(x_axes, batch), numbers(y_axes, batch)),
  )
  # Unscaled sums can be 448 * 448 times the number of summands, which exceeds float16.
  wide = jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype
  out = jax.lax.dot_general(x.values, y.values, dims, precision=_precision(), preferred_element_type=wide)
  with jax.named_scope(SCOPE):
    out = (out * (x.scale * y.scale).astype(wide)).astype(dtype)
  # Bring the axes into the order of the result.
  made = "".join([*batch, *(a for a in x_axes if a not in batch + summed), *(a for a in y_axes if a not in batch + summed)])
  return out if made == result else jnp.transpose(out, numbers(made, result))


def _precision() -> Any:
  """Return the precision for sums in float32.

  With less, XLA lets Hopper GPUs accumulate in 14 bits: cuBLASLt does with "default", and the Triton kernels that XLA also
  tries do with every setting except this one. CPUs do not support this setting."""
  gpu = jax.default_backend() == "gpu" if jax.sharding.get_abstract_mesh().empty else on_gpu()
  return jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32 if gpu else "highest"
