"""Attention on Hopper GPUs for heads of 128 to 512, in our own kernels. cuDNN supports heads up to 256 there, and needs a mask
array for packed rows.

Scores, softmax and sums are float32 inside the kernels. Probabilities are multiplied in the dtype of the arguments, or in
float16 for heads wider than 256. Gradients of scores are computed from probabilities in float16: 11 binary digits down to
2**-14, fewer below, and zero from 2**-25 down. Tiles in which no query sees a key are skipped (because of causality, a window
or document borders). The keys that a query sees are a contiguous range, so packed rows and images need no mask array. Heads of
other widths than those of the kernels are padded with zeros to the next width and take as long.

B batch, T position, N query heads, K key-value heads, H head, V value head.
"""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.kernels.attention.registry import AttentionKernel, Case
from maxtext_like.layers.kernels.float16_range import power_of_two
from maxtext_like.layers.partition import by_head
from maxtext_like.layers.sharding_rules import RULES, Rules

if TYPE_CHECKING:
  from maxtext_like.layers.kernels.attention.mosaic.backward import Tiling

# The kernel modules are imported on use: Pallas for GPUs takes a second to import, and every start queries this module.
# Bytes that the backward pass may write between its kernels, by the largest width of heads. A smaller budget needs more turns.
# Each turn costs 60 us, which matters more for narrow heads, as they do less work per byte. Packed rows with a window of 1024
# (2 x 4096, 32 heads of 128, H200) took 2.28 ms in 8 turns, 2.02 in two, and 1.84 in one, which this budget allows; cuDNN takes
# 1.66 without a mask.
_BUDGETS = {128: 1536 << 20, 512: 320 << 20}
_FLOAT16 = 2.0**15  # half of the range of float16
# For wider heads, products with probabilities or gradients of scores use float16 operands, even if the arguments are bfloat16.
# Scaled to float16, bfloat16 numbers are exact, except those below 2**-32 of the largest value (forward) or 2**-17 of the
# largest number of their array (backward, up to a largest query times a largest key of 2**32). Probabilities and gradients of
# scores then have three more binary digits: values and gradients differ from float64 by up to 2e-3, of which their own rounding
# to bfloat16 is 1.6e-3. The conversion reads and writes each argument once, which is little work compared with the products.
_OPERANDS_AS_THEY_ARE = 256
_LARGEST_CAP = 1024.0  # the error of scores is 2**-20 of the cap
_LANES = 128
_WIDTHS = (128, 256, 512)  # widths of heads that the forward kernel supports
_WIDTHS_BACKWARD = (128, 192, 256, 512)  # widths that the backward kernels support
_HOPPER = "9.0"
_JAX = (0, 11)  # earlier versions of Pallas have another interface for loads with a layout


def mosaic_flash_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKV: jax.Array,
  tokens: Tokens,
  *,
  window: int | None,
  bidirectional_images: bool = False,
  scale: float,
  soft_cap: float | None = None,
  rules: Rules = RULES,
  in_parts: bool = False,
  interpret: Any = None,
) -> jax.Array:
  """Causal self-attention of each row.

  On a mesh, each device works on its own rows and heads, because the partitioner cannot split a kernel.

  Args:
    q_BTNH, k_BTKH, v_BTKV: queries, keys, values, bfloat16 or float16; query head n reads key-value head n // (N / K). T is a
      multiple of 128, the larger of H and V is 128 to 512.
    tokens: segments and images. The positions of a document are contiguous, as are those of an image.
    window: number of keys a query sees, including itself; None: all earlier keys.
    bidirectional_images: tokens of one image see each other in both directions.
    scale: factor on the scores.
    soft_cap: soft cap of the scaled, unmasked scores; None: no cap.
    rules: sharding of the batch on the current mesh.
    in_parts: split short rows into as many parts in the backward pass as long ones: for tests.
    interpret: parameters of Pallas' interpreter for GPU kernels, slow: for tests.

  Returns:
    [B, T, N, V] in the dtype of q; zeros for padding.
  """
  from maxtext_like.layers.kernels.attention.mosaic.backward import tiling, tiling_of_small_parts

  # Documents, windows and images become a range of visible keys for each query.
  images = tokens.images if bidirectional_images else None
  low_BT, high_BT = key_ranges(tokens.segments, images, batch=q_BTNH.shape[0], length=q_BTNH.shape[1], window=window)

  # The tiling of the backward pass depends on the sizes of one device, so it is chosen inside.
  def attend(q, k, v, low, high) -> Any:
    B, T, N, _ = q.shape
    sizes = {"B": B, "T": T, "N": N, "K": k.shape[2], "window": window, "ahead": images is not None}
    how = tiling_of_small_parts(**sizes) if in_parts else tiling(**sizes, budget=_budget(q, v))
    return _attend((scale, soft_cap, how, interpret), q, k, v, low, high)

  return by_head(rules, attend, q_BTNH, k_BTKH, v_BTKV, low_BT, high_BT)


def key_ranges(
  segments_BT: jax.Array | None, images_BT: jax.Array | None, *, batch: int, length: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
  """Return the range of keys that every query sees, low <= s < high: two int32 [B, T].

  Neither decreases along T. The range of padding is empty."""
  # Start with the causal range.
  at = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
  low, high = jnp.zeros_like(at), at + 1
  # A token of an image also sees the keys up to the end of its image.
  if images_BT is not None:
    last = jnp.where(images_BT != jnp.pad(images_BT, ((0, 0), (0, 1)))[:, 1:], at, length)
    high = jnp.where(images_BT > 0, jax.lax.cummin(last, axis=1, reverse=True) + 1, high)
  # No token sees keys outside of its document.
  if segments_BT is not None:
    before = jnp.pad(segments_BT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    after = jnp.pad(segments_BT, ((0, 0), (0, 1)), constant_values=-1)[:, 1:]
    low = jax.lax.cummax(jnp.where(segments_BT != before, at, 0), axis=1)
    end = jax.lax.cummin(jnp.where(segments_BT != after, at, length), axis=1, reverse=True) + 1
    high = jnp.minimum(high, end)
  # The window limits the past.
  if window is not None:
    low = jnp.maximum(low, at - window + 1)
  # Padding sees no key, but its range must not decrease along T.
  if segments_BT is not None:
    low, high = (jnp.where(segments_BT > 0, x, at + 1) for x in (low, high))
  return low, high


_Static = tuple[float, float | None, "Tiling", Any]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q, k, v, low, high) -> Any:
  return _forward(static, q, k, v, low, high)[0]


def _forward(static: _Static, q, k, v, low, high):
  from maxtext_like.layers.kernels.attention.mosaic.forward import attention_forward

  scale, soft_cap, _, interpret = static
  # Pad heads to a width of the kernel, and scale values to float16 if needed.
  q_wide, k_wide, v_wide = _filled_up(_WIDTHS, q, k, v)
  divisor = None
  if _in_float16(q, v):
    divisor = power_of_two(_FLOAT16 / _largest(v))[None]
    v_wide = (v_wide.astype(jnp.float32) * divisor).astype(jnp.float16)
  out, lse = attention_forward(
    q_wide, k_wide, v_wide, low, high, scale=scale, soft_cap=soft_cap, divisor=divisor, interpret=interpret
  )
  out, lse = checkpoint_name(out[..., : v.shape[-1]], "attention"), checkpoint_name(lse, "attention")
  return out, (q, k, v, low, high, out, lse)


def _backward(static: _Static, saved, g: jax.Array):
  from maxtext_like.layers.kernels.attention.mosaic.backward import attention_backward

  scale, soft_cap, how, interpret = static
  q, k, v, low, high, out, lse = saved
  # The term of the softmax gradient that is common to all keys of a query.
  delta = jnp.einsum("BTNH,BTNH->BNT", out.astype(jnp.float32), g.astype(jnp.float32))
  factors = powers = None
  if g.dtype == jnp.float16:
    power = _room(k, v, g, scale)
    g, delta, powers = (g.astype(jnp.float32) * power).astype(g.dtype), delta * power, jnp.full(3, power)
  elif _in_float16(q, v):
    # Keys and queries are brought to the same magnitude, values to 1.
    of_k, of_v = (power_of_two(x) for x in (jnp.sqrt(_largest(q) / _largest(k)), 1 / _largest(v)))
    of_g = _room(k, v, g, scale, of_k, of_v)
    factors, powers = jnp.stack([1 / of_k, of_k, of_v, of_g]), of_g * jnp.stack([of_v * of_k, of_v / of_k, 1.0])
    delta = delta * (of_g * of_v)
  # Pad heads to a supported width, and cut the gradients to the original width.
  wide = _filled_up(_WIDTHS_BACKWARD, q, k, v, g)
  grads = attention_backward(
    *wide, lse, delta, low, high, scale=scale, soft_cap=soft_cap, how=how, factors=factors, powers=powers,
    interpret=interpret,
  )  # fmt: skip
  return *(dx[..., : x.shape[-1]] for dx, x in zip(grads, (q, k, v), strict=True)), None, None


def _in_float16(q_BTNH: jax.Array, v_BTKV: jax.Array) -> bool:
  """True if bfloat16 arguments are converted to float16 for the products with probabilities and gradients of scores."""
  return q_BTNH.dtype == jnp.bfloat16 and max(q_BTNH.shape[-1], v_BTKV.shape[-1]) > _OPERANDS_AS_THEY_ARE


def _budget(q_BTNH: jax.Array, v_BTKV: jax.Array) -> int:
  return next(budget for most, budget in _BUDGETS.items() if most >= max(q_BTNH.shape[-1], v_BTKV.shape[-1]))


def _filled_up(widths: tuple[int, ...], *arrays: jax.Array) -> list[jax.Array]:
  """Pad the arrays with zeros to the smallest of the widths that holds all of them."""
  width = next(n for n in widths if n >= max(x.shape[-1] for x in arrays))
  return [jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) for x in arrays]


def _room(k: jax.Array, v: jax.Array, g: jax.Array, scale: float, of_k: Any = 1.0, of_v: Any = 1.0) -> jax.Array:
  """Return the largest power of two that may multiply a cotangent so that it and all values derived from it fit float16.

  Gradients of scores are rounded to float16, and small ones would lose digits. The gradient for a query is p (g.v - delta),
  where probabilities sum to 1 and delta is between the products g.v. The gradient of the query is the sum of these times k. By
  the Cauchy-Schwarz inequality, none exceeds twice the largest norm of g times that of v, times that of k and the scale. A soft
  cap does not increase them.

  Args:
    k, v, g, scale: keys, values, cotangent, and factor on the scores.
    of_k, of_v: powers of two that multiply keys and values.
  """
  longest = lambda x: jnp.sqrt(jnp.max(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)))
  of_scores = 2 * longest(g) * longest(v) * of_v
  largest = jnp.maximum(jnp.maximum(longest(g), of_scores), of_scores * longest(k) * of_k * abs(scale))
  known = (largest > 0) & jnp.isfinite(largest)
  return power_of_two(_FLOAT16 / jnp.where(known, largest, _FLOAT16))


def _largest(x: jax.Array) -> jax.Array:
  """Return the largest finite magnitude of x, float32, or 1 if it is 0."""
  most = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0)).astype(jnp.float32)
  return jnp.where(most > 0, most, 1.0)


_attend.defvjp(_forward, _backward)


def _run(
  q_BTNH,
  k_BTKH,
  v_BTKV,
  tokens: Tokens,
  *,
  window,
  bidirectional_images,
  scale,
  precision,
  rules,
  soft_cap=None,
  in_parts=False,
) -> jax.Array:
  del precision
  with jax.named_scope("mosaic_flash"):
    return mosaic_flash_attention(
      q_BTNH, k_BTKH, v_BTKV, tokens, window=window, bidirectional_images=bidirectional_images, scale=scale, rules=rules,
      soft_cap=soft_cap, in_parts=in_parts,
    )  # fmt: skip


def _refuses(case: Case) -> list[str]:
  reasons = []
  # The device and the software.
  if case.platform not in ("gpu", "cuda"):
    reasons.append(f"it runs on NVIDIA GPUs, not on {case.platform}")
  if case.capability not in (None, _HOPPER):
    reasons.append(f"it needs a GPU of compute capability {_HOPPER}, not {case.capability}")
  if jax.__version_info__ < _JAX:
    reasons.append(f"it needs JAX {'.'.join(map(str, _JAX))}, but this is {jax.__version__}")
  # The mask. The kernel computes ranges of keys from the causal order of complete rows.
  if not case.causal:
    reasons.append("queries see later keys")
  if case.context > 1:
    reasons.append(f"rows are split over {case.context} devices (context)")
  # The shapes and the dtype of the operands.
  if not _WIDTHS[0] <= max(case.head_dim, case.value_dim) <= _WIDTHS[-1]:
    wide = f"{_WIDTHS[0]} to {_WIDTHS[-1]}"
    reasons.append(f"the larger of head_dim {case.head_dim} and value width {case.value_dim} is not {wide}")
  if case.dtype not in ("bfloat16", "float16"):
    reasons.append(f"dtype {case.dtype} is neither bfloat16 nor float16")
  if case.length % _LANES:
    reasons.append(f"the row length {case.length} is not a multiple of {_LANES}")
  # How the layer computes scores and probabilities.
  if case.soft_cap is not None and case.soft_cap > _LARGEST_CAP:
    reasons.append(f"the soft cap {case.soft_cap:g} is above {_LARGEST_CAP:g}, so its tanh would have too few digits")
  if case.probabilities:
    reasons.append("the layer needs the probabilities as an array")
  return reasons


def _slow(case: Case) -> bool:
  """True for padded heads with a window, where few tiles are skipped.

  This case was not measured. Heads of 128 padded to 256 took 1.1 times as long as cuDNN with a mask in a window of 1024, and
  0.6 times as long without a window (H200, 2 x 4096)."""
  windowed = case.window is not None and case.window < case.length
  return windowed and max(case.head_dim, case.value_dim) not in _WIDTHS


def _operation(target: str, scopes: tuple[str, ...]) -> str | None:
  # JAX names a kernel. A compiled program keeps this name, but not the outer scopes.
  if not target.startswith("mosaic_gpu"):
    return None
  return next((s for s in reversed(scopes) if s.startswith("mosaic_flash_")), None)


KERNEL = AttentionKernel(
  name="mosaic_flash",
  refuses=_refuses,
  run=_run,
  fused=True,
  slow=_slow,
  named=True,
  in_parts=functools.partial(_run, in_parts=True),
  guarantee=f"{AttentionKernel.guarantee}; probabilities in 16 bits between them (float16: zero from 2**-25 down)",
  title="Mosaic attention",
  scope="mosaic_flash",
  operation=_operation,
)
