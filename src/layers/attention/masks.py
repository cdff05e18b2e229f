"""Masks, soft caps and softmax of attention scores. Masks are boolean arrays, combined once and never added to scores.

B batch, T query, S key. Positions are indices in the row of the batch. Segments separate documents packed into one row. A
window of W keys is therefore the same in the row and in the document.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.precision import Precision


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
  """Documents and images of the tokens of a batch.

  Attributes:
    segments: int32 [B, T], 0 is padding, documents count from 1; None: every row is one document without padding.
    images: int32 [B, T], 0 is text, images count from 1. Tokens of one image see each other. None: no images.
    one_document: every row is known to be one document followed by padding, so causal attention needs no document mask.
  """

  segments: jax.Array | None = None
  images: jax.Array | None = None
  one_document: bool = field(default=False, metadata={"static": True})

  @property
  def several_documents(self) -> bool:
    """True if a row may hold several documents, judging by what is known before the arrays are read."""
    return self.segments is not None and not self.one_document

  @property
  def real(self) -> jax.Array | None:
    """bool [B, T]: which tokens are not padding, if rows are known to be one document; None for other rows.

    Rows known to be one document have no document mask, so padding sees the tokens before it. Only padding sees padding. The
    output of causal attention at these positions must be set to zero with ``zeroed``, which also blocks their gradients. Other
    rows have zeros there already.
    """
    return self.segments > 0 if self.segments is not None and self.one_document else None


def zeroed(x: jax.Array, real_BT: jax.Array | None) -> jax.Array:
  """Set x [B, T, ...] to zero where ``real_BT`` is False; return x unchanged if it is None."""
  return x if real_BT is None else jnp.where(real_BT.reshape(*real_BT.shape, *[1] * (x.ndim - 2)), x, 0)


@dataclass(frozen=True)
class Keys:
  """Keys at other positions than the queries.

  Attributes:
    tokens: segments and images of the keys, [B, S].
    first: index of the key at the position of the first query; an array if it is known only at run time.
  """

  tokens: Tokens
  first: int | jax.Array


def causal_mask(query: jax.Array, key: jax.Array, *, window: int | None, images: jax.Array | None = None) -> jax.Array:
  """Return a mask by position: each query sees itself, earlier keys, and all tokens of its image.

  Args:
    query, key: int32 [T] and [S], indices in the row.
    window: W, the query itself and the W - 1 keys before it; None: all keys before it. It also limits the past of images.
    images: bool [B, T, S], which pairs belong to one image; None: no images.

  Returns:
    bool [B or 1, T, S].
  """
  # Causal, then images, then the window, which limits the past of images too.
  mask = (key[None, :] <= query[:, None])[None]
  if images is not None:
    mask = mask | images
  if window is not None:
    mask = mask & (key[None, :] > query[:, None] - window)[None]
  return mask


def same_image(query: jax.Array, key: jax.Array) -> jax.Array:
  """Return bool [B, T, S]: which tokens belong to the same image, from their ``Tokens.images``."""
  return (query[:, :, None] == key[:, None, :]) & (query[:, :, None] > 0)


def same_document(query: jax.Array, key: jax.Array) -> jax.Array:
  """Return bool [B, T, S]: which tokens belong to the same document, from segments [B, T] and [B, S]. Padding belongs to
  none."""
  return (query[:, :, None] == key[:, None, :]) & (key[:, None, :] > 0)


def attention_mask(
  tokens: Tokens,
  batch: int,
  length: int,
  *,
  window: int | None,
  bidirectional_images: bool,
  among: tuple[int, Keys] | None = None,
  causal: bool = True,
) -> jax.Array:
  """Return a mask of the keys that each query sees.

  Args:
    tokens: segments and images of the queries.
    batch: B, rows.
    length: T, positions in a row.
    window: W, the query itself and the W - 1 keys before it; None: all keys before it.
    bidirectional_images: tokens of one image also see later tokens of that image. The window still limits the past.
    among: S and the keys, if they are at other positions than the queries.
    causal: queries do not see later keys. False: queries see their complete document, and ``window`` must be None.

  Returns:
    bool [B or 1, T, S].
  """
  # Combine the masks by position, image and document.
  count, keys = among or (length, Keys(tokens, 0))
  images = None
  if bidirectional_images and tokens.images is not None and keys.tokens.images is not None:
    images = same_image(tokens.images, keys.tokens.images)
  if causal:
    mask = causal_mask(keys.first + jnp.arange(length), jnp.arange(count), window=window, images=images)
  else:
    # Vision towers: every patch sees every patch of its image.
    mask = jnp.ones((1, length, count), bool)
  # Rows without segments are one document each, and need no document mask.
  if tokens.segments is None or keys.tokens.segments is None:
    return mask
  return mask & same_document(tokens.segments, keys.tokens.segments)


def numbered_images(token_types: jax.Array) -> jax.Array:
  """Compute ``Tokens.images``: every run of image (1) or video (2) tokens of a row is one image, numbered from 1.

  Args:
    token_types: int32 [B, T]: 0 text, 1 image, 2 video; other types count as text.

  Returns:
    int32 [B, T].
  """
  # A new image begins where the previous token is not part of one.
  image = (token_types == 1) | (token_types == 2)
  before = jnp.pad(image, ((0, 0), (1, 0)))[:, :-1]
  # The number of images that have begun is the number of the current one.
  return jnp.where(image, jnp.cumsum(image & ~before, axis=1), 0).astype(jnp.int32)


def masked_fill(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Replace masked elements of x by the lowest finite number of x's dtype, so that no visible element is lower.

  Do not add anything to the result: it could become infinite.
  """
  return jnp.where(mask, x, jnp.finfo(x.dtype).min)


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
  """Softmax over the unmasked elements of the last dimension, in the dtype of the scores.

  A row without any visible element gives zeros and zero gradients instead of NaN. The custom backward pass saves only the
  result. Forward mode (``jax.jvp``) is not supported.

  Args:
    scores: [..., S], with the shape of the result.
    mask: bool, broadcast to the scores.
  """
  return _masked_softmax(scores, mask)


@jax.custom_vjp
def _masked_softmax(scores, mask) -> Any:
  top = jnp.max(masked_fill(scores, mask), axis=-1, keepdims=True)
  # A masked score can be far above the maximum. The inner where keeps its exponential from overflowing.
  weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0)
  # A row without a visible key has the sum 0. Dividing by 1 instead gives zeros.
  total = jnp.sum(weights, axis=-1, keepdims=True)
  return weights / jnp.where(total == 0, 1, total)


def _masked_softmax_fwd(scores, mask):
  probs = _masked_softmax(scores, mask)
  return probs, probs


def _masked_softmax_bwd(probs, g):
  # Compute in float32, because the difference can overflow float16. Cotangents of elements without weight are dropped, also if
  # they are infinite.
  p, g = probs.astype(jnp.float32), jnp.where(probs > 0, g.astype(jnp.float32), 0)
  return (p * (g - jnp.sum(p * g, axis=-1, keepdims=True))).astype(probs.dtype), None


_masked_softmax.defvjp(_masked_softmax_fwd, _masked_softmax_bwd)


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
