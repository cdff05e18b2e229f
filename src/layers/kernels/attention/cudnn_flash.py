"""cuDNN's fused attention on NVIDIA GPUs. It always computes scores and softmax in float32."""

import re

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import Tokens, attention_mask
from maxtext_like.layers.kernels.attention.registry import AttentionKernel, Case, whole_rows
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.sharding_rules import Rules

_LANES = 128


def cudnn_attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKV: jax.Array,
  tokens: Tokens,
  *,
  window: int | None,
  bidirectional_images: bool,
  scale: float,
  precision: Precision,
  rules: Rules,
  causal: bool = True,
) -> jax.Array:
  """Compute ``registry.attend`` for rows without images."""
  del bidirectional_images, precision, rules  # JAX partitions this kernel
  length = q_BTNH.shape[1]
  # Pad the patches of images to a multiple of the lanes. Causal rows of such lengths are refused (see ``_refuses``).
  if not causal and (missing := -length % _LANES):
    segments = jnp.ones(q_BTNH.shape[:2], jnp.int32) if tokens.segments is None else tokens.segments
    tokens = Tokens(jnp.pad(segments, ((0, 0), (0, missing))))
    q_BTNH, k_BSKH, v_BSKV = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in (q_BTNH, k_BSKH, v_BSKV))
  B, T = q_BTNH.shape[:2]
  # JAX requires values as wide as keys. Pad those of latent attention with zeros, and cut the result.
  width = v_BSKV.shape[-1]
  v_BSKV = jnp.pad(v_BSKV, [(0, 0)] * 3 + [(0, q_BTNH.shape[-1] - width)])
  # Without segments, cuDNN's own causal and window masks suffice.
  local = None if window is None else (window - 1, 0)
  with jax.named_scope("cudnn_attention"):
    if tokens.segments is None:
      out = jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKV, scale=scale, is_causal=causal, local_window_size=local, implementation="cudnn"
      )
      return out[..., :width]
    mask_BTS = attention_mask(tokens, B, T, window=window, bidirectional_images=False, causal=causal)
    out = jax.nn.dot_product_attention(
      q_BTNH,
      k_BSKH,
      v_BSKV,
      mask=mask_BTS[:, None],
      scale=scale,
      is_causal=causal,
      local_window_size=local,
      implementation="cudnn",
    )
    # cuDNN applies the mask as a finite bias. A query that sees no key would therefore get the mean of all values.
    return jnp.where((tokens.segments > 0)[:, :, None, None], out[..., :width], 0)[:, :length]


def _refuses(case: Case) -> list[str]:
  reasons = whole_rows(case)
  if case.platform not in ("gpu", "cuda"):
    reasons.append(f"it runs on NVIDIA GPUs, not on {case.platform}")
  # JAX's limits for older GPUs are in cudnn/fused_attention_stablehlo.py.
  # An unknown capability is accepted; the self-test decides.
  known = re.fullmatch(r"(\d+)\.(\d+)", case.capability or "")
  if known and int(known[1]) < 8:
    reasons.append(f"it needs a GPU of compute capability 8.0 or higher, not {case.capability}")
  elif known and int(known[1]) < 9 and case.head_dim > 128:
    reasons.append(f"head_dim {case.head_dim} is above 128, which needs compute capability 9.0, not {case.capability}")
  if case.head_dim > 256 or case.head_dim % 8:
    reasons.append(f"head_dim {case.head_dim} is not a multiple of 8 up to 256")
  if case.value_dim > case.head_dim:
    reasons.append(f"value heads ({case.value_dim}) are wider than query heads ({case.head_dim})")
  if case.dtype not in ("bfloat16", "float16"):
    reasons.append(f"dtype {case.dtype} is neither bfloat16 nor float16")
  if case.causal and case.length % _LANES:
    # cuDNN's bfloat16 backward gave NaN gradients with a finite loss at length % 128 == 64 (pytorch issue 196678).
    reasons.append(f"the row length {case.length} is not a multiple of {_LANES}")
  if case.bidirectional_images:
    reasons.append("the mask has bidirectional images")
  if case.soft_cap is not None:
    reasons.append("JAX cannot pass a soft cap of the scores to cuDNN")
  if case.probabilities:
    reasons.append("the layer needs the probabilities as an array")
  return reasons


KERNEL = AttentionKernel(
  name="cudnn_flash",
  refuses=_refuses,
  run=cudnn_attention,
  fused=True,
  slow=lambda case: case.documents,  # documents need a mask of positions x positions
  title="cuDNN attention",
  scope="cudnn_attention",
  operation=lambda target, scopes: target if target.startswith("__cudnn$fmha") else None,
)
