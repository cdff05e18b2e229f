"""Gemma's attention layer against the equations in float64, in each of its variants, and what it refuses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from written_out import attention, causal, rms, rope, tree64

from maxtext_like.layers.attention import Attention, AttentionConfig
from maxtext_like.layers.masks import Tokens
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.rope import RopeConfig, inverse_frequencies

B, T, D, N, K, H = 2, 7, 11, 6, 2, 4
BASE = AttentionConfig(
  emb_dim=D, num_query_heads=N, num_kv_heads=K, head_dim=H, scale=0.37, rope=RopeConfig(dim=H, theta=100.0)
)
FLOAT32 = Precision(dtype="float32")
X = np.random.default_rng(0).normal(size=(B, T, D))
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0]])
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 0], [5, 6, 7, 8, 9, 0, 0]])

VARIANTS = {
  "gemma3 sliding": {"norm_plus_one": True, "window": 3},
  "gemma3 global": {"norm_plus_one": True, "rope": RopeConfig(dim=H, theta=100.0, kind="linear", factor=8.0)},
  "gemma4 sliding": {"value_norm": True, "scale": 1.0, "window": 2, "epsilon": 1e-3},
  "gemma4 global": {
    "value_norm": True,
    "value_is_key": True,
    "scale": 1.0,
    "rope": RopeConfig(dim=H, theta=100.0, kind="proportional", proportion=0.5),
  },
}


def written(cfg: AttentionConfig, p, x, kv=None) -> Any:
  inv_freq = inverse_frequencies(cfg.rope).astype(np.float64)
  plus = 1.0 if cfg.norm_plus_one else 0.0
  q = rope(rms(np.einsum("btd,dnh->btnh", x, p["q"]), p["q_norm"]["scale"] + plus, cfg.epsilon), POSITIONS, inv_freq)
  if kv is None:
    raw = np.einsum("btd,dkh->btkh", x, p["k"])
    v = raw if cfg.value_is_key else np.einsum("btd,dkh->btkh", x, p["v"])
    v = rms(v, 1.0, cfg.epsilon) if cfg.value_norm else v
    kv = rope(rms(raw, p["k_norm"]["scale"] + plus, cfg.epsilon), POSITIONS, inv_freq), v
  k, v = kv
  out, _ = attention(q, k, v, causal(T, SEGMENTS, cfg.window), cfg.scale)
  return np.einsum("btnh,nhd->btd", out, p["o"]), kv


def run(cfg, p, kv=None, precision=FLOAT32, x=X):
  layer = Attention(cfg, precision)
  tokens = Tokens(jnp.asarray(SEGMENTS))
  call = jax.jit(lambda p, x, kv: layer(p, x, jnp.asarray(POSITIONS), tokens, kv))
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
  assert (np.asarray(out)[SEGMENTS == 0] == 0).all()


def test_a_layer_that_shares_uses_what_it_is_given_and_hands_it_on(random_params):
  cfg = dataclasses.replace(BASE, shared_kv=True, value_norm=True)
  p = random_params(Attention(cfg, FLOAT32).params())
  assert set(p) == {"q", "o", "q_norm"}
  rng = np.random.default_rng(1)
  kv = tuple(rng.normal(size=(B, T, K, H)) for _ in range(2))
  given = tuple(jnp.asarray(a, jnp.float32) for a in kv)
  out, handed_on = run(cfg, p, given)
  np.testing.assert_allclose(out, written(cfg, tree64(p), X, kv)[0], atol=2e-5)
  np.testing.assert_array_equal(handed_on[0], given[0])
  np.testing.assert_array_equal(handed_on[1], given[1])
  with pytest.raises(ValueError, match="was given none"):
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
    ({"num_kv_heads": 4}, "6 query heads do not divide among 4"),
    ({"window": 0}, "at least 1 key"),
    ({"rope": RopeConfig(dim=6, theta=1e4)}, "rotary dimension 6 differs from head_dim 4"),
  ],
)
def test_impossible_sizes_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(BASE, **change)


def test_a_kernel_that_cannot_run_here_is_an_error_and_not_ignored(random_params):
  cfg = dataclasses.replace(BASE, kernel="cudnn_flash")
  with pytest.raises(ValueError, match="attention=cudnn_flash cannot be used here: it runs on NVIDIA GPUs, not on cpu"):
    run(cfg, random_params(Attention(BASE, FLOAT32).params()))
