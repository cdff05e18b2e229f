"""Scaled dot-product attention: the reference in plain XLA, fused kernels, and the choice between them.

B batch, T query, S key, N query heads, K key-value heads, G = N / K queries a key-value head, H head, V value head.
A fused kernel is used only where it honours the mask and the precision flags; asked for where it does not, it is refused.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from maxtext_like.layers.blockwise import BLOCK, blockwise_attention
from maxtext_like.layers.masks import Tokens, attention_mask, masked_softmax
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.splash import splash_attention

Kernel = Literal["auto", "dot_product", "cudnn_flash", "splash"]


def choose_kernel(
  kernel: Kernel, *, platform: str, head_dim: int, value_dim: int, dtype: str, blocks: bool, length: int | None = None
) -> Kernel:
  """The kernel that will run.

  Args:
    kernel: what the configuration asks for; "auto" takes the fastest that honours everything.
    platform: "cpu", "gpu", "tpu": where the program will run.
    head_dim, value_dim: sizes of q.k heads and of v heads.
    dtype: dtype of q, k and v.
    blocks: the mask has bidirectional image blocks.
    length: positions of a row; None: a multiple of 128.

  Returns:
    "dot_product", "cudnn_flash" or "splash".

  Raises:
    ValueError: an explicit kernel cannot honour the mask, the sizes or the dtype.
  """
  if kernel == "dot_product":
    return kernel
  fused = kernel
  if kernel == "auto":
    fused = "splash" if platform == "tpu" else "cudnn_flash"
  on_tpu = fused == "splash"
  reasons = []
  if platform not in (("tpu",) if on_tpu else ("gpu", "cuda")):
    reasons.append(f"it runs on {'TPUs' if on_tpu else 'NVIDIA GPUs'}, not on {platform}")
  if on_tpu and head_dim % 128:
    reasons.append(f"head_dim {head_dim} is not a multiple of 128")
  if not on_tpu and (head_dim > 256 or head_dim % 8):
    reasons.append(f"head_dim {head_dim} is not a multiple of 8 up to 256")
  if value_dim != head_dim:
    reasons.append(f"value heads ({value_dim}) differ from query heads ({head_dim})")
  if on_tpu and dtype != "bfloat16":
    reasons.append(f"dtype {dtype} is not bfloat16")
  if not on_tpu and dtype not in ("bfloat16", "float16"):
    reasons.append(f"dtype {dtype} is neither bfloat16 nor float16")
  if not on_tpu and length is not None and length % 128:
    # cuDNN's bfloat16 backward gave NaN gradients with a finite loss at length % 128 == 64 (pytorch issue 196678).
    reasons.append(f"the row length {length} is not a multiple of 128")
  if blocks:
    reasons.append("the mask has bidirectional image blocks")
  if kernel == "auto":
    return "dot_product" if reasons else fused
  if reasons:
    raise ValueError(f"attention={kernel} cannot be used here: {'; '.join(reasons)}; use attention=auto or dot_product")
  return kernel


def dot_product_attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKV: jax.Array,
  mask_BTS: jax.Array,
  *,
  scale: float,
  precision: Precision,
) -> tuple[jax.Array, jax.Array]:
  """Attention with every score written out; obeys ``float32_qk_product`` and ``float32_logits``.

  Args:
    q_BTNH, k_BSKH, v_BSKV: queries, keys, values; query head n reads key-value head n // (N / K).
    mask_BTS: bool, [B or 1, T, S]; a query that sees no key gets zeros.
    scale: multiplies the scores.
    precision: flags.

  Returns:
    The attended values [B, T, N, V] in ``dtype``, and the probabilities [B, K, G, T, S] (float32 with float32_logits).
  """
  B, T, N, H = q_BTNH.shape
  K = k_BSKH.shape[2]
  q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
  with jax.named_scope("qk_product"):
    scores = precision.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, float32=precision.float32_qk_product) * scale
  with jax.named_scope("softmax"):
    scores = scores.astype(jnp.float32 if precision.float32_logits else precision.dtype)
    probs_BKGTS = masked_softmax(scores, mask_BTS[:, None, None])
  with jax.named_scope("pv_product"):
    out_BTKGV = precision.einsum("BKGTS,BSKV->BTKGV", probs_BKGTS, v_BSKV)
  return out_BTKGV.reshape(B, T, N, -1), probs_BKGTS


def _cudnn_flash(q_BTNH, k_BSKH, v_BSKV, tokens: Tokens, *, window: int | None, scale: float) -> jax.Array:
  """cuDNN's fused attention: float32 scores and softmax by construction, so both float32 flags hold."""
  B, T = q_BTNH.shape[:2]
  local = None if window is None else (window - 1, 0)
  if tokens.segments is None:
    return jax.nn.dot_product_attention(
      q_BTNH, k_BSKH, v_BSKV, scale=scale, is_causal=True, local_window_size=local, implementation="cudnn"
    )
  mask_BTS = attention_mask(tokens, B, T, window=window, bidirectional_blocks=False)
  out = jax.nn.dot_product_attention(
    q_BTNH,
    k_BSKH,
    v_BSKV,
    mask=mask_BTS[:, None],
    scale=scale,
    is_causal=True,
    local_window_size=local,
    implementation="cudnn",
  )
  # cuDNN takes the mask as a finite bias, so a query that sees no key would get the mean of all values.
  return jnp.where((tokens.segments > 0)[:, :, None, None], out, 0)


def attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKV: jax.Array,
  tokens: Tokens,
  *,
  window: int | None,
  bidirectional_blocks: bool,
  scale: float,
  precision: Precision,
  kernel: Kernel,
) -> jax.Array:
  """Causal self-attention of one row over itself, by the kernel that ``choose_kernel`` picked.

  Args:
    q_BTNH, k_BSKH, v_BSKV: queries, keys and values, T = S.
    tokens: segments and image blocks.
    window: keys a query sees, itself included; None: all before it.
    bidirectional_blocks: tokens of one image see each other.
    scale: multiplies the scores.
    precision: flags.
    kernel: "dot_product" (in blocks of queries where a row is long), "cudnn_flash" or "splash".

  Returns:
    [B, T, N, V] in ``dtype``.
  """
  if kernel == "splash":
    with jax.named_scope("splash_attention"):
      return splash_attention(q_BTNH, k_BSKH, v_BSKV, tokens, window=window, scale=scale)
  if kernel == "cudnn_flash":
    with jax.named_scope("cudnn_attention"):
      return _cudnn_flash(q_BTNH, k_BSKH, v_BSKV, tokens, window=window, scale=scale)
  B, T = q_BTNH.shape[:2]
  if T > BLOCK and not (bidirectional_blocks and tokens.blocks is not None):
    return blockwise_attention(q_BTNH, k_BSKH, v_BSKV, tokens.segments, window=window, scale=scale, precision=precision)
  mask = attention_mask(tokens, B, T, window=window, bidirectional_blocks=bidirectional_blocks)
  return dot_product_attention(q_BTNH, k_BSKH, v_BSKV, mask, scale=scale, precision=precision)[0]
