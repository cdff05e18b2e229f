"""Attention of one new token of each row over its cache, in Pallas (Triton) for NVIDIA GPUs.

XLA reads every slot of the cache, and rows of different lengths take the time of the longest. This kernel reads the slots that
a row uses, each once, and keeps scores in registers. An 8-bit cache is read as 8 bits. The slots of a row are divided into
parts, so that few rows occupy the complete GPU; the results of the parts are then combined.

B rows, N query heads, K key-value heads, G = N / K queries per key-value head, S slots, H head, V value head, P parts.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

DecodeName = Literal["xla", "pallas_triton"]
"""Names of the kernels for a single new token."""

_KERNEL = "decode_attention"
"""Name of the kernel in a program."""

_QUERIES = 16
"""Smallest number of rows of a matrix unit."""
_PROGRAMS = 132
"""Programs that are wanted at least: one for each multiprocessor of an H100."""
_BYTES = 32 << 10
"""Largest size of a block of keys in shared memory."""
_STAGES, _WARPS = 2, 4
"""Blocks that are read at the same time, and groups of 32 threads of a program."""
_LOWEST = -1e30
"""Below every score. It is finite, so that differences with it are numbers."""


def _triton() -> Any:
  """Import Pallas for Triton on use: choosing between kernels does not need it."""
  from jax.experimental.pallas import triton

  return triton


def reads(dtype: Any, cache: jax.Array | jax.ShapeDtypeStruct) -> bool:
  """Return True if the kernel can read an array of a cache for queries of a dtype.

  Pallas computes offsets in 32 bits up to arrays of 4 GiB. Those of an 8-bit array of more than 2 GiB would be negative.
  """
  if cache.dtype == jnp.int8:
    return not 1 << 31 < cache.size <= 1 << 32
  return cache.dtype == dtype


def decode_attention(
  q_BNH: jax.Array,
  k_BKSH: jax.Array,
  v_BKSV: jax.Array,
  lengths_B: jax.Array,
  *,
  scale: float,
  soft_cap: float | None = None,
  k_scale: jax.Array | None = None,
  v_scale: jax.Array | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Compute attention of one query for each row and head.

  Args:
    q_BNH: queries, bfloat16 or float16. H and V are powers of two from 16.
    k_BKSH, v_BKSV: the cache, in the dtype of the queries or int8, see ``reads``.
    lengths_B: int32, number of slots that each row uses: the first ones. A row with 0 gives zeros.
    scale: factor on the scores.
    soft_cap: soft cap of the scaled scores; None: no cap.
    k_scale, v_scale: float32 [B, K, S, 1], scales of an int8 cache.
    interpret: run on any platform, slowly: for tests.

  Returns:
    [B, N, V] in the dtype of the queries. Scores and sums are float32; probabilities are rounded to that dtype.
  """
  (B, N, H), K, V = q_BNH.shape, v_BKSV.shape[1], v_BKSV.shape[3]
  q_BKGH = q_BNH.reshape(B, K, N // K, H)
  scales = [] if k_scale is None or v_scale is None else [k_scale[..., 0], v_scale[..., 0]]
  options = {"scale": scale, "soft_cap": soft_cap, "interpret": interpret}
  return _attention(lengths_B, q_BKGH, k_BKSH, v_BKSV, scales, **options).reshape(B, N, V)


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "interpret"))  # layers share the compiled kernel
def _attention(lengths, q, k, v, scales, *, scale, soft_cap, interpret):
  """Return the output [B, K, G, V]."""
  plgpu = _triton()
  (B, K, G, H), S, V = q.shape, k.shape[2], v.shape[3]
  block = max(16, min(128, pl.next_power_of_2(S), _BYTES // (max(H, V) * k.dtype.itemsize)))
  rows = max(pl.next_power_of_2(G), _QUERIES)
  # Divide long rows into parts of whole blocks.
  blocks = pl.cdiv(S, block)
  each = pl.cdiv(blocks, min(blocks, pl.cdiv(_PROGRAMS, B * K)))
  P, span = pl.cdiv(blocks, each), each * block
  # The only part of a row gives the output. Several give unnormalized sums, largest scores and sums of probabilities.
  sums = jax.ShapeDtypeStruct((B, K, P, G), jnp.float32)
  results = [jax.ShapeDtypeStruct((*sums.shape, V), q.dtype if P == 1 else jnp.float32), *([] if P == 1 else [sums, sums])]

  def kernel(lengths, q, k, v, *refs):
    scales, outs = refs[: -len(results)], refs[-len(results) :]
    b, head, part = (pl.program_id(axis) for axis in range(3))
    # A row reads only the slots that it uses. Parts after its end do no steps.
    begin = part * span
    end = jnp.minimum(begin + span, lengths[b])
    # A matrix unit needs several rows: the queries of one key-value head, and zeros.
    real = jax.lax.broadcasted_iota(jnp.int32, (rows,), 0) < G
    own_rows = pl.ds(part * 0, rows)  # a start that is not a constant may end beyond the array, where nothing is read
    queries = plgpu.load(q.at[b, head, own_rows], mask=real[:, None], other=0.0)

    def step(i, carry):
      total, top, mass = carry
      at = begin + i * block
      own, slots = at + jax.lax.broadcasted_iota(jnp.int32, (block,), 0) < end, pl.ds(at, block)
      # Slots beyond the end may contain anything, also NaN.
      read = lambda array: plgpu.load(array.at[b, head, slots], mask=own[:, None], other=0).astype(queries.dtype)
      scores = plgpu.dot(queries, read(k), trans_b=True) * scale
      # 8-bit caches have a scale for each slot. It is applied to scores instead of keys, and to probabilities instead of
      # values.
      if scales:
        scores *= plgpu.load(scales[0].at[b, head, slots], mask=own, other=0.0)[None, :]
      if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
      scores = jnp.where(own[None, :], scores, _LOWEST)
      # Rescale the sums to the new maximum.
      highest = jnp.maximum(top, jnp.max(scores, axis=1))
      probs = jnp.where(own[None, :], jnp.exp(scores - highest[:, None]), 0.0)
      old = jnp.exp(top - highest)
      mass = mass * old + jnp.sum(probs, axis=1)
      if scales:
        probs *= plgpu.load(scales[1].at[b, head, slots], mask=own, other=0.0)[None, :]
      total = total * old[:, None] + plgpu.dot(probs.astype(queries.dtype), read(v))
      return total, highest, mass

    steps = jax.lax.div(jnp.maximum(end - begin, 0) + (block - 1), jnp.int32(block))
    start = jnp.zeros((rows, V), jnp.float32), jnp.full((rows,), _LOWEST, jnp.float32), jnp.zeros((rows,), jnp.float32)
    total, top, mass = jax.lax.fori_loop(0, steps, step, start)
    found = [(total / jnp.where(mass == 0, 1, mass)[:, None]).astype(q.dtype)] if P == 1 else [total, top, mass]
    for out, values in zip(outs, found, strict=True):
      own = real if values.ndim == 1 else real[:, None]
      plgpu.store(out.at[b, head, part, own_rows], values, mask=own)

  found = pl.pallas_call(
    kernel,
    out_shape=results,
    grid=(B, K, P),
    compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
    interpret=interpret,
    name=_KERNEL,
  )(lengths, q, k, v, *scales)
  if P == 1:
    return found[0][:, :, 0]
  # Combine the parts: each has its own maximum.
  total, top, mass = found
  weight = jnp.exp(top - jnp.max(top, axis=2, keepdims=True))
  mass = jnp.sum(mass * weight, axis=2)
  out = jnp.sum(total * weight[..., None], axis=2) / jnp.where(mass == 0, 1, mass)[..., None]
  return out.astype(q.dtype)
