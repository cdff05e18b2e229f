"""Splash attention: JAX's fused TPU kernel, for rows of documents under a causal mask or a sliding window, and for patches of
images, which see each other both ways.

Scores and softmax are float32 inside the kernel and S x S numbers never exist, so a row's memory grows with its length
and tiles that the mask leaves empty are skipped.

B batch, T position, N query heads, K key-value heads, H head.
"""

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.kernels.attention.registry import AttentionKernel, Case, whole_rows
from maxtext_like.layers.partition import by_head
from maxtext_like.layers.sharding_rules import RULES, Rules

_LANES = 128
# Largest tile: 1024 is as good for heads of 256, but for heads of 512 the backward kernel would outgrow vector memory.
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
  """Self-attention of each row over itself.

  On a mesh every device works on its own rows and heads: the partitioner cannot look into a kernel, and would gather them.

  Args:
    q_BTNH, k_BTKH, v_BTKH: queries, keys, values, bfloat16 (float32 in the interpreter); query head n reads key-value
      head n // (N / K). On a TPU H is a multiple of 64 and 128 at least, and values are as wide as a multiple of 128, which
      may be another width: heads that are not causal are padded to that. So is a row, to a multiple of 128 positions.
    tokens: segments; images are not supported.
    window: keys a query sees, itself included; None: all before it.
    scale: multiplies the queries, in float32 before they are rounded to their dtype again.
    rules: how the batch lies on the mesh in use.
    causal: a query sees no key behind it; False: all of its document.
    soft_cap: of the scores, in float32, before the mask; None: none.
    interpret: run on any platform, slowly: for tests.

  Returns:
    [B, T, N, H of the values] in the dtype of q; zeros where the segment is 0.
  """
  dtype, T, width = q_BTNH.dtype, q_BTNH.shape[1], v_BTKH.shape[-1]
  q = (q_BTNH.astype(jnp.float32) * scale).astype(dtype)
  segments = tokens.segments
  missing = -T % _LANES
  if missing and not causal and segments is None:
    segments = jnp.ones(q.shape[:2], jnp.int32)
  # Padding stands behind every query that counts, so a causal mask hides it; else it is another document.
  segments = None if segments is None else jnp.pad(segments, ((0, 0), (0, missing)))
  wider = 0 if causal else -width % _LANES  # zeros add nothing to scores, and are cut off values
  q, k, v = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, wider))) for x in (q, k_BTKH, v_BTKH))
  rows = () if segments is None else (segments,)
  out_BTNH = by_head(rules, _kernel(T + missing, window, causal, soft_cap, interpret), q, k, v, *rows)[:, :T, :, :width]
  if tokens.segments is None:
    return out_BTNH
  # Padding sees padding in the kernel, which has no answer for a query that sees nothing.
  return jnp.where((tokens.segments > 0)[:, :, None, None], out_BTNH, 0)


def _kernel(length: int, window: int | None, causal: bool, soft_cap: float | None, interpret: bool):
  """The kernel over a batch: (q [B, T, N, H], k, v [B, T, K, H], segments [B, T] if any) -> [B, T, N, H]."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  shape = (length, length)
  if not causal:
    mask = masks.FullMask(shape)
  else:
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, window_size=(window - 1, 0), offset=0)
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
    # Latent attention: queries of 192 (half a register's lanes are padding), values of 128.
    if case.head_dim % (_LANES // 2) or case.head_dim < _LANES:
      reasons.append(f"head_dim {case.head_dim} is not a multiple of {_LANES // 2}, {_LANES} at least")
    if case.value_dim % _LANES:
      reasons.append(f"value heads of {case.value_dim} are not a multiple of {_LANES}")
  elif case.head_dim < _LANES // 2 or case.value_dim != case.head_dim:
    reasons.append(f"heads of {case.head_dim} and values of {case.value_dim} are not alike and {_LANES // 2} wide at least")
  if case.dtype != "bfloat16":
    reasons.append(f"dtype {case.dtype} is not bfloat16")
  if case.bidirectional_images:
    reasons.append("the mask has bidirectional images")
  if case.probabilities:
    reasons.append("the layer needs its probabilities written out")
  return reasons


def _operation(target: str, scopes: tuple[str, ...]) -> str | None:
  # JAX names the kernels of splash attention, and a compiled program keeps that name where it loses the outer ones.
  if target != "tpu_custom_call":
    return None
  return next((s for s in reversed(scopes) if s.startswith(("splash_mha", "splash_mqa"))), None)


def _products(operation: str) -> int:
  # Scores again in each backward kernel, and their gradient; then that of the queries, or those of keys and values.
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
