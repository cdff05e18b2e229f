"""Tests every variant of Gemma's attention layer against the equations in float64, and the configurations that it refuses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from written_out import attention, causal, rms, rope, tree64

from maxtext_like.layers.attention.attention import Attention, AttentionConfig
from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.attention.rope import RopeConfig, inverse_frequencies
from maxtext_like.layers.cache import Step
from maxtext_like.layers.context import Context
from maxtext_like.layers.norms import NormConfig
from maxtext_like.layers.precision import Precision

B, T, D, N, K, H = 2, 7, 11, 6, 2, 4
NORM = NormConfig(dim=H)
BASE = AttentionConfig(
  emb_dim=D, num_query_heads=N, num_kv_heads=K, head_dim=H, scale=0.37, rope=RopeConfig(dim=H, theta=100.0), norm=NORM
)
FLOAT32 = Precision(dtype="float32")
X = np.random.default_rng(0).normal(size=(B, T, D))
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0]])
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 0], [5, 6, 7, 8, 9, 0, 0]])

VARIANTS = {
  "gemma3 sliding": {"norm": NormConfig(dim=H, scale_plus_one=True), "window": 3},
  "gemma3 global": {
    "norm": NormConfig(dim=H, scale_plus_one=True),
    "rope": RopeConfig(dim=H, theta=100.0, kind="linear", factor=8.0),
  },
  "gemma4 sliding": {"value_norm": True, "scale": 1.0, "window": 2, "norm": NormConfig(dim=H, epsilon=1e-3)},
  "gemma4 global": {
    "value_norm": True,
    "value_is_key": True,
    "scale": 1.0,
    "rope": RopeConfig(dim=H, theta=100.0, kind="proportional", proportion=0.5),
  },
  "qwen3": {"norm": NormConfig(dim=H, round_before_scale=True)},
  "llama": {"norm": None},
  "soft cap": {"soft_cap": 0.3, "window": 3},
  "qwen2": {"norm": None, "qkv_bias": True},
  "every bias": {"qkv_bias": True, "o_bias": True},
}


def written(cfg: AttentionConfig, p, x, kv=None) -> Any:
  inv_freq = inverse_frequencies(cfg.rope).astype(np.float64)

  def heads(name):
    return np.einsum("btd,dnh->btnh", x, p[name]) + p.get(f"{name}_bias", 0)

  def positioned(name, y):
    if cfg.norm:
      y = rms(y, p[f"{name}_norm"]["scale"] + (1.0 if cfg.norm.scale_plus_one else 0.0), cfg.norm.epsilon)
    return rope(y, POSITIONS, inv_freq)

  q = positioned("q", heads("q"))
  if kv is None:
    raw = heads("k")
    v = raw if cfg.value_is_key else heads("v")
    v = rms(v, 1.0, cfg.norm.epsilon) if cfg.value_norm and cfg.norm else v
    kv = positioned("k", raw), v
  k, v = kv
  out, _ = attention(q, k, v, causal(T, SEGMENTS, cfg.window), cfg.scale, cfg.soft_cap)
  return np.einsum("btnh,nhd->btd", out, p["o"]) + p.get("o_bias", 0), kv


def run(cfg, p, kv=None, precision=FLOAT32, x=X):
  layer = Attention(cfg, precision)
  tokens = Tokens(jnp.asarray(SEGMENTS))
  call = jax.jit(lambda p, x, kv: layer.standalone(p, x, jnp.asarray(POSITIONS), tokens, kv))
  return call(p, jnp.asarray(x, jnp.float32), kv)


@pytest.mark.parametrize("variant", VARIANTS)
def test_against_float64(variant, random_params):
  cfg = dataclasses.replace(BASE, **VARIANTS[variant])
  p = random_params(Attention(cfg, FLOAT32).params())
  assert ("v" in p) != cfg.value_is_key
  out, (k, v) = run(cfg, p)
  expected, (expected_k, expected_v) = written(cfg, tree64(p), X)
  np.testing.assert_allclose(k, expected_k, atol=3e-5)
  np.testing.assert_allclose(v, expected_v, atol=1e-5)
  np.testing.assert_allclose(out, expected, atol=2e-5)
  assert ("q_norm" in p) == ("k_norm" in p) == (cfg.norm is not None)
  assert (("q_bias" in p), ("o_bias" in p)) == (cfg.qkv_bias, cfg.o_bias)
  np.testing.assert_allclose(np.asarray(out)[SEGMENTS == 0], p.get("o_bias", jnp.zeros(D))[None].repeat(3, 0), atol=1e-6)


@pytest.mark.slow
def test_scores_beside_a_cache_are_capped_too(random_params):
  """Run five tokens first and then two with a cache. Together they must give the result of the complete row."""
  layer = Attention(dataclasses.replace(BASE, soft_cap=0.3, window=3), FLOAT32)
  p, x = random_params(layer.params()), jnp.asarray(X, jnp.float32)
  slots, shapes = layer.cache_shapes(T)
  parts, cache = [], {name: jnp.zeros((B, *shape[:-1], slots, shape[-1])) for name, shape in shapes.items()}
  for begin, end in ((0, 5), (5, T)):
    step = Step(jnp.full(B, begin), jnp.full(B, end - begin), fresh=begin == 0)
    positions = jnp.broadcast_to(jnp.arange(begin, end), (B, end - begin))
    ctx = Context(positions, step=step).collecting(cache=cache)
    parts.append(layer(p, x[:, begin:end], ctx))
    cache = ctx.aux["cache"]
  whole, free = (Attention(dataclasses.replace(layer.cfg, soft_cap=cap), FLOAT32)(p, x, Context.of(x)) for cap in (0.3, None))
  np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-5)
  assert np.abs(free - whole).max() > 0.1


def test_a_layer_that_reuses_keys_and_values_uses_and_returns_them(random_params):
  cfg = dataclasses.replace(BASE, reuses_kv_of="global", value_norm=True)
  p = random_params(Attention(cfg, FLOAT32).params())
  assert set(p) == {"q", "o", "q_norm"}
  rng = np.random.default_rng(1)
  kv = tuple(rng.normal(size=(B, T, K, H)) for _ in range(2))
  given = tuple(jnp.asarray(a, jnp.float32) for a in kv)
  out, returned = run(cfg, p, given)
  np.testing.assert_allclose(out, written(cfg, tree64(p), X, kv)[0], atol=2e-5)
  np.testing.assert_array_equal(returned[0], given[0])
  np.testing.assert_array_equal(returned[1], given[1])
  with pytest.raises(ValueError, match="keys and values 'global'"):
    run(cfg, p)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_near_and_in_its_dtype(dtype, random_params):
  cfg = dataclasses.replace(BASE, **VARIANTS["gemma4 sliding"])
  p = random_params(Attention(cfg, FLOAT32).params())
  out, kv = run(cfg, p, precision=Precision(dtype=dtype))
  assert kv[0].dtype == kv[1].dtype == dtype
  assert out.dtype == ("float32" if dtype == "float16" else dtype)  # a float16 sum could overflow
  exact = written(cfg, tree64(p), X)[0]
  tolerance = {"bfloat16": 3e-2, "float16": 4e-3}[dtype]
  np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=tolerance * np.abs(exact).max())


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_kv_heads": 4}, "num_query_heads=6 .*num_kv_heads=4"),
    ({"window": 0}, "sliding window is 0"),
    ({"soft_cap": 0.0}, r"soft cap of the scores is 0\.0\n  fix: .*above 0"),
    ({"rope": RopeConfig(dim=6, theta=1e4)}, "rotary dimension 6 .*head_dim=4"),
    ({"norm": NormConfig(dim=6)}, "norm of q and k .*6.*head_dim=4"),
    ({"norm": None, "value_norm": True}, "value_norm .*norm is None"),
    ({"shares_kv_as": "a", "reuses_kv_of": "b"}, "keys and values 'b'.* as 'a'"),
  ],
)
def test_impossible_sizes_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(BASE, **change)


def test_a_kernel_that_cannot_run_here_is_an_error_and_not_ignored(random_params):
  cfg = dataclasses.replace(BASE, kernel="cudnn_flash")
  with pytest.raises(ValueError, match=r"attention=cudnn_flash .*on NVIDIA GPUs, not on cpu"):
    run(cfg, random_params(Attention(BASE, FLOAT32).params()))
