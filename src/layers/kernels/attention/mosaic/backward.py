"""The backward pass of attention on Hopper GPUs for heads of 128, 192, 256 and 512, in three kernels.

The gradients that a block accumulates (128 x 512 float32 numbers for keys, and as many for values) do not fit the registers of
a multiprocessor. No kernel can therefore hold them while it recomputes the scores. The first kernel writes the operands of the
others: probabilities and gradients of scores in the dtype of the operands, only for tiles in which a query sees a key. The
other kernels are plain matrix products over these tiles. There are five products in total; kernels that store nothing need
seven or eight. The caller limits the size of the stored tiles: the pass works on some key-value heads at a time and, in long
rows, on some queries at a time.

B batch, T position, N query heads, K key-value heads, G = N / K, H head, R key-value heads (of all rows) at a time.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from maxtext_like.layers.kernels.attention.mosaic.scores import base_two
from maxtext_like.layers.kernels.attention.mosaic.stream import ROWS, SWIZZLED, TILE, Stream, plgpu, wide

QUERIES, KEYS = 128, 256  # size of a tile of scores
_STEP = 64  # size of one step along the summed axis of a product
_WIDE = 256  # maximum columns of a block of gradients
_OWN = 64  # rows of a warpgroup
_RUN = 2  # tiles of scores per block
_PARTS = 2  # maximum number of parts that the query heads of a key-value head are split into for gradients of keys and values
_STAGES_OF_SCORES, _STAGES = 3, 4  # copies in flight: in the scores kernel, in the other kernels


@dataclass(frozen=True, kw_only=True)
class Tiling:
  """The amount of work done at a time.

  Attributes:
    tiles: groups of 128 queries at a time.
    capacity: maximum tiles of scores of these queries, for one query head.
    longest: maximum tiles of scores of 128 queries.
    heads: R, key-value heads (of all rows) at a time.
  """

  tiles: int
  capacity: int
  longest: int
  heads: int


def tiling(*, B: int, T: int, N: int, K: int, window: int | None, ahead: bool, budget: int) -> Tiling:
  """Return the tiling for a shape.

  Args:
    B, T, N, K: sizes of the arguments.
    window: maximum number of keys that a query sees; None: all earlier keys.
    ahead: a query may see later keys.
    budget: bytes for probabilities and gradients of scores.
  """
  # Tiles of keys that each group of 128 queries can see.
  G, rows = N // K, T // QUERIES
  # Causal rows see the tiles up to their own. Images may look ahead, so their rows may see all. A window cuts off early tiles.
  seen = [i * QUERIES // KEYS + 1 for i in range(rows)]
  if ahead:
    seen = [-(-T // KEYS)] * rows
  elif window is not None:
    seen = [min(n, (window + QUERIES - 2) // KEYS + 2) for n in seen]
  # Bytes of one tile: probabilities and gradients of scores, 16 bits each, for the query heads of a key-value head.
  size = 2 * 2 * G * QUERIES * KEYS

  def capacity(tiles: int) -> int:
    return max(sum(seen[i : i + tiles]) for i in range(0, rows, tiles))

  # Choose the most queries that fit the budget with one head, then the most heads.
  tiles = next((n for n in _divisors(rows) if capacity(n) * size <= budget), 1)
  most = budget // (capacity(tiles) * size)
  heads = next((n for n in _divisors(B * K) if n <= most and (K % n == 0 or n % K == 0)), 1)
  return Tiling(tiles=tiles, capacity=capacity(tiles), longest=max(seen), heads=heads)


def tiling_of_small_parts(*, B: int, T: int, N: int, K: int, window: int | None, ahead: bool) -> Tiling:
  """Return a tiling for short rows such as the one that ``tiling`` returns for long rows with many heads.

  It has one key-value head at a time and, for at least 3 x 128 queries, at least three turns of queries. The budget is halved
  until this is the case."""
  budget, rows = 1 << 40, T // QUERIES
  while True:
    how = tiling(B=B, T=T, N=N, K=K, window=window, ahead=ahead, budget=budget)
    if budget == 0 or (how.heads == 1 and rows // how.tiles >= 3):
      return how
    budget //= 2


def _divisors(n: int) -> list[int]:
  """Return the divisors of n, the largest first."""
  return [d for d in range(n, 0, -1) if n % d == 0]


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "how", "interpret"))  # layers share the compiled kernels
def attention_backward(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  g_BTNH: jax.Array,
  lse_BNT: jax.Array,
  delta_BNT: jax.Array,
  low_BT: jax.Array,
  high_BT: jax.Array,
  *,
  scale: float,
  how: Tiling,
  soft_cap: float | None = None,
  factors: jax.Array | None = None,
  powers: jax.Array | None = None,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Return the gradients of queries, keys and values, in the dtype of the arguments.

  Args:
    q_BTNH, k_BTKH, v_BTKH, low_BT, high_BT, scale, soft_cap, interpret: as in ``attention_forward``.
    g_BTNH: the cotangent, in the dtype of q.
    lse_BNT: the second result of ``attention_forward``.
    delta_BNT: float32, the sum of output times cotangent over the head, times the factors of both.
    how: the tiling.
    factors: float32 [4], powers of two that multiply q, k, v and g when they are converted to float16 operands. The product of
      the first two is 1. They are converted for some key-value heads at a time, so that no complete copy exists. None: the
      arguments are used unchanged.
    powers: float32 [3], divisors of the gradients of q, k and v. They are applied to sums over queries before rounding, because
      these are larger than any single term. None: 1.
  """
  B, T, N, H = q_BTNH.shape
  K, dtype = k_BTKH.shape[2], q_BTNH.dtype
  G, R, rows = N // K, how.heads, T // QUERIES
  # Find the first and last tile of keys of each 128 queries, and the position of their first tile among the stored ones.
  begin_Bi = low_BT[:, ::QUERIES] // KEYS
  end_Bi = jnp.maximum(-(-high_BT[:, QUERIES - 1 :: QUERIES] // KEYS), begin_Bi)
  count = (end_Bi - begin_Bi).reshape(B, rows // how.tiles, how.tiles)
  place_Bi = (jnp.cumsum(count, axis=-1) - count).reshape(B, rows)
  # Find which groups of 128 queries have a tile for each 256 keys.
  at = jnp.arange(-(-T // KEYS))
  first_Bj = jnp.sum(end_Bi[:, None] <= at[:, None], axis=-1, dtype=jnp.int32)
  last_Bj = jnp.sum(begin_Bi[:, None] <= at[:, None], axis=-1, dtype=jnp.int32)
  tiles = tuple(x.astype(jnp.int32) for x in (begin_Bi, end_Bi, place_Bi, first_Bj, last_Bj))

  # The loops below work on R key-value heads and ``how.tiles`` groups of queries at a time.
  kernels = {"scale": scale, "how": how, "interpret": interpret}
  arrays = (q_BTNH, k_BTKH, v_BTKH, g_BTNH)
  per_row = (lse_BNT, delta_BNT, low_BT, high_BT)
  turns, along = rows // how.tiles, (R // K, K) if R >= K else (1, R)
  divided = lambda x, n: x if powers is None else x.astype(jnp.float32) / powers[n]

  def operands(group):
    """Return the arguments of the kernels for some key-value heads: arrays, tiles, and the index of the first of these
    heads."""
    # Without scaling, the kernels read the complete arrays.
    if factors is None:
      return (*arrays, *per_row), tiles, group * R
    of_rows = lambda x: lax.dynamic_slice_in_dim(x, group * R // K, along[0])
    of_heads = lambda x, axis, each: lax.dynamic_slice_in_dim(of_rows(x), group * R % K * each, along[1] * each, axis)
    # Otherwise scale the heads of this group to float16.
    own = [
      (of_heads(x, 2, each).astype(jnp.float32) * factor).astype(jnp.float16)
      for x, each, factor in zip(arrays, (G, 1, 1, G), factors, strict=True)
    ]
    sums = (of_heads(x, 1, G) for x in per_row[:2])
    return (*own, *sums, *map(of_rows, per_row[2:])), tuple(map(of_rows, tiles)), 0

  # Loop over groups of key-value heads, and inside over turns of queries.
  def heads(group, carry):
    (q, k, v, g, lse, delta, low, high), own_tiles, first = operands(group)
    row, head = group * R // K, group * R % K

    def step(turn, carry):
      dq, dk, dv = carry
      here = jnp.stack([first, turn * how.tiles]).astype(jnp.int32)
      # Write the tiles, then multiply them.
      probs, dscores = _scores(q, k, v, g, lse, delta, low, high, own_tiles, here, soft_cap=soft_cap, **kernels)
      own_dq = _queries(k, dscores, own_tiles, here, groups=G, **kernels)
      sums = _keys_and_values(q, g, probs, dscores, own_tiles, here, groups=G, **kernels)
      own_dq = divided(own_dq, 0).reshape(along[0], how.tiles * QUERIES, along[1], G, H).astype(dq.dtype)
      # Write the gradients of these queries, and add those of keys and values.
      dq = lax.dynamic_update_slice(dq, own_dq, (row, turn * how.tiles * QUERIES, head, 0, 0))
      own_dv, own_dk = (jnp.sum(x, axis=0) for x in sums)
      own_dk, own_dv = divided(own_dk * scale, 1), divided(own_dv, 2)
      if turns > 1:
        own_dk, own_dv = (x + lax.dynamic_slice_in_dim(y, group * R, R) for x, y in ((own_dk, dk), (own_dv, dv)))
      dk, dv = (lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), group * R, 0) for x, y in ((dk, own_dk), (dv, own_dv)))
      return dq, dk, dv

    return lax.fori_loop(0, turns, step, carry)

  # Gradients of keys and values are added over turns in float32. With one turn they can be rounded at once.
  kept = jnp.float32 if turns > 1 else dtype
  nothing = jnp.zeros((B, T, K, G, H), dtype), *(jnp.zeros((B * K, T, H), kept),) * 2
  dq, dk, dv = lax.fori_loop(0, B * K // R, heads, nothing)
  dk, dv = (jnp.swapaxes(x.reshape(B, K, T, H), 1, 2).astype(dtype) for x in (dk, dv))
  return dq.reshape(B, T, N, H), dk, dv


def _scores(
  q, k, v, g, lse, delta, low, high, tiles, here, *, scale: float, soft_cap: float | None, how: Tiling, interpret: Any
):
  """Return probabilities and gradients of scores (before the scale), both [R * G * capacity * 128, 256]."""
  H, K, G, dtype = q.shape[-1], k.shape[2], q.shape[2] // k.shape[2], q.dtype
  chunks, stages = H // _STEP, _STAGES_OF_SCORES

  # Warpgroup 2 copies operands to shared memory. Warpgroups 0 and 1 multiply them, 64 rows each.
  def body(q, k, v, g, lse, delta, low, high, begin, end, place, here, probs, dscores, of_queries, of_keys, tile, ready, free):
    # Find the head and the group of queries of this block, its first tile of keys, and the place of this tile.
    wg = lax.axis_index("wg")
    index = lax.axis_index("head")
    # Index of the key-value head within the group and in the arrays.
    r, group = _divided(index, G)
    b, kv = _divided(here[0] + r, K)
    head = kv * G + group
    own = how.tiles - 1 - lax.axis_index("tile")  # start with the longest tiles
    i = here[1] + own
    start = i * QUERIES
    first = begin[b, i] + lax.axis_index("run") * _RUN
    count = jnp.clip(end[b, i] - first, 0, _RUN)
    row = (index * how.capacity + place[b, i] + lax.axis_index("run") * _RUN) * QUERIES
    stream = Stream(ready, free, stages)

    @pl.when(wg == 2)
    def _copies():
      plgpu.set_max_registers(40, action="decrease")

      # Each tile needs the products of q and k, then of g and v, both in chunks of the head.
      def copy(t, slot):
        n, c = _divided(t, 2 * chunks)
        queries, keys = pl.ds(start, QUERIES), pl.ds((first + n) * KEYS, KEYS)
        # First all chunks of queries and keys, then those of cotangents and values.
        for once, (a, x) in enumerate(((q, k), (g, v))):

          @pl.when(lax.div(c, chunks) == once)
          def _(a=a, x=x):
            part = pl.ds(lax.rem(c, chunks) * _STEP, _STEP)
            plgpu.copy_gmem_to_smem(a.at[b, queries, head, part], of_queries.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(x.at[b, keys, kv, part], of_keys.at[slot], ready.at[slot])

      stream.fill(count * (2 * chunks), copy)

    @pl.when(wg < 2)
    def _computes():
      plgpu.set_max_registers(232, action="increase")
      queries = pl.ds(start + wg * _OWN, _OWN)
      # Per-row values of this warpgroup's queries.
      low_row, high_row, lse_row, delta_row = (
        plgpu.load(x, layout=ROWS, optimized=False)
        for x in (low.at[b, queries], high.at[b, queries], lse.at[b, head, queries], delta.at[b, head, queries])
      )

      def product(begin):
        def multiply(acc, slot):
          plgpu.wgmma(acc, of_queries.at[slot, pl.ds(wg * _OWN, _OWN)], of_keys.at[slot].transpose((1, 0)))

        def work(acc):
          stream.multiply(acc, begin, chunks, multiply)
          return acc[...]

        return pl.run_scoped(work, plgpu.ACC((_OWN, KEYS), jnp.float32))

      # Write a tile to device memory through shared memory, after the previous write has left it.
      def write(x, out, n):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile[wg] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.at[wg], out.at[pl.ds(row + n * QUERIES + wg * _OWN, _OWN)])

      # Scores and probabilities first, then the products of cotangent and values, and with them the gradients of scores.
      def step(n, _):
        s, slope = base_two(product(n * (2 * chunks)), scale, soft_cap)
        key = plgpu.broadcasted_iota(jnp.int32, (_OWN, KEYS), 1, layout=TILE) + (first + n) * KEYS
        seen = (key >= wide(low_row, KEYS)) & (key < wide(high_row, KEYS))
        p = jnp.where(seen, jnp.exp2(s - wide(lse_row, KEYS)), 0.0)
        # Keep probabilities in float16 until the second product: there are not enough registers for float32. They have 11
        # digits down to 2**-14 (bfloat16 has 8), one fewer for each power of two below, and are zero from 2**-25 down: the
        # score of so small a probability gets no gradient. The slope of a soft cap is multiplied in here.
        kept = (p if slope is None else p * slope).astype(jnp.float16)
        write(p.astype(dtype), probs, n)
        # The products of the cotangent and the values are the gradients of probabilities.
        d = product(n * (2 * chunks) + chunks)
        if slope is None and dtype == jnp.float16:
          kept = tile[wg]  # read it back from shared memory: registers would spill, as a few do with a soft cap
        write((kept.astype(jnp.float32) * (d - wide(delta_row, KEYS))).astype(dtype), dscores, n)

      lax.fori_loop(0, count, step, None)
      plgpu.wait_smem_to_gmem(0)

  shape = jax.ShapeDtypeStruct((how.heads * G * how.capacity * QUERIES, KEYS), dtype)
  begin, end, place = tiles[:3]
  # One block computes the scores of 128 queries of one query head, for a run of tiles of keys.
  return plgpu.kernel(
    body,
    out_type=(shape, shape),
    scratch_types={
      "of_queries": plgpu.SMEM((stages, QUERIES, _STEP), dtype, transforms=SWIZZLED),
      "of_keys": plgpu.SMEM((stages, KEYS, _STEP), dtype, transforms=SWIZZLED),
      "tile": plgpu.SMEM((2, _OWN, KEYS), dtype, transforms=SWIZZLED),
      "ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      "free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    },
    grid=(how.heads * G, how.tiles, -(-how.longest // _RUN)),
    grid_names=("head", "tile", "run"),
    num_threads=3,
    thread_name="wg",
    kernel_name="mosaic_flash_scores",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
  )(q, k, v, g, lse, delta, low, high, begin, end, place, here)


def _queries(k, dscores, tiles, here, *, groups: int, scale: float, how: Tiling, interpret: Any):
  """Return gradients of queries, [R / heads, tiles * 128, heads, G, H], for the key-value heads at a time."""
  K, H, G, dtype = *k.shape[2:], groups, k.dtype
  stages, each, heads, width = _STAGES, KEYS // _STEP, min(K, how.heads), min(_WIDE, H)

  # Warpgroup 2 copies operands to shared memory. Warpgroups 0 and 1 multiply them, 64 queries each.
  def body(k, dscores, begin, end, place, here, out, of_scores, of_keys, ready, free, done):
    wg = lax.axis_index("wg")
    index = lax.axis_index("head")
    # Find the head, the group of queries, and the columns of this block.
    r, group = _divided(index, G)
    b, kv = _divided(here[0] + r, K)
    own = how.tiles - 1 - lax.axis_index("tile")
    i = here[1] + own
    first, row = begin[b, i], (index * how.capacity + place[b, i]) * QUERIES
    total = (end[b, i] - first) * each
    columns = pl.ds(lax.axis_index("part") * width, width)
    stream = Stream(ready, free, stages)

    @pl.when(wg == 2)
    def _copies():
      plgpu.set_max_registers(40, action="decrease")

      # Gradients of scores and keys arrive in steps of _STEP keys.
      def copy(t, slot):
        n, c = _divided(t, each)
        source = dscores.at[pl.ds(row + n * QUERIES, QUERIES), pl.ds(c * _STEP, _STEP)]
        plgpu.copy_gmem_to_smem(source, of_scores.at[slot], ready.at[slot])
        keys = pl.ds(first * KEYS + t * _STEP, _STEP)
        plgpu.copy_gmem_to_smem(k.at[b, keys, kv, columns], of_keys.at[slot], ready.at[slot])

      stream.fill(total, copy)

    @pl.when(wg < 2)
    def _computes():
      plgpu.set_max_registers(232, action="increase")

      # Each warpgroup multiplies its own 64 queries by the keys that both share.
      def multiply(acc, slot):
        plgpu.wgmma(acc, of_scores.at[slot, pl.ds(wg * _OWN, _OWN)], of_keys.at[slot])

      def work(acc):
        stream.multiply(acc, 0, total, multiply)
        return acc[...]

      sums = pl.run_scoped(work, plgpu.ACC((_OWN, width), jnp.float32))
      plgpu.barrier_arrive(done)  # all reads of the slots are done, so two of them can hold the result
      plgpu.barrier_wait(done)
      # The sums lack the scale of the scores. A copy to global memory must start in shared memory.
      of_keys[wg] = (sums * scale).astype(dtype)
      plgpu.commit_smem()
      queries = pl.ds(own * QUERIES + wg * _OWN, _OWN)
      plgpu.copy_smem_to_gmem(of_keys.at[wg], out.at[lax.div(r, heads), queries, lax.rem(r, heads), group, columns])
      plgpu.wait_smem_to_gmem(0)

  begin, end, place = tiles[:3]
  # One block computes 128 queries of one query head, for one part of the columns.
  return plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((how.heads // heads, how.tiles * QUERIES, heads, G, H), dtype),
    scratch_types={
      "of_scores": plgpu.SMEM((stages, QUERIES, _STEP), dtype, transforms=SWIZZLED),
      "of_keys": plgpu.SMEM((stages, _STEP, width), dtype, transforms=SWIZZLED),
      "ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      "free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      "done": plgpu.Barrier(num_arrivals=2),
    },
    grid=(how.heads * G, how.tiles, H // width),
    grid_names=("head", "tile", "part"),
    num_threads=3,
    thread_name="wg",
    kernel_name="mosaic_flash_queries",
    interpret=interpret,
  )(k, dscores, begin, end, place, here)


def _keys_and_values(q, g, probs, dscores, tiles, here, *, groups: int, scale: float, how: Tiling, interpret: Any):
  """Return gradients of values and of keys (before the scale) for the queries at a time, float32 [2, parts, R, T, H]."""
  del scale
  T, N, H = q.shape[1:]
  G, dtype, stages, width = groups, q.dtype, _STAGES, min(_WIDE, H)
  K, each = N // G, QUERIES // _STEP
  parts = max(n for n in _divisors(G) if n <= _PARTS)
  few = G // parts  # query heads in a part

  # Warpgroup 2 copies operands to shared memory. Warpgroups 0 and 1 multiply them, 64 keys each.
  def body(q, g, probs, dscores, begin, place, first, last, here, out, of_scores, of_queries, ready, free):
    wg = lax.axis_index("wg")
    # A block computes gradients of values (which = 0) or of keys (which = 1), for 128 keys and some query heads.
    which, r = _divided(lax.axis_index("head"), how.heads)
    b, kv = _divided(here[0] + r, K)
    block = lax.axis_index("tile")
    tile, half = _divided(block, KEYS // QUERIES)  # a block has 128 of the 256 keys of a tile
    part, across = _divided(lax.axis_index("part"), H // width)
    # Groups of queries of this turn that have a tile for these keys.
    start = jnp.maximum(first[b, tile], here[1])
    each_head = jnp.maximum(jnp.minimum(last[b, tile], here[1] + how.tiles) - start, 0) * each
    columns = pl.ds(across * width, width)
    stream = Stream(ready, free, stages)

    @pl.when(wg == 2)
    def _copies():
      plgpu.set_max_registers(40, action="decrease")

      # The steps go through all query heads of this part, and for each through its groups of queries.
      def copy(t, slot):
        group, rest = _divided(t, each_head)
        group = part * few + group
        n, c = _divided(rest, each)
        i = start + n
        row = ((r * G + group) * how.capacity + place[b, i] + tile - begin[b, i]) * QUERIES + c * _STEP
        queries = pl.ds(i * QUERIES + c * _STEP, _STEP)
        # Values get gradients from probabilities and cotangents, keys from gradients of scores and from queries.
        for index, (scores, x) in enumerate(((probs, g), (dscores, q))):

          @pl.when(which == index)
          def _(scores=scores, x=x):
            source = scores.at[pl.ds(row, _STEP), pl.ds(half * QUERIES, QUERIES)]
            plgpu.copy_gmem_to_smem(source, of_scores.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(x.at[b, queries, kv * G + group, columns], of_queries.at[slot], ready.at[slot])

      stream.fill(few * each_head, copy)

    @pl.when(wg < 2)
    def _computes():
      plgpu.set_max_registers(232, action="increase")

      # The scores are stored by query. A transposed view has one row for each key.
      def multiply(acc, slot):
        plgpu.wgmma(acc, of_scores.at[slot, :, pl.ds(wg * _OWN, _OWN)].transpose((1, 0)), of_queries.at[slot])

      def work(acc):
        stream.multiply(acc, 0, few * each_head, multiply)
        return acc[...]

      # Sum over all queries and query heads of this part.
      sums = pl.run_scoped(work, plgpu.ACC((_OWN, width), jnp.float32))
      out[which, part, r, pl.ds(block * QUERIES + wg * _OWN, _OWN), columns] = sums

  begin, _, place, first, last = tiles
  # One block computes 128 keys, for one part of the query heads and one part of the columns. The parts are added by the caller.
  return plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((2, parts, how.heads, T, H), jnp.float32),
    scratch_types={
      "of_scores": plgpu.SMEM((stages, _STEP, QUERIES), dtype, transforms=SWIZZLED),
      "of_queries": plgpu.SMEM((stages, _STEP, width), dtype, transforms=SWIZZLED),
      "ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      "free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    },
    grid=(2 * how.heads, T // QUERIES, parts * (H // width)),
    grid_names=("head", "tile", "part"),
    num_threads=3,
    thread_name="wg",
    kernel_name="mosaic_flash_keys_and_values",
    interpret=interpret,
  )(q, g, probs, dscores, begin, place, first, last, here)


def _divided(x, by):
  return lax.div(x, by), lax.rem(x, by)
