"""Attention masks: boolean, combined once, never added to anything.

B batch, T query, S key. Indices count along the row of the batch; documents packed into a row are told apart by segment,
so that a window of W keys is the same in the row and in the document.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
  """Where the tokens of a batch stand.

  Attributes:
    segments: int32 [B, T], 0 is padding, documents count from 1; None: every row is one document without padding.
    images: int32 [B, T], 0 is text, images count from 1: tokens of one image see each other; None: no images.
    one_document: every row is known to be one document from its beginning on, padding behind it: what is causal sees no other.
  """

  segments: jax.Array | None = None
  images: jax.Array | None = None
  one_document: bool = field(default=False, metadata={"static": True})

  @property
  def several_documents(self) -> bool:
    """Whether a row may hold several, for all that is known without its numbers."""
    return self.segments is not None and not self.one_document

  @property
  def real(self) -> jax.Array | None:
    """Of rows known to be one document, which tokens are no padding, bool [B, T]; None: of other rows.

    Rows known to be one document get no mask, and padding in them sees what stands before it (and is seen by padding alone).
    What a layer makes of its causal attention there is to be zeroed (``zeroed``), which keeps its gradients from all of that.
    Other rows have zeros there already.
    """
    return self.segments > 0 if self.segments is not None and self.one_document else None


def zeroed(x: jax.Array, real_BT: jax.Array | None) -> jax.Array:
  """x, [B, T, ...], with zeros where it is not real; None: x."""
  return x if real_BT is None else jnp.where(real_BT.reshape(*real_BT.shape, *[1] * (x.ndim - 2)), x, 0)


@dataclass(frozen=True)
class Keys:
  """Keys that are not those of the queries' own positions.

  Attributes:
    tokens: segments and images of the keys, [B, S].
    first: the number of the key that stands where the first query does; an array where a program decides it as it runs.
  """

  tokens: Tokens
  first: int | jax.Array


def causal_mask(query: jax.Array, key: jax.Array, *, window: int | None, images: jax.Array | None = None) -> jax.Array:
  """Which keys each query sees by where both stand: itself and those before it, and all of its own image.

  Args:
    query, key: int32 [T] and [S], indices along the row.
    window: W, the query itself and the W - 1 keys before it; None: all keys before it. It cuts the past of images too.
    images: bool [B, T, S], which of them belong to one image; None: none do.

  Returns:
    bool [B or 1, T, S].
  """
  mask = (key[None, :] <= query[:, None])[None]
  if images is not None:
    mask = mask | images
  if window is not None:
    mask = mask & (key[None, :] > query[:, None] - window)[None]
  return mask


def same_image(query: jax.Array, key: jax.Array) -> jax.Array:
  """bool [B, T, S]: which tokens belong to one image, of their ``Tokens.images``."""
  return (query[:, :, None] == key[:, None, :]) & (query[:, :, None] > 0)


def same_document(query: jax.Array, key: jax.Array) -> jax.Array:
  """bool [B, T, S]: which tokens belong to one document, of the segments int32 [B, T] and [B, S]; padding to none."""
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
  """Which keys each query sees.

  Args:
    tokens: segments and images of the queries.
    batch: B, rows.
    length: T, positions in a row.
    window: W, the query itself and the W - 1 keys before it; None: all keys before it.
    bidirectional_images: tokens of one image also see later tokens of that image (the window still cuts the past).
    among: S and the keys, where they are not those of the queries' own positions.
    causal: it sees none behind itself; False: all of its document, and ``window`` is None.

  Returns:
    bool [B or 1, T, S].
  """
  count, keys = among or (length, Keys(tokens, 0))
  images = None
  if bidirectional_images and tokens.images is not None and keys.tokens.images is not None:
    images = same_image(tokens.images, keys.tokens.images)
  if causal:
    mask = causal_mask(keys.first + jnp.arange(length), jnp.arange(count), window=window, images=images)
  else:
    mask = jnp.ones((1, length, count), bool)
  if tokens.segments is None or keys.tokens.segments is None:
    return mask
  return mask & same_document(tokens.segments, keys.tokens.segments)


def numbered_images(token_types: jax.Array) -> jax.Array:
  """``Tokens.images``: every run of image (1) or video (2) tokens of a row is one image, numbered from 1.

  Args:
    token_types: int32 [B, T]: 0 text, 1 image, 2 video; other types count as text.

  Returns:
    int32 [B, T].
  """
  image = (token_types == 1) | (token_types == 2)
  before = jnp.pad(image, ((0, 0), (1, 0)))[:, :-1]
  return jnp.where(image, jnp.cumsum(image & ~before, axis=1), 0).astype(jnp.int32)


def masked_fill(x: jax.Array, mask: jax.Array) -> jax.Array:
  """x where the mask is true, else the lowest finite number of x's dtype, which no visible entry can be below.

  Nothing may be added to the result: it would become infinite.
  """
  return jnp.where(mask, x, jnp.finfo(x.dtype).min)


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
  """Softmax over the last dimension among the unmasked entries, in the dtype of the scores.

  A row without any visible entry gives zeros, and zero gradients, instead of NaN. The backward pass is written out, so that it
  keeps the result alone; there is no forward mode (``jax.jvp``).

  Args:
    scores: [..., S], of the result's shape.
    mask: bool, broadcast to the scores.
  """
  return _masked_softmax(scores, mask)


@jax.custom_vjp
def _masked_softmax(scores, mask) -> Any:
  top = jnp.max(masked_fill(scores, mask), axis=-1, keepdims=True)
  # The inner where keeps the exponent of a masked entry, which can lie far above the top, from overflowing.
  weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  return weights / jnp.where(total == 0, 1, total)


def _masked_softmax_fwd(scores, mask):
  probs = _masked_softmax(scores, mask)
  return probs, probs


def _masked_softmax_bwd(probs, g):
  # In float32: the difference can leave float16. What arrives at an entry that has no weight, even an infinity, is not seen.
  p, g = probs.astype(jnp.float32), jnp.where(probs > 0, g.astype(jnp.float32), 0)
  return (p * (g - jnp.sum(p * g, axis=-1, keepdims=True))).astype(probs.dtype), None


_masked_softmax.defvjp(_masked_softmax_fwd, _masked_softmax_bwd)
