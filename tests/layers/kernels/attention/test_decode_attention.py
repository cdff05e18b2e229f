"""Tests the attention kernel for a single new token, in the interpreter on the CPU, against attention in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention import attention
from maxtext_like.layers.attention.attention import Attention, AttentionConfig
from maxtext_like.layers.attention.rope import RopeConfig
from maxtext_like.layers.cache import Step, cache_arrays, in_8_bits
from maxtext_like.layers.context import Context
from maxtext_like.layers.kernels.attention.decode import decode_attention, reads
from maxtext_like.layers.precision import Precision
from tests.tiers import slow

interpreted = functools.partial(decode_attention, interpret=True)


def written(q, k, v, lengths, scale, cap):
  """Return attention of each row over its first ``lengths`` slots, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros((*q.shape[:2], v.shape[3]))
  for b, n in np.ndindex(*q.shape[:2]):
    if lengths[b]:
      head = n // (q.shape[1] // k.shape[1])
      scores = k[b, head, : lengths[b]] @ q[b, n] * scale
      scores = scores if cap is None else cap * np.tanh(scores / cap)
      weights = np.exp(scores - scores.max())
      out[b, n] = weights / weights.sum() @ v[b, head, : lengths[b]]
  return out


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
  ("shape", "lengths", "cap"),
  [
    ((3, 6, 2, 37, 32, 32), (37, 0, 5), None),
    ((2, 4, 4, 150, 16, 64), (150, 129), 2.0),
    slow((1, 8, 1, 300, 64, 64), (200,), None),
  ],
)
def test_against_attention_written_out(shape, lengths, cap, int8):
  B, N, K, S, H, V = shape
  draw = np.random.default_rng(0).normal
  q, k, v = (jnp.asarray(draw(size=size), jnp.bfloat16) for size in ((B, N, H), (B, K, S, H), (B, K, S, V)))
  # Slots beyond the length of a row are never read.
  unused = np.arange(S) >= np.array(lengths)[:, None]
  k, v = (jnp.where(unused[:, None, :, None], jnp.nan, x) for x in (k, v))
  arrays, scales = {"k": k, "v": v}, {}
  if int8:
    for name, x in (("k", k), ("v", v)):
      numbers, scale = in_8_bits(jnp.nan_to_num(x))
      arrays[name] = numbers
      scales[f"{name}_scale"] = jnp.where(unused[:, None, :, None], jnp.nan, scale)
    k, v = (arrays[name] * np.nan_to_num(scales[f"{name}_scale"]) for name in ("k", "v"))
  got = interpreted(q, arrays["k"], arrays["v"], jnp.asarray(lengths, jnp.int32), scale=0.3, soft_cap=cap, **scales)
  want = written(q, np.nan_to_num(np.asarray(k, np.float32)), np.nan_to_num(np.asarray(v, np.float32)), lengths, 0.3, cap)
  assert got.shape == want.shape
  np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=1.5e-2)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.slow
def test_a_layer_with_the_kernel(window, int8, random_params, monkeypatch):
  monkeypatch.setattr(attention, "decode_attention", interpreted)
  rope = RopeConfig(dim=16, theta=100.0)
  cfg = AttentionConfig(emb_dim=12, num_query_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, rope=rope, window=window)
  layers = [Attention(dataclasses.replace(cfg, decode=name), Precision(dtype="bfloat16")) for name in ("xla", "pallas_triton")]
  p = random_params(layers[0].params())
  x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 11, 12)), jnp.bfloat16)

  def run(layer: Attention) -> jax.Array:
    slots, shapes = layer.cache_shapes(16)
    cache, parts = {}, []
    for name, (heads, size) in shapes.items():
      cache |= cache_arrays(name, (2, heads, slots, size), jnp.bfloat16, int8=int8)
    for begin, end in ((0, 8), (8, 9), (9, 10), (10, 11)):
      step = Step(jnp.full(2, begin), jnp.full(2, end - begin), fresh=begin == 0)
      positions = jnp.broadcast_to(jnp.arange(begin, end), (2, end - begin))
      ctx = Context(positions, step=step).collecting(cache=cache)
      parts.append(layer(p, x[:, begin:end], ctx))
      cache = ctx.aux["cache"]
    return jnp.concatenate(parts, axis=1)

  one, other = (np.asarray(run(layer), np.float32) for layer in layers)
  np.testing.assert_allclose(other, one, atol=0.02 * np.abs(one).max())


def test_caches_that_the_kernel_cannot_read():
  """Pallas uses 32-bit offsets for arrays of up to 4 GiB. In an 8-bit array of more than 2 GiB, such offsets would be
  negative."""
  cache = lambda slots, dtype="int8": jax.ShapeDtypeStruct((256, 4, slots, 256), dtype)
  assert reads("bfloat16", cache(8192))
  assert not reads("bfloat16", cache(8320))
  assert not reads("bfloat16", cache(16384))
  assert reads("bfloat16", cache(16512))
  assert reads("bfloat16", cache(8192, "bfloat16"))
  assert reads("bfloat16", cache(8320, "bfloat16"))
  assert not reads("bfloat16", cache(128, "float32"))


def test_a_single_token_of_some_rows_of_the_cache(random_params, monkeypatch):
  """The kernel reads the rows of a cache in order, so it must not run if the rows of the batch are in another order or are only
  some of them."""
  monkeypatch.setattr(attention, "decode_attention", interpreted)
  rope = RopeConfig(dim=16, theta=100.0)
  cfg = AttentionConfig(emb_dim=12, num_query_heads=2, num_kv_heads=1, head_dim=16, scale=0.25, rope=rope)
  layers = [Attention(dataclasses.replace(cfg, decode=name), Precision(dtype="bfloat16")) for name in ("xla", "pallas_triton")]
  p, draw = random_params(layers[0].params()), np.random.default_rng(1).normal
  cache = {name: jnp.asarray(draw(size=(5, 1, 16, 16)), jnp.bfloat16) for name in ("k", "v")}
  x, step = jnp.asarray(draw(size=(2, 1, 12)), jnp.bfloat16), Step(jnp.array([7, 3]), jnp.ones(2, int), jnp.array([3, 1]))
  run = lambda layer: layer(p, x, Context(step.start[:, None], step=step).collecting(cache=cache))
  one, other = (np.asarray(run(layer), np.float32) for layer in layers)
  np.testing.assert_array_equal(other, one)
