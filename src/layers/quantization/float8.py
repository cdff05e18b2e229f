"""Matrix products of float8 numbers, each tensor scaled by itself at the moment it is multiplied: no history, no state.

The first format is e4m3 for what a layer multiplies, the other e5m2 for gradients, whose numbers differ more in size
(Micikevicius et al. 2022). A tensor is divided by the least power of two that brings its largest number within the format. A
power of two, and not the largest number over 448 itself, because then nothing but the format rounds: scaling there and back is
exact in every dtype, and whether 1.3 becomes 1.25 or 1.375 does not depend on what else the tensor holds, be it other rows,
other devices' parts, or the prompt before a generated token. Only numbers some 2^14 times smaller than the largest feel it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_like.layers.partition import as_declared, on_gpu

NUMBERS = "float8_e4m3fn"  # 3 bits behind the point, up to 448
GRADIENTS = "float8_e5m2"  # 2 bits behind the point, up to 57344

# The largest number is 1.75 * 2^_TOP; half the numbers of a float32's significand are below 1.75.
_TOP = {NUMBERS: 8, GRADIENTS: 15}
_BITS = 23  # of float32's significand
_ABOVE = (1 << _BITS) - 1 - (3 << _BITS - 2)  # added to the bits of a float32, it goes up to the next power of two beyond 1.75


class Scaled(NamedTuple):
  """A tensor in float8.

  Attributes:
    values: float8, of any shape.
    scale: float32 scalar, a power of two: what the values are to be multiplied by.
  """

  values: jax.Array
  scale: jax.Array


SCOPE = "to_float8"
"""Of all that is neither the layer's work nor a product: largest numbers, scales, casts."""


@jax.named_scope(SCOPE)
def scaled(x: jax.Array, dtype: str) -> Scaled:
  """x rounded to float8, to nearest.

  Nothing is clipped: the scale follows from the largest finite number. A number that is not finite becomes NaN, in its own
  place, so that it goes on to every sum that it belongs to and to no other. A tensor of zeros stays one.

  Args:
    x: of any shape, float32, bfloat16 or float16.
    dtype: ``NUMBERS`` or ``GRADIENTS``.
  """
  largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0).astype(jnp.float32)
  exponent = (jax.lax.bitcast_convert_type(largest, jnp.int32) + _ABOVE >> _BITS) - _TOP[dtype]
  # Of normal numbers, the inverse too. Zeros get the least.
  exponent = jnp.clip(exponent, 1, 253)
  scale, inverse = (jax.lax.bitcast_convert_type(e << _BITS, jnp.float32) for e in (exponent, 254 - exponent))
  wide = jnp.float32 if x.dtype == jnp.float16 else x.dtype  # which holds any power of two that float32 does
  small = x.astype(wide) * inverse.astype(wide)
  # A cast may saturate, as NVIDIA's does, and would make 448 of infinity.
  values = jnp.where(jnp.isfinite(small), small, jnp.nan).astype(dtype)
  # NVIDIA's products sum over the last axis of both operands, so that most tensors are needed in two orders. XLA makes both at
  # once where it is told the first; else it turns the wider numbers, and the result back.
  return Scaled(as_declared(values), scale)


def product(spec: str, x: Scaled, y: Scaled, dtype: jax.typing.DTypeLike) -> jax.Array:
  """The product of two tensors, accumulated in float32.

  Multiplied are the float8 numbers themselves, and the result is scaled. A compiler would take a cast to float8 and back for
  superfluous, and leave both out (XLA does on GPUs, where it may keep more precision than it is asked for); and this is what it
  makes float8 kernels of.

  Args:
    spec: einsum specification of two operands, letters only, none of them in one operand alone and summed over.
    x, y: operands. A GPU has no product of two ``GRADIENTS``.
    dtype: of the result.
  """
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
  # Unscaled sums may be 448 * 448 times the number of summands, which float16 does not hold.
  wide = jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype
  out = jax.lax.dot_general(x.values, y.values, dims, precision=_precision(), preferred_element_type=wide)
  with jax.named_scope(SCOPE):
    out = (out * (x.scale * y.scale).astype(wide)).astype(dtype)
  made = "".join([*batch, *(a for a in x_axes if a not in batch + summed), *(a for a in y_axes if a not in batch + summed)])
  return out if made == result else jnp.transpose(out, numbers(made, result))


def _precision() -> Any:
  """Sums in float32. Told less, XLA lets Hopper sum in 14 bits: cuBLASLt with "default", and a kernel of Triton, which it tries
  beside it, with any precision but this one, which the CPU does not know."""
  gpu = jax.default_backend() == "gpu" if jax.sharding.get_abstract_mesh().empty else on_gpu()
  return jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32 if gpu else "highest"
