"""Soft caps of logits and attention scores (Gemma 2): cap * tanh(x / cap) is x where it is small, and never beyond the cap."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.precision import Precision


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
  """cap * tanh(x / cap), in the dtype of x; x without a cap."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def slope(capped: jax.Array, cap: float) -> jax.Array:
  """The derivative of ``soft_cap`` where it gave ``capped``: 1 - tanh^2, float32; 0 where that was rounded beyond the cap."""
  tanh = jnp.clip(capped.astype(jnp.float32) / cap, -1, 1)
  return (1 - tanh) * (1 + tanh)


def softmax_scores(scores: jax.Array, precision: Precision, cap: float | None) -> jax.Array:
  """Scores after the scale as the softmax takes them: capped, in the dtype of ``float32_logits``."""
  return capped_scores(scores, precision, cap)[0]


def capped_scores(scores: jax.Array, precision: Precision, cap: float | None) -> tuple[jax.Array, jax.Array]:
  """``softmax_scores``, and what the cap made of them, which ``slope`` is of, in the dtype in which it did.

  They are capped in float32 where either of ``float32_qk_product`` and ``float32_logits`` has them in it, and under the scope
  of the one that does.
  """
  dtype = jnp.float32 if precision.float32_logits else precision.dtype
  capped: Any
  if cap is not None and precision.float32_qk_product and not precision.float32_logits:
    with jax.named_scope("qk_product"):
      capped = _capped(scores, cap)
    with jax.named_scope("softmax"):
      return capped.astype(dtype), capped
  with jax.named_scope("softmax"):
    scores = scores.astype(dtype)
    capped = scores if cap is None else _capped(scores, cap)
    return capped, capped


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _capped(scores: jax.Array, cap: float) -> jax.Array:
  """``soft_cap``, whose gradient has no step that is larger than its result: JAX's own would multiply by 2 * cap on its way,
  which float16 may not hold."""
  return soft_cap(scores, cap)


def _capped_forward(scores, cap):
  capped = soft_cap(scores, cap)
  return capped, capped


def _capped_backward(cap, capped, g):
  return ((g.astype(jnp.float32) * slope(capped, cap)).astype(g.dtype),)


_capped.defvjp(_capped_forward, _capped_backward)
