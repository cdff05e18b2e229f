"""Tests RMSNorm and LayerNorm against the formula in float64, and at the limits of float16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxtext_like.layers.norms import LayerNorm, NormConfig, RMSNorm
from maxtext_like.layers.precision import Precision

X = np.random.default_rng(0).normal(size=(2, 3, 7))
W = np.random.default_rng(1).normal(size=7) + 1


def rms(x, epsilon=1e-6):
  return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon)


@pytest.mark.parametrize(
  ("options", "expected"), [({}, rms(X) * W), ({"scale_plus_one": True}, rms(X) * (1 + W)), ({"with_scale": False}, rms(X))]
)
def test_rms_norm(options, expected):
  layer = RMSNorm(NormConfig(dim=7, **options), Precision(dtype="float32"))
  p = {"scale": jnp.asarray(W, jnp.float32)} if layer.params() else {}
  np.testing.assert_allclose(layer(p, jnp.asarray(X, jnp.float32)), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"scale_plus_one": True}, {"with_scale": False}, {"round_before_scale": True}])
def test_gradients_of_rms_norm(options):
  """Compare with finite differences of the formula in float64, one entry at a time."""
  g = np.random.default_rng(2).normal(size=X.shape)
  plus_one, with_scale = options.get("scale_plus_one", False), options.get("with_scale", True)

  def value(x, w):
    return np.sum(rms(x) * (w + plus_one if with_scale else 1.0) * g)

  def slopes(f, at):
    steps = 1e-5 * np.eye(at.size).reshape(-1, *at.shape)
    return np.reshape([(f(at + h) - f(at - h)) / 2e-5 for h in steps], at.shape)

  layer = RMSNorm(NormConfig(dim=7, **options), Precision(dtype="float32"))
  p = {"scale": jnp.asarray(W, jnp.float32)} if with_scale else {}
  dp, dx = jax.grad(lambda p, x: jnp.sum(layer(p, x) * jnp.asarray(g, jnp.float32)), (0, 1))(p, jnp.asarray(X, jnp.float32))
  np.testing.assert_allclose(dx, slopes(lambda x: value(x, W), X), rtol=1e-5, atol=1e-5)
  if with_scale:
    np.testing.assert_allclose(dp["scale"], slopes(lambda w: value(X, w), W), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_rms_norm_keeps_for_its_gradient(dtype):
  """The norm keeps x unchanged, one float32 number per row, and the scale. Gradients have the dtypes of their arrays."""
  layer = RMSNorm(NormConfig(dim=8), Precision(dtype=dtype, weight_dtype="bfloat16"))
  p, x = {"scale": jnp.ones(8, "bfloat16")}, jnp.ones((2, 3, 8), dtype)
  y, pull = jax.vjp(layer, p, x)
  kept = sorted((v.shape, str(v.dtype)) for v in jax.tree.leaves(pull))
  assert kept == sorted([((2, 3, 8), dtype), ((2, 3, 1), "float32"), ((8,), "bfloat16")])
  dp, dx = pull(y)
  assert (dp["scale"].dtype, dx.dtype) == (jnp.bfloat16, jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"round_before_scale": True}, {"scale_plus_one": True}])
def test_16_bit_gradients_are_the_float32_ones_rounded(dtype, options):
  """Cotangents are as large as with a loss scale. Their product with the scale of the norm exceeds float16, but the gradient of
  x does not."""
  cfg = NormConfig(dim=8, **options)
  rng = np.random.default_rng(4)
  x, g = (jnp.asarray(rng.normal(size=(2, 3, 8)) * size, dtype) for size in (50, 2e4))
  p = {"scale": jnp.asarray(rng.uniform(3, 6, 8), jnp.float32)}
  assert jnp.abs(g.astype(jnp.float32) * p["scale"]).max() > 65504

  def gradients(kind):
    _, pull = jax.vjp(RMSNorm(cfg, Precision(dtype=kind)), p, x.astype(kind))
    return jax.tree.map(lambda a: np.asarray(a, np.float32), pull(g.astype(kind)))

  (dp, dx), (want_dp, want_dx) = gradients(dtype), gradients("float32")
  np.testing.assert_allclose(dp["scale"], want_dp["scale"], rtol=1e-6)
  np.testing.assert_allclose(dx, want_dx, rtol=float(jnp.finfo(dtype).eps))


def test_gradients_of_a_shared_scale_add_up_inside_shard_map():
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  layer = RMSNorm(NormConfig(dim=7), Precision(dtype="float32"))
  loss = lambda p, x: jnp.sum(jnp.sin(layer(p, x)))
  p, x = {"scale": jnp.asarray(W, jnp.float32)}, jnp.asarray(X, jnp.float32)
  spread = jax.shard_map(lambda p, x: jax.lax.psum(loss(p, x), "data"), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
  got, want = jax.grad(spread, (0, 1))(p, x), jax.grad(loss, (0, 1))(p, x)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_the_scale_starts_at_one_either_way():
  for plus_one, start in [(False, 1.0), (True, 0.0)]:
    spec = RMSNorm(NormConfig(dim=3, scale_plus_one=plus_one), Precision()).params()["scale"]
    assert spec.init.value == start


def test_order_of_rounding():
  """Gemma rounds once, after the scale. DeepSeek rounds before and after it."""
  x, w = jnp.asarray(X, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)
  normed = rms(np.asarray(x, np.float64))
  after = jnp.asarray(normed * np.asarray(w, np.float64), jnp.bfloat16)
  before = jnp.asarray(normed, jnp.bfloat16) * w
  assert not (after == before).all()
  for round_before_scale, expected in [(False, after), (True, before)]:
    layer = RMSNorm(NormConfig(dim=7, round_before_scale=round_before_scale), Precision(dtype="bfloat16"))
    np.testing.assert_array_equal(layer({"scale": w}, x), expected)


def test_float16_squares_do_not_overflow():
  layer = RMSNorm(NormConfig(dim=7, with_scale=False), Precision(dtype="float16"))
  x = jnp.asarray(X * 2e4, jnp.float16)
  np.testing.assert_allclose(layer({}, x), rms(np.asarray(x, np.float64)), rtol=1e-3)


def test_layer_norm():
  b = np.random.default_rng(2).normal(size=7)
  layer = LayerNorm(NormConfig(dim=7), Precision(dtype="float32"))
  p = {"scale": jnp.asarray(W, jnp.float32), "bias": jnp.asarray(b, jnp.float32)}
  expected = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-6) * W + b
  np.testing.assert_allclose(layer(p, jnp.asarray(X, jnp.float32)), expected, rtol=2e-6, atol=2e-6)
