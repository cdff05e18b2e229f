"""Soft caps of logits and attention scores (Gemma 2): cap * tanh(x / cap) is about x for small x and never exceeds the cap."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.precision import Precision


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
  """Return cap * tanh(x / cap) in the dtype of x, or x if there is no cap."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def slope(capped: jax.Array, cap: float) -> jax.Array:
  """Return the derivative of ``soft_cap``, 1 - tanh^2, in float32. ``capped`` is the value of ``soft_cap``.

  The derivative is 0 where rounding has moved ``capped`` beyond the cap."""
  # Recover tanh(x / cap) from the capped value, without the uncapped scores.
  tanh = jnp.clip(capped.astype(jnp.float32) / cap, -1, 1)
  return (1 - tanh) * (1 + tanh)


def softmax_scores(scores: jax.Array, precision: Precision, cap: float | None) -> jax.Array:
  """Cap the scaled scores and return them in the dtype of the softmax (``float32_logits``)."""
  return capped_scores(scores, precision, cap)[0]


def capped_scores(scores: jax.Array, precision: Precision, cap: float | None) -> tuple[jax.Array, jax.Array]:
  """Return ``softmax_scores``, and the capped scores in the dtype in which they were computed, for ``slope``.

  Scores are capped in float32 if either ``float32_qk_product`` or ``float32_logits`` keeps them in float32. The operations are
  in the named scope of the key that decides their dtype.
  """
  dtype = precision.softmax_dtype
  capped: Any
  # Cap before the scores are rounded to the dtype of the softmax, if that is the narrower one.
  if cap is not None and precision.qk_dtype == "float32" and dtype != "float32":
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
  """``soft_cap`` with a gradient whose intermediate values never exceed the result. JAX's own derivative would multiply by
  2 * cap, which may overflow float16."""
  return soft_cap(scores, cap)


def _capped_forward(scores, cap):
  capped = soft_cap(scores, cap)
  return capped, capped


def _capped_backward(cap, capped, g):
  return ((g.astype(jnp.float32) * slope(capped, cap)).astype(g.dtype),)


_capped.defvjp(_capped_forward, _capped_backward)
