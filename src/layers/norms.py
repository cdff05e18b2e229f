"""Norms: RMSNorm in the variants of Gemma and DeepSeek, and LayerNorm for DeepSeek's index keys and SigLIP.

B batch, T position, D normalized dimension (the last one of any array).
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.kernels.norm import registry
from maxtext_like.layers.param import Param, constant
from maxtext_like.layers.partition import in_float32, rounded_sum, vary_alike
from maxtext_like.layers.precision import Precision


@dataclass(frozen=True, kw_only=True)
class NormConfig:
  """Settings of a norm.

  Attributes:
    dim: size of the last dimension.
    epsilon: added to the mean square.
    with_scale: multiply by a parameter.
    scale_plus_one: the parameter is the scale minus one (Gemma 3).
    round_before_scale: round to ``dtype`` before the multiplication by the scale (Llama, DeepSeek) instead of after it (Gemma).
    initial_scale: initial scale of the norm.
    kernel: name of the kernel that computes the gradients.
  """

  dim: int
  epsilon: float = 1e-6
  with_scale: bool = True
  scale_plus_one: bool = False
  round_before_scale: bool = False
  initial_scale: float = 1.0
  kernel: registry.Name = "xla"


@dataclass(frozen=True)
class RMSNorm:
  """x / sqrt(mean(x^2) + epsilon) * scale, in float32 (Zhang & Sennrich 2019).

  The custom backward pass saves x and one number for each row. Forward mode (``jax.jvp``) is not supported.
  """

  cfg: NormConfig
  precision: Precision

  def params(self) -> dict:
    if not self.cfg.with_scale:
      return {}
    # The stored parameter may be the scale minus one.
    start = self.cfg.initial_scale - 1.0 if self.cfg.scale_plus_one else self.cfg.initial_scale
    return {"scale": Param((self.cfg.dim,), (None,), self.precision.weight_dtype, constant(start))}

  @jax.named_scope("norm")
  def __call__(self, p: dict, x: jax.Array, dtype: str | None = None, *, real: jax.Array | None = None) -> jax.Array:
    """Normalize the last dimension of x, which may have any leading shape.

    Args:
      p: parameters.
      x: input.
      dtype: dtype of the result; None: the dtype of activations.
      real: bool, with x's shape without the last dimension. Where it is False, the result is zero and x has no gradient. None:
        all elements are real.
    """
    normed: Any = _rms_norm(self.cfg, dtype or self.precision.dtype, *self._given(p, x), real)
    return normed

  def with_input(self, p: dict, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return x, for other uses, and its normed form. With a kernel, the gradients of both are computed together."""
    if self.cfg.kernel == "xla":
      return x, self(p, x)
    with jax.named_scope("norm"):
      pair: Any = _with_input(self.cfg, self.precision.dtype, *self._given(p, x))
      return pair

  def _given(self, p: dict, x: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    # The custom derivative returns both gradients as varying inside shard_map, so mark both arguments alike.
    scale, x = vary_alike(p["scale"], x) if self.cfg.with_scale else (None, x)
    return scale, x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rms_norm(cfg: NormConfig, dtype: str, scale: jax.Array | None, x: jax.Array, real: jax.Array | None) -> Any:
  return _rms_norm_fwd(cfg, dtype, scale, x, real)[0]


def _rms_norm_fwd(cfg, dtype, scale, x, real):
  x32 = x.astype(jnp.float32)  # the sum of squares overflows float16 at |x| > 255
  inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + cfg.epsilon)
  # Llama and DeepSeek round before the scale, Gemma after it.
  y = x32 * inverse
  if scale is not None:
    y = y.astype(dtype) * _factor(cfg, scale).astype(dtype) if cfg.round_before_scale else y * _factor(cfg, scale)
  y = y.astype(dtype)
  return y if real is None else jnp.where(real[..., None], y, 0), (scale, x, inverse, real)


def _rms_norm_bwd(cfg, dtype, saved, g):
  """Compute gradients. With the normed u = x * inverse: du = g * scale, dx = inverse * (du - u * mean(u * du))."""
  scale, x, inverse, real = saved
  # The GPU kernel computes both gradients in one pass.
  if cfg.kernel != "xla" and scale is not None:
    return *_by_kernel(cfg, saved, g), None
  # Otherwise recompute the normed input from x and the saved inverse.
  u, du, dscale = x.astype(jnp.float32) * inverse, g.astype(jnp.float32), None
  if real is not None:
    du = jnp.where(real[..., None], du, 0)
  if scale is not None:
    # The gradient of the scale is a sum over all rows of all devices.
    dscale = rounded_sum(jnp.sum(du * u, axis=tuple(range(x.ndim - 1))), scale.dtype)
    du = du * _factor(cfg, scale)
  return dscale, (inverse * (du - u * jnp.mean(u * du, axis=-1, keepdims=True))).astype(x.dtype), None


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_input(cfg: NormConfig, dtype: str, scale: jax.Array, x: jax.Array) -> Any:
  return x, _rms_norm_fwd(cfg, dtype, scale, x, None)[0]


def _with_input_fwd(cfg, dtype, scale, x):
  y, saved = _rms_norm_fwd(cfg, dtype, scale, x, None)
  return (x, y), saved


_with_input.defvjp(_with_input_fwd, lambda cfg, dtype, saved, gs: _by_kernel(cfg, saved, gs[1], gs[0]))


def _by_kernel(cfg: NormConfig, saved: Any, g: jax.Array, stream: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
  """Compute the gradients of the scale and of x. stream: the gradient from other uses of x, which is added."""
  from maxtext_like.layers.kernels.norm import pallas_gpu

  scale, x, inverse, real = saved
  # The kernel works on rows [R, D].
  rows = lambda a: None if a is None else a.reshape(-1, cfg.dim)
  each = None if real is None else jnp.broadcast_to(real, x.shape[:-1]).reshape(-1)
  dx, dscale = pallas_gpu.gradients(rows(x), inverse.reshape(-1), _factor(cfg, scale), rows(g), rows(stream), each)
  return dscale.astype(scale.dtype), dx.reshape(x.shape)


def _factor(cfg: NormConfig, scale: jax.Array) -> jax.Array:
  """Return the factor of a norm, float32 [D]."""
  scale = scale.astype(jnp.float32)
  return 1.0 + scale if cfg.scale_plus_one else scale


@dataclass(frozen=True)
class LayerNorm:
  """(x - mean) / sqrt(var + epsilon) * scale + bias, in float32 (Ba et al. 2016)."""

  cfg: NormConfig
  precision: Precision

  def params(self) -> dict:
    shape, dtype = (self.cfg.dim,), self.precision.weight_dtype
    return {"scale": Param(shape, (None,), dtype, constant(1.0)), "bias": Param(shape, (None,), dtype, constant(0.0))}

  @jax.named_scope("norm")
  def __call__(self, p: dict, x: jax.Array) -> jax.Array:
    """Normalize the last dimension of x, which may have any leading shape. Return the dtype of activations."""
    x32 = x.astype(jnp.float32)
    centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    y = centered * jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + self.cfg.epsilon)
    return (y * in_float32(p["scale"]) + in_float32(p["bias"])).astype(self.precision.dtype)


def named(norm: RMSNorm | LayerNorm, p: dict, name: str, x: jax.Array, *dtype: str, **how: Any) -> jax.Array:
  """Apply ``norm`` with the parameters p[name] in a named scope, so that x-ray can distinguish the norms of a layer."""
  with jax.named_scope(name):
    return norm(p[name], x, *dtype, **how)
