"""The gradients of RMSNorm on Hopper GPUs in one kernel (Pallas' Mosaic GPU).

XLA needs two or three kernels, for sums over a row, sums over rows, and the values that depend on them. Each reads the arrays
again, and one more adds the gradient of the residual stream. This kernel keeps a row in the registers of a warpgroup while
the next one is loaded, so it reads each input and writes each output once. Intermediate values are float32. Equal arguments
give equal bits.

R rows, D normalized dimension, P programs (warpgroups).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.kernels.mosaic_gpu import mosaic
from maxtext_like.layers.kernels.norm.registry import THREADS

_KERNEL = "norm_gradients"
"""Name of the kernel in a program."""

_BLOCKS = 132
"""Number of multiprocessors of an H100 or H200 (SXM)."""
_NARROW = 4096
"""Rows up to this size leave registers for three programs per multiprocessor, longer ones for two."""
_AHEAD = 6144
"""Rows up to this size leave registers for loading the next row."""


def _read(row: Any) -> jax.Array:
  """Load a row [D] from device memory. Each thread gets several groups of neighboring elements."""
  plgpu = mosaic()
  dim = row.shape[0]
  layout = plgpu.Layout.WG_STRIDED((dim,), vec_size=math.gcd(dim // THREADS, 8))
  return plgpu.load(row, layout=layout, optimized=False)


@functools.partial(jax.jit, static_argnames=("interpret",))  # layers share the compiled kernel
def gradients(
  x_RD: jax.Array,
  inverse_R: jax.Array,
  factor_D: jax.Array,
  g_RD: jax.Array,
  stream_RD: jax.Array | None = None,
  real_R: jax.Array | None = None,
  *,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """Compute the gradients of x and of the factor, for y = x * inverse * factor with inverse = 1 / sqrt(mean(x^2) + epsilon).

  With the normed u = x * inverse: du = g * factor, dx = inverse * (du - u * mean(u * du)), and the gradient of the factor is
  the sum of g * u over rows.

  Args:
    x_RD: input of the norm, any floating-point dtype.
    inverse_R, factor_D: float32.
    g_RD: gradient of y.
    stream_RD: gradient from other uses of x. It is added before the sum is rounded. None: there is none.
    real_R: False for rows whose y was set to zero; None: no row was.
    interpret: ``plgpu.InterpretGPUParams``, to run on a CPU, slowly: for tests.

  Returns:
    [R, D] in the dtype of x, and float32 [D].
  """
  plgpu = mosaic()
  R, D = x_RD.shape
  programs, ahead = min(R, _BLOCKS * (3 if D <= _NARROW else 2)), D <= _AHEAD
  # Optional arguments of the kernel.
  beside = [] if stream_RD is None else [stream_RD]
  known = [] if real_R is None else [real_R.astype(jnp.int32)]

  def kernel(x, inverse, factor, g, *refs):
    *more, dx, sums = refs
    rows, real = [x, g, *more[: len(beside)]], more[len(beside) :]
    # The factor stays in registers for all rows.
    program = jax.lax.axis_index("program")
    times = _read(factor)
    read = lambda i: [_read(a.at[i]) for a in rows]

    # Process rows program, program + programs, ... and load the next row before computing with the current one.
    def work(n, carry):
      # ``total`` is the gradient of the factor, ``now`` the row that was loaded during the previous step.
      total, now = carry
      i = program + n * programs
      then = read(jnp.minimum(i + programs, R - 1)) if ahead else None
      one = inverse[i]
      normed, given, *own = (a.astype(jnp.float32) for a in (now if ahead else read(i)))
      normed = normed * one
      if real:
        given = jnp.where(real[0][i] > 0, given, jnp.zeros_like(given))
      total, given = total + given * normed, given * times
      # The gradient of x, and that of its other uses.
      made = one * (given - normed * (jnp.sum(given * normed) / D))
      dx.at[i][...] = (made + own[0] if own else made).astype(x_RD.dtype)
      return total, then

    count = jax.lax.div(R - program + (programs - 1), jnp.int32(programs))
    begin = times * 0, read(program) if ahead else None
    sums.at[program][...] = jax.lax.fori_loop(0, count, work, begin)[0]

  # Each program returns its own sum for the gradient of the factor.
  dx, sums = plgpu.kernel(
    kernel,
    out_type=(jax.ShapeDtypeStruct((R, D), x_RD.dtype), jax.ShapeDtypeStruct((programs, D), jnp.float32)),
    grid=(programs,),
    grid_names=("program",),
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret,
    kernel_name=_KERNEL,
  )(x_RD, inverse_R, factor_D, g_RD, *beside, *known)
  return dx, jnp.sum(sums, axis=0)
