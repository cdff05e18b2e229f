"""The forward pass of attention on Hopper GPUs for heads of 128, 256 and 512, in one kernel.

A block works on 64 queries of a head. Heads of 512 leave no room for more, because 64 x 512 float32 sums take half of the
registers of a multiprocessor. Two warpgroups compute and a third one copies. Of each 128 keys, a warpgroup multiplies 64 with
the queries. The two exchange their largest scores, write their exponentials side by side to shared memory, and each multiplies
all of them with one half of the value heads.

B batch, T position, N query heads, K key-value heads, G = N / K, H head.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from maxtext_like.layers.kernels.attention.mosaic.scores import base_two
from maxtext_like.layers.kernels.attention.mosaic.stream import ROWS, SWIZZLED, TILE, plgpu, wide

QUERIES = 64  # queries of a block
KEYS = 128  # keys of a step, half of them for each warpgroup
CHUNK = 128  # maximum width of a chunk: 64 keys times this part of a head are copied at a time
SLOTS = 4  # chunks of a warpgroup in shared memory
_LOWEST = -1e30  # below every score, and finite, so that the difference of two is finite


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "interpret"))  # layers share the compiled kernel
def attention_forward(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  low_BT: jax.Array,
  high_BT: jax.Array,
  *,
  scale: float,
  soft_cap: float | None = None,
  divisor: jax.Array | None = None,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """Compute attention, and the residual of the backward pass.

  Args:
    q_BTNH, k_BTKH, v_BTKH: bfloat16 or float16; T a multiple of 128, H 128, 256 or 512. Values may have the other dtype than
      queries and keys; probabilities are converted to the dtype of the values.
    low_BT, high_BT: int32; a query sees the keys low <= s < high. Neither may decrease along T.
    scale: factor on the scores.
    soft_cap: soft cap of the scaled scores; None: no cap.
    divisor: float32 [1], divisor of the output, applied before rounding; None: 1.
    interpret: parameters of Pallas' interpreter for GPU kernels.

  Returns:
    [B, T, N, H] in the dtype of q, zeros for a query that sees no key; and float32 [B, N, T], the binary logarithm of the sum
    of exponentials of each query's scores.
  """
  B, T, N, H = q_BTNH.shape
  K = k_BTKH.shape[2]
  # Divide a head into chunks. Each warpgroup has one half of the value heads.
  G, tiles, half, dtype = N // K, T // QUERIES, H // 2, q_BTNH.dtype
  chunk = min(CHUNK, half)
  chunks, parts = H // chunk, half // chunk  # chunks of the keys of a step; chunks of 64 keys of one warpgroup's values
  steps = chunks + 2 * parts  # chunks of a step: first all of the keys, then all of the values
  ring = [plgpu.SMEM((2 * SLOTS, 64, chunk), x.dtype, transforms=SWIZZLED) for x in (k_BTKH, v_BTKH)]
  if v_BTKH.dtype == dtype:
    rings = ring[:1]
  else:  # one buffer seen in both dtypes, which the interpreter does not support; slots have equal sizes and positions
    assert k_BTKH.dtype.itemsize == v_BTKH.dtype.itemsize
    rings = ring if interpret else plgpu.RefUnion(*ring)

  def body(q, k, v, low, high, divisor, out, lse, q_smem, rings, probs, rows, q_ready, ready, free, met):
    of_keys, of_values = rings if v.dtype != k.dtype else (*rings, *rings)
    wg = lax.axis_index("wg")
    # Find the head and the queries of this block, and the range of keys that they see.
    b, kv = _divided(lax.axis_index("kv"), K)
    head = kv * G + lax.axis_index("group")
    tile = tiles - 1 - lax.axis_index("tile")  # start with the longest tiles
    start = tile * QUERIES
    first = lax.div(low[b, start], KEYS)
    last = lax.div(high[b, start + QUERIES - 1] + (KEYS - 1), KEYS)
    count = jnp.maximum(last - first, 0)

    # Warpgroup 2 copies the queries once, and for each step the chunks of keys and values.
    @pl.when(wg == 2)
    def _copies():
      plgpu.set_max_registers(40, action="decrease")
      # The queries of the block stay in shared memory for all steps.
      for c in range(chunks):
        source = q.at[b, pl.ds(start, QUERIES), head, pl.ds(c * chunk, chunk)]
        plgpu.copy_gmem_to_smem(source, q_smem.at[c], q_ready)

      # Copy each step's chunks into a ring of slots, after both users of a slot have released it.
      def step(i, _):
        key = (first + i) * KEYS
        # Chunks are copied in the order in which they are multiplied: first all keys of the step, then all values.
        for c in range(steps):
          for w in range(2):
            slot = w * SLOTS + c % SLOTS
            if c >= SLOTS:
              plgpu.barrier_wait(free.at[slot])
            else:
              pl.when(i > 0)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))
            if c < chunks:
              source = k.at[b, pl.ds(key + w * 64, 64), kv, pl.ds(c * chunk, chunk)]
            else:
              n, part = divmod(c - chunks, parts)
              source = v.at[b, pl.ds(key + n * 64, 64), kv, pl.ds(w * half + part * chunk, chunk)]
            plgpu.copy_gmem_to_smem(source, (of_keys if c < chunks else of_values).at[slot], ready.at[slot])

      lax.fori_loop(0, count, step, None)

      @pl.when(count > 0)
      def _():  # wait until all slots are free: a warpgroup must not leave while others use its barriers
        for slot in range(2 * SLOTS):
          plgpu.barrier_wait(free.at[slot])

    # Warpgroups 0 and 1 compute.
    @pl.when(wg < 2)
    def _computes():
      plgpu.set_max_registers(232, action="increase")
      # Ranges of visible keys, one per query.
      queries = pl.ds(start, QUERIES)
      low_row = plgpu.load(low.at[b, queries], layout=ROWS, optimized=False)
      high_row = plgpu.load(high.at[b, queries], layout=ROWS, optimized=False)
      plgpu.barrier_wait(q_ready)

      # Both warpgroups wait for each other.
      def meet():
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)

      def product(acc, slot, a, b):
        plgpu.barrier_wait(ready.at[slot])
        plgpu.wgmma(acc, a, b)

      def release(slot):
        plgpu.barrier_arrive(free.at[slot])

      def step(i, carry):
        sums, top, total = carry

        # Products run asynchronously. When only the newest is in flight, the slot of the previous one can be filled again.
        def scores(acc):
          def multiply(c, _):
            slot = wg * SLOTS + lax.rem(c, SLOTS)
            product(acc, slot, q_smem.at[c], of_keys.at[slot].transpose((1, 0)))

            @pl.when(c > 0)
            def _():
              plgpu.wgmma_wait(1)
              release(wg * SLOTS + lax.rem(c - 1, SLOTS))

          lax.fori_loop(0, chunks, multiply, None)
          return acc[...]

        # Scores of this warpgroup's 64 keys, in base 2, masked.
        s, _ = base_two(pl.run_scoped(scores, plgpu.ACC((QUERIES, 64), jnp.float32)), scale, soft_cap)
        release(wg * SLOTS + (chunks - 1) % SLOTS)
        key = plgpu.broadcasted_iota(jnp.int32, (QUERIES, 64), 1, layout=TILE) + ((first + i) * KEYS + wg * 64)
        seen = (key >= wide(low_row, 64)) & (key < wide(high_row, 64))
        # Masked scores become -inf, whose exponential is 0.
        s = jnp.where(seen, s, -jnp.inf)

        # Exchange row maxima, write the exponentials to shared memory, and rescale the sums to the new maximum.
        rows[wg] = s.max(axis=1)
        meet()
        before = top
        top = jnp.maximum(jnp.maximum(before, plgpu.load(rows.at[0], layout=ROWS)), plgpu.load(rows.at[1], layout=ROWS))
        p = jnp.exp2(s - wide(top, 64))
        shrink = jnp.exp2(before - top)
        total = total * shrink + p.sum(axis=1)
        probs[:, pl.ds(wg * 64, 64)] = p.astype(v.dtype)
        plgpu.commit_smem()
        sums = tuple(x * wide(shrink, chunk) for x in sums)
        meet()

        # Multiply the exponentials of all 128 keys by this warpgroup's half of the values. The values arrive after the keys in
        # the same ring, in chunks of 64 keys.
        def values(accs):
          def multiply(n, _):
            for part, acc in enumerate(accs):
              c = n * parts + part
              slot = wg * SLOTS + lax.rem(chunks + c, SLOTS)
              product(acc, slot, probs.at[:, pl.ds(n * 64, 64)], of_values.at[slot])
              if part > 0:
                plgpu.wgmma_wait(1)
                release(wg * SLOTS + lax.rem(chunks + c - 1, SLOTS))
              else:

                @pl.when(n > 0)
                def _(c=c):
                  plgpu.wgmma_wait(1)
                  release(wg * SLOTS + lax.rem(chunks + c - 1, SLOTS))

          lax.fori_loop(0, 2, multiply, None)
          plgpu.wgmma_wait(0)

        sums = accumulated(values, sums, interpret)
        release(wg * SLOTS + (steps - 1) % SLOTS)
        return tuple(sums), top, total

      # Running sums, row maxima and row totals.
      zeros = plgpu.layout_cast(jnp.zeros((QUERIES, chunk), jnp.float32), TILE)
      lowest = plgpu.layout_cast(jnp.full((QUERIES,), _LOWEST, jnp.float32), ROWS)
      nothing = plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), ROWS)
      sums, top, total = lax.fori_loop(0, count, step, ((zeros,) * parts, lowest, nothing))

      # Add the totals of both warpgroups, divide, and write the output and the logarithm of the sum.
      rows[wg] = total
      meet()
      total = plgpu.load(rows.at[0], layout=ROWS) + plgpu.load(rows.at[1], layout=ROWS)
      # A query that sees no key has total 0 and output 0.
      some = jnp.where(total > 0, total, 1.0)
      by = some * divisor[0]
      for part, x in enumerate(sums):
        q_smem[wg * parts + part] = (x / wide(by, chunk)).astype(dtype)
      meet()

      # Both warpgroups have the same totals, so one of them writes the logarithm.
      @pl.when(wg == 0)
      def _():
        rows[0] = jnp.where(total > 0, top, 0.0) + jnp.log(some) * math.log2(math.e)

      plgpu.commit_smem()
      for part in range(parts):
        place = out.at[b, queries, head, pl.ds(wg * half + part * chunk, chunk)]
        plgpu.copy_smem_to_gmem(q_smem.at[wg * parts + part], place)
      pl.when(wg == 0)(lambda: plgpu.copy_smem_to_gmem(rows.at[0], lse.at[b, head, queries]))
      plgpu.wait_smem_to_gmem(0)

  # One block computes 128 queries of one query head.
  return plgpu.kernel(
    body,
    out_type=(jax.ShapeDtypeStruct((B, T, N, H), dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)),
    scratch_types={
      "q_smem": plgpu.SMEM((chunks, QUERIES, chunk), dtype, transforms=SWIZZLED),
      "rings": rings,
      "probs": plgpu.SMEM((QUERIES, KEYS), v_BTKH.dtype, transforms=SWIZZLED),
      "rows": plgpu.SMEM((2, QUERIES), jnp.float32),
      "q_ready": plgpu.Barrier(num_arrivals=chunks),
      "ready": plgpu.Barrier(num_barriers=2 * SLOTS),
      "free": plgpu.Barrier(num_barriers=2 * SLOTS),
      "met": plgpu.Barrier(num_arrivals=2),
    },
    grid=(B * K, tiles, G),
    grid_names=("kv", "tile", "group"),
    num_threads=3,
    thread_name="wg",
    kernel_name="mosaic_flash_forward",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
  )(q_BTNH, k_BTKH, v_BTKH, low_BT, high_BT, jnp.ones(1, jnp.float32) if divisor is None else divisor)


def accumulated(work: Callable[..., None], sums: tuple[jax.Array, ...], interpret: Any) -> tuple[jax.Array, ...]:
  """Return the sums, float32 in registers, after ``work`` has added to them. ``work`` receives references to them."""
  if interpret:  # the interpreter supports only accumulators that start at zero
    fresh = [plgpu.ACC(x.shape, jnp.float32) for x in sums]
    added = pl.run_scoped(lambda *accs: (work(accs), tuple(acc[...] for acc in accs))[1], *fresh)
    return tuple(x + y for x, y in zip(sums, added, strict=True))
  return tuple(pl.run_state(work)(tuple(plgpu.ACC.init(x) for x in sums)))


def _divided(x, by: int):
  return lax.div(x, by), lax.rem(x, by)
