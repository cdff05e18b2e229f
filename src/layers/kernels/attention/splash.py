"""Splash attention: JAX's fused TPU kernel, for documents with a causal mask or a sliding window, and for the patches of
images.

Scores and softmax are float32 inside the kernel, and no S x S array exists in memory. Memory therefore grows linearly with the
length of a row. Tiles that the mask leaves empty are skipped.

B batch, T position, N query heads, K key-value heads, H head.
"""

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.kernels.attention.registry import AttentionKernel, Case, whole_rows
from maxtext_like.layers.partition import by_head
from maxtext_like.layers.sharding_rules import RULES, Rules

_LANES = 128
# Largest tile. 1024 is as fast for heads of 256, but the backward kernel would exceed vector memory for heads of 512.
_TILE = 512


def splash_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  tokens: Tokens,
  *,
  window: int | None,
  scale: float,
  rules: Rules = RULES,
  causal: bool = True,
  soft_cap: float | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Self-attention of each row.

  On a mesh, each device works on its own rows and heads, because the partitioner cannot split a kernel.

  Args:
    q_BTNH, k_BTKH, v_BTKH: queries, keys, values, bfloat16 (float32 in the interpreter); query head n reads key-value
      head n // (N / K). On a TPU, H is a multiple of 64 and at least 128. The width of values is a multiple of 128 and may
      differ from H. Heads of non-causal attention, and rows, are padded to a multiple of 128.
    tokens: segments; images are not supported.
    window: number of keys a query sees, including itself; None: all earlier keys.
    scale: factor on the queries, applied in float32 before they are rounded to their dtype again.
    rules: sharding of the batch on the current mesh.
    causal: queries do not see later keys. False: queries see their complete document.
    soft_cap: soft cap of the float32, unmasked scores; None: no cap.
    interpret: run on any platform, slowly: for tests.

  Returns:
    [B, T, N, H of the values] in the dtype of q; zeros where the segment is 0.
  """
  dtype, T, width = q_BTNH.dtype, q_BTNH.shape[1], v_BTKH.shape[-1]
  # The kernel has no scale, so scale the queries.
  q = (q_BTNH.astype(jnp.float32) * scale).astype(dtype)
  segments = tokens.segments
  missing = -T % _LANES
  if missing and not causal and segments is None:
    segments = jnp.ones(q.shape[:2], jnp.int32)
  # Padding follows all real queries, so a causal mask hides it. Without a causal mask it gets its own segment.
  segments = None if segments is None else jnp.pad(segments, ((0, 0), (0, missing)))
  wider = 0 if causal else -width % _LANES  # added zeros do not change scores; those of the values are cut from the result
  q, k, v = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, wider))) for x in (q, k_BTKH, v_BTKH))
  rows = () if segments is None else (segments,)
  out_BTNH = by_head(rules, _kernel(T + missing, window, causal, soft_cap, interpret), q, k, v, *rows)[:, :T, :, :width]
  if tokens.segments is None:
    return out_BTNH
  # In the kernel, padding sees padding, because the kernel is undefined for a query that sees no key.
  return jnp.where((tokens.segments > 0)[:, :, None, None], out_BTNH, 0)


def _kernel(length: int, window: int | None, causal: bool, soft_cap: float | None, interpret: bool):
  """Return the kernel for a batch: (q [B, T, N, H], k, v [B, T, K, H], segments [B, T] if any) -> [B, T, N, H]."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  # Masks are objects that the kernel evaluates by tile, not arrays.
  shape = (length, length)
  if not causal:
    mask = masks.FullMask(shape)
  else:
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, window_size=(window - 1, 0), offset=0)
  # The largest tile that divides the row.
  tile = next(b for b in (_TILE, _TILE // 2, _LANES) if length % b == 0)
  sizes = splash.BlockSizes(
    block_q=tile,
    block_kv=tile,
    block_q_dkv=tile,
    block_kv_dkv=tile,
    block_q_dq=tile,
    block_kv_dq=tile,
  )

  def batch(q_BTNH, k_BTKH, v_BTKH, segments=None):
    q, k, v = (x.swapaxes(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    # Build the kernel for one row with its heads in front, and map it over the batch.
    kernel = splash.make_splash_mha(
      masks.MultiHeadMask([mask] * q.shape[1]),
      block_sizes=sizes,
      head_shards=1,
      q_seq_shards=1,
      residual_checkpoint_name="attention",
      attn_logits_soft_cap=soft_cap,
      interpret=interpret,
    )
    ids = () if segments is None else (splash.SegmentIds(segments, segments),)
    out_BNTH: jax.Array = jax.vmap(kernel)(q, k, v, *ids)  # pyright: ignore[reportAssignmentType]
    return out_BNTH.swapaxes(1, 2)

  return batch


def _run(
  q_BTNH, k_BTKH, v_BTKH, tokens: Tokens, *, window, bidirectional_images, scale, precision, rules, causal=True, soft_cap=None
) -> jax.Array:
  del bidirectional_images, precision
  with jax.named_scope("splash_attention"):
    return splash_attention(
      q_BTNH, k_BTKH, v_BTKH, tokens, window=window, scale=scale, rules=rules, causal=causal, soft_cap=soft_cap
    )


def _refuses(case: Case) -> list[str]:
  reasons = whole_rows(case)
  if case.platform != "tpu":
    reasons.append(f"it runs on TPUs, not on {case.platform}")
  if case.causal:
    # Latent attention: heads of queries are 192 wide (half of the lanes of a register are padding), those of values 128.
    if case.head_dim % (_LANES // 2) or case.head_dim < _LANES:
      reasons.append(f"head_dim {case.head_dim} is not a multiple of {_LANES // 2} and at least {_LANES}")
    if case.value_dim % _LANES:
      reasons.append(f"value heads of {case.value_dim} are not a multiple of {_LANES}")
  elif case.head_dim < _LANES // 2 or case.value_dim != case.head_dim:
    reasons.append(f"heads of {case.head_dim} and values of {case.value_dim} are not equal and at least {_LANES // 2} wide")
  if case.dtype != "bfloat16":
    reasons.append(f"dtype {case.dtype} is not bfloat16")
  if case.bidirectional_images:
    reasons.append("the mask has bidirectional images")
  if case.probabilities:
    reasons.append("the layer needs the probabilities as an array")
  return reasons


def _operation(target: str, scopes: tuple[str, ...]) -> str | None:
  # JAX names the kernels of splash attention. A compiled program keeps this name, but not the outer scopes.
  if target != "tpu_custom_call":
    return None
  return next((s for s in reversed(scopes) if s.startswith(("splash_mha", "splash_mqa"))), None)


def _products(operation: str) -> int:
  # Both backward kernels recompute the scores and compute their gradient. Then follow the gradient of the queries, or those of
  # keys and values.
  return 4 if "dkv" in operation else 3 if "dq" in operation else 2


KERNEL = AttentionKernel(
  name="splash",
  refuses=_refuses,
  run=_run,
  fused=True,
  named=True,
  title="splash attention",
  scope="splash_attention",
  operation=_operation,
  products=_products,
)
