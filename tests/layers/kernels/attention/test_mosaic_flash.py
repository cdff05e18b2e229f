"""Tests our attention kernels for Hopper GPUs in Pallas' interpreter of GPU kernels.

The interpreter runs one block after another, so a case takes 10 s or more.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention.attention import AttentionConfig
from maxtext_like.layers.attention.masks import Tokens, attention_mask
from maxtext_like.layers.attention.rope import RopeConfig
from maxtext_like.layers.context import Context
from maxtext_like.layers.kernels.attention import mosaic_flash
from maxtext_like.layers.kernels.attention.mosaic.backward import tiling
from maxtext_like.layers.kernels.attention.mosaic_flash import key_ranges, mosaic_flash_attention
from maxtext_like.layers.kernels.attention.registry import attend, choose
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.remat import remat
from maxtext_like.numerics.attention_selfcheck import (
  _kernel,
  _kernel_in_parts,
  arguments_of,
  both_ways,
  cases,
  for_reference,
  judge,
  reference,
  shape_class,
)
from tests.tiers import tiers

needs_interpreter = pytest.mark.skipif(
  jax.__version_info__ < mosaic_flash._JAX, reason="before JAX 0.11 Pallas writes the kernels' loads otherwise"
)


def rows(rng: np.random.Generator, B: int, T: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
  """Return segments with padding, and images inside single segments, both int32 [B, T]."""
  segments, images = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
  for b in range(B):
    t = number = 0
    while t < T:
      end = t + int(rng.integers(1, longest))
      number += 1
      segments[b, t:end] = number if rng.random() > 0.2 else 0
      t = end
    t, number = int(rng.integers(0, 5)), 0
    while t < T:
      same = np.cumsum(segments[b, t:] != segments[b, t]) == 0
      size = min(int(rng.integers(1, longest // 2)), int(same.sum()))
      number += 1
      images[b, t : t + size] = number
      t += size + int(rng.integers(0, 5))
  return segments, images


@pytest.mark.parametrize("window", [None, 1, 5, 13])
@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("with_images", [False, True])
def test_what_a_query_sees_is_a_stretch_of_keys(window, with_segments, with_images):
  """``key_ranges`` describes the same visible keys as ``attention_mask``: one interval for each query. Its ends never decrease
  along a row."""
  rng, B, T = np.random.default_rng(0), 2, 40
  at = np.arange(T)
  for _ in range(8):
    segments, images = (jnp.asarray(x) for x in rows(rng, B, T, 15))
    tokens = Tokens(segments if with_segments else None, images if with_images else None)
    low, high = map(np.asarray, key_ranges(tokens.segments, tokens.images, batch=B, length=T, window=window))
    mask = attention_mask(tokens, B, T, window=window, bidirectional_images=with_images)
    np.testing.assert_array_equal((at >= low[..., None]) & (at < high[..., None]), np.broadcast_to(mask, (B, T, T)))
    assert (np.diff(low) >= 0).all()
    assert (np.diff(high) >= 0).all()


@pytest.mark.parametrize("window", [None, 200, 1024])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("B", "T", "N", "K"), [(2, 4096, 32, 4), (1, 32768, 8, 1), (3, 384, 6, 3)])
@pytest.mark.parametrize("budget", mosaic_flash._BUDGETS.values())
def test_what_the_backward_pass_writes_stays_within_its_budget(B, T, N, K, window, ahead, budget):
  """The backward pass divides queries and heads evenly, and its buffer is within the memory budget. The buffer has
  room for all tiles of keys that the queries of a turn see."""
  how = tiling(B=B, T=T, N=N, K=K, window=window, ahead=ahead, budget=budget)
  assert (T // 128) % how.tiles == B * K % how.heads == 0
  assert how.heads % K == 0 or K % how.heads == 0
  assert how.heads * how.capacity * (N // K) * 2 * 2 * 128 * 256 <= budget
  # Queries that are processed together see no more tiles of 256 keys than fit, wherever their ranges of keys begin.
  low, high = map(np.asarray, key_ranges(None, None, batch=1, length=T, window=window))
  high = np.full_like(high, T) if ahead else high
  tiles = -(-high[0, 127::128] // 256) - (low[0, ::128] * (not ahead)) // 256
  assert tiles.max() <= how.longest
  assert tiles.reshape(-1, how.tiles).sum(1).max() <= how.capacity


LONG_ROWS = [
  (*sizes, window, images)
  for sizes in ((32, 4, 4096), (8, 4, 1024), (16, 16, 4096 + 128), (8, 1, 384))
  for window in (False, True)
  for images in (False, True)
]


@pytest.mark.parametrize(("N", "K", "length", "window", "images"), tiers(LONG_ROWS, LONG_ROWS[8:], LONG_ROWS[:8]))
def test_the_self_test_reaches_the_plans_of_long_rows_of_many_heads(N, K, length, window, images, monkeypatch):
  """The self-test must run both plans of the backward pass: all heads at once, and one head at a time in several turns over the
  queries, as for a batch of 2 x 4096 with 4 heads."""
  reached = []

  def backward(q, k, v, g, *rows, how, **_):
    reached.append((q.shape, k.shape[2], how))
    return q, k, v

  monkeypatch.setattr("maxtext_like.layers.kernels.attention.mosaic.backward.attention_backward", backward)
  forward = "maxtext_like.layers.kernels.attention.mosaic.forward.attention_forward"
  monkeypatch.setattr(forward, lambda q, *_, **__: (q, jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))))
  of = shape_class(
    "mosaic_flash", dtype="bfloat16", head_dim=256, query_heads=N, kv_heads=K, window=window, segments=True, images=images,
    length=length,
  )  # fmt: skip
  case = next(c for c in cases(of) if c.in_parts)
  for attention in (_kernel(of), _kernel_in_parts(of)):
    assert attention is not None
    run = both_ways([attention], "bfloat16", case.length // 4 + 1 if window else None, 1.0)
    jax.eval_shape(run, *arguments_of(of, case))
  (shape, few, together), (_, _, parts) = reached
  rows = shape[1] // 128
  assert (together.tiles, together.heads) == (rows, 2 * few)
  assert parts.heads == 1
  assert few == 1 or parts.heads < few
  assert rows // parts.tiles >= 3
  assert parts.tiles > 1 or rows in (3, 13)  # a prime number of tiles cannot be divided


@pytest.mark.slow
@pytest.mark.newest
@needs_interpreter
@pytest.mark.parametrize(
  ("name", "window", "images", "cap"), [("in parts", False, False, 2.0), ("in parts, masked rows", True, True, None)]
)
def test_the_self_test_in_parts_passes_in_the_interpreter(name, window, images, cap):
  from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

  of = shape_class(
    "mosaic_flash", dtype="bfloat16", head_dim=256, query_heads=2, kv_heads=2, window=window, segments=True, images=images,
    length=384,
  )  # fmt: skip
  case = next(c for c in cases(of) if c.name == name)
  size = case.length // 4 + 1 if window else None
  attention = functools.partial(
    mosaic_flash_attention, bidirectional_images=images, soft_cap=cap, in_parts=True, interpret=InterpretGPUParams()
  )
  given = arguments_of(of, case)
  # Do not compile the complete function: the kernels of the interpreter call the host, and if several run at once on two cores
  # they wait for each other.
  (got,) = both_ways([attention], "bfloat16", size, 256**-0.5)(*given)
  differences = reference(256**-0.5, True, cap)(*for_reference(of, given, got))
  assert not judge(case, "bfloat16", jax.device_get(differences)).problem


def written_out(q, k, v, g, mask, scale, soft_cap=None) -> list[np.ndarray]:
  """Return values, dq, dk and dv in float64. Queries that see no keys have values of zero."""
  (B, T, N, H), K = q.shape, k.shape[2]
  q, g = (x.reshape(B, T, K, N // K, -1) for x in (q, g))
  seen = np.broadcast_to(mask, (B, T, T))[:, None, None]
  scores, slope = np.einsum("btkgh,bskh->bkgts", q, k) * scale, 1.0
  if soft_cap is not None:
    tanh = np.tanh(scores / soft_cap)
    scores, slope = soft_cap * tanh, 1 - tanh**2
  scores = np.where(seen, scores, -np.inf)
  e = np.exp(scores - np.where(seen.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0))
  p = e / np.maximum(e.sum(-1, keepdims=True), 1e-300)
  out = np.einsum("bkgts,bskh->btkgh", p, v)
  dp = np.einsum("btkgh,bskh->bkgts", g, v)
  ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * slope * scale
  dq, dk = np.einsum("bkgts,bskh->btkgh", ds, k), np.einsum("bkgts,btkgh->bskh", ds, q)
  return [out.reshape(B, T, N, -1), dq.reshape(B, T, N, H), dk, np.einsum("bkgts,btkgh->bskh", p, g)]


@pytest.mark.slow
@pytest.mark.newest
@needs_interpreter
@pytest.mark.parametrize(
  ("sizes", "dtype", "window", "documents", "images", "budget", "soft_cap"),
  [
    ((2, 256, 2, 1, 512, 512), "bfloat16", None, True, False, 1 << 30, None),
    ((1, 384, 2, 2, 512, 320), "bfloat16", 70, False, False, 1 << 19, None),  # one key-value head at a time, in several turns
    ((1, 384, 2, 1, 256, 256), "bfloat16", None, True, False, 1 << 30, None),  # only half of the last 256 keys exist
    # In several turns, each with some query heads of one key-value head.
    ((1, 384, 6, 2, 256, 256), "float16", 70, True, False, 1 << 20, None),
    ((1, 256, 3, 1, 256, 256), "bfloat16", None, True, True, 1 << 30, None),
    # Latent attention: the forward pass pads the heads to 256.
    ((1, 256, 2, 2, 192, 128), "float16", None, True, False, 1 << 30, None),
    ((1, 256, 2, 1, 512, 512), "bfloat16", None, True, False, 1 << 30, 0.8),
    ((1, 384, 4, 2, 128, 128), "bfloat16", 130, True, False, 1 << 30, 1.2),
    ((1, 256, 2, 1, 128, 128), "float16", None, False, False, 1 << 30, 0.8),
    ((1, 256, 2, 1, 256, 256), "float16", 70, True, True, 1 << 20, 30.0),
  ],
)
def test_values_and_gradients_are_those_of_attention_written_out(
  sizes, dtype, window, documents, images, budget, soft_cap, monkeypatch
):
  from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

  monkeypatch.setattr(mosaic_flash, "_BUDGETS", {512: budget})
  B, T, N, K, H, V = sizes
  rng = np.random.default_rng(0)
  # The kernel scales these operands to the range of float16.
  magnitudes = (300.0, 1 / 300, 1e6, 1e-6) if max(H, V) > 256 else (1.0,) * 4
  q, k, v, g = (
    jnp.asarray(rng.normal(size=(B, T, *of)) * magnitude, dtype)
    for of, magnitude in zip(((N, H), (K, H), (K, V), (N, V)), magnitudes, strict=True)
  )
  of_rows = [jnp.asarray(x) for x in rows(rng, B, T, 200)]
  tokens = Tokens(of_rows[0] if documents else None, of_rows[1] if images else None)

  def attend(q, k, v):
    return mosaic_flash_attention(
      q, k, v, tokens, window=window, bidirectional_images=images, scale=H**-0.5, soft_cap=soft_cap,
      interpret=InterpretGPUParams(),
    )  # fmt: skip

  out, backward = jax.vjp(attend, q, k, v)
  mask = np.asarray(attention_mask(tokens, B, T, window=window, bidirectional_images=images))
  q, k, v, g64 = (np.asarray(x, np.float64) for x in (q, k, v, g))
  want = written_out(q, k, v, g64, mask, H**-0.5, soft_cap)
  for got, exact in zip((out, *backward(g)), want, strict=True):
    assert got.dtype == dtype
    difference = np.linalg.norm(np.asarray(got, np.float64) - exact)
    most = 4e-4 if dtype == "float16" else 2.1e-3 if max(H, V) > 256 else 3e-3
    assert difference < most * np.linalg.norm(exact)
    if documents:
      assert not np.asarray(got)[np.asarray(tokens.segments) == 0].any()


@pytest.mark.slow
@pytest.mark.newest
@needs_interpreter
def test_float16_gradients_of_small_cotangents_are_summed_before_they_are_rounded():
  """The kernel multiplies small cotangents by a power of two. The gradient of a key is a sum over queries, which may exceed
  float16 in this scale. The sum must therefore be divided by the power before it is rounded to float16."""
  from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

  T, H = 128, 256
  q = jnp.ones((1, T, 1, H), jnp.float16)
  k, v = jnp.zeros_like(q), jnp.zeros_like(q).at[:, 0].set(128)
  g = jnp.full_like(q, 2.0**-10)
  tokens = Tokens(None, None)
  attend = lambda q, k, v: mosaic_flash_attention(q, k, v, tokens, window=None, scale=1.0, interpret=InterpretGPUParams())
  got = jax.vjp(attend, q, k, v)[1](g)
  mask = np.asarray(attention_mask(tokens, 1, T, window=None, bidirectional_images=False))
  q64, k64, v64, g64 = (np.asarray(x, np.float64) for x in (q, k, v, g))
  exact = written_out(q64, k64, v64, g64, mask, 1.0)[1:]
  for mine, theirs in zip(got, exact, strict=True):
    np.testing.assert_allclose(np.asarray(mine, np.float64), theirs, rtol=0, atol=2e-3 * max(np.abs(theirs).max(), 1e-3))


@pytest.mark.slow
@pytest.mark.newest
@needs_interpreter
def test_scores_far_beyond_their_soft_cap_are_at_it():
  """For such scores the exponential that computes tanh is 0 or infinite. The result must be the cap, with a gradient of zero. A
  NaN in a query must still give NaN."""
  from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

  T, H = 128, 128
  sign = np.where(np.arange(T) % 3 == 0, 1.0, -1.0)
  q = jnp.full((1, T, 1, H), 1e4, jnp.bfloat16)
  k = jnp.asarray(np.broadcast_to(1e4 * sign[None, :, None, None], q.shape), jnp.bfloat16)
  v = jnp.asarray(np.random.default_rng(0).normal(size=q.shape), jnp.bfloat16)
  how = {"window": None, "scale": 1.0, "soft_cap": 1.5, "interpret": InterpretGPUParams()}
  attend = lambda q, k, v: mosaic_flash_attention(q, k, v, Tokens(), **how)
  weights = np.tril(np.exp(1.5 * sign)[None].repeat(T, 0))
  exact = weights / weights.sum(-1, keepdims=True) @ np.asarray(v, np.float64)[0, :, 0]
  out, backward = jax.vjp(attend, q, k, v)
  np.testing.assert_allclose(np.asarray(out, np.float64)[0, :, 0], exact, atol=1e-2)
  dq, dk, dv = backward(v)
  assert not np.asarray(dq).any()
  assert not np.asarray(dk).any()
  assert np.isfinite(np.asarray(dv, np.float64)).all()
  assert np.isnan(np.asarray(attend(q.at[0, 5].set(jnp.nan), k, v), np.float64)[0, 5]).all()


@pytest.mark.parametrize("name", [pytest.param("mosaic_flash", marks=needs_interpreter), "blockwise"])
def test_save_attention_keeps_what_the_backward_pass_needs(name):
  """With ``save_attention`` the forward kernel runs once, as without remat. If the policy kept only the output of the kernel,
  the backward pass would run the kernel again."""
  cfg = AttentionConfig(
    emb_dim=16, num_query_heads=2, num_kv_heads=1, head_dim=512, scale=1.0, rope=RopeConfig(dim=512, theta=1e4),
    kernel="auto" if name == "mosaic_flash" else "dot_product", platform="gpu", capability="9.0",
  )  # fmt: skip
  layer = cfg.layer(Precision(dtype="bfloat16"))
  assert choose(cfg.kernel, layer.case(1024, images=False)).name == name
  p = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), layer.params())
  x = jax.ShapeDtypeStruct((1, 1024, 16), "bfloat16")

  def forwards(policy):
    run = remat(lambda p, x: jnp.sum(layer(p, x, Context.of(x))), policy, isolated=True)
    text = str(jax.make_jaxpr(jax.grad(run))(p, x))
    return text.count("mosaic_flash_forward") if name == "mosaic_flash" else text.count(" exp ")

  assert forwards("save_attention") == forwards("none") < forwards("full")


@needs_interpreter
def test_borrowed_keys_of_another_dtype_become_the_layer_s():
  """A layer may reuse keys and values of a layer with another dtype. The result has the layer's own dtype."""
  shape = lambda heads, dtype: jax.ShapeDtypeStruct((1, 128, heads, 256), dtype)
  how = {"window": None, "bidirectional_images": False, "scale": 1.0, "precision": Precision(dtype="bfloat16")}
  run = lambda q, k, v: attend("mosaic_flash", q, k, v, Tokens(None, None), **how)
  assert jax.eval_shape(run, shape(2, "bfloat16"), shape(1, "float16"), shape(1, "float16")).dtype == "bfloat16"


def test_its_operations_are_known_by_the_names_of_the_kernels():
  """The kernel's operations are found in a compiled program by the names of kernels in their scopes. Operations of other
  kernels are not."""
  scopes = ("jvp()", "mosaic_flash", "mosaic_flash_scores", "pallas_call")
  assert mosaic_flash.KERNEL.operation("mosaic_gpu_v2", scopes) == "mosaic_flash_scores"
  assert mosaic_flash.KERNEL.operation("mosaic_gpu_v2", ("experts",)) is None
  assert mosaic_flash.KERNEL.operation("__cudnn$fmhaSoftmax", scopes) is None
