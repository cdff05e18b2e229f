"""Tests the rotary tables and the rotation against complex numbers in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention.rope import RopeConfig, inverse_frequencies, rope_table, rotate, yarn_mscale

POSITIONS = np.array([[0, 1, 5, 400], [7, 8, 9, 100000]])


def test_default_linear_and_proportional_frequencies():
  plain = 1e4 ** (-np.arange(0, 12, 2) / 12)
  np.testing.assert_allclose(inverse_frequencies(RopeConfig(dim=12, theta=1e4)), plain, rtol=1e-6)
  np.testing.assert_allclose(
    inverse_frequencies(RopeConfig(dim=12, theta=1e4, kind="linear", factor=8.0)), plain / 8, rtol=1e-6
  )
  # A quarter of 16 dimensions is 2 pairs. The denominator of the exponent is still 16.
  partial = inverse_frequencies(RopeConfig(dim=16, theta=1e6, kind="proportional", proportion=0.25))
  np.testing.assert_allclose(partial, [1.0, 1e6 ** (-2 / 16), 0, 0, 0, 0, 0, 0], rtol=1e-6)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
  cfg = RopeConfig(dim=64, theta=1e4, kind="yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0)
  plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
  got = inverse_frequencies(cfg)
  np.testing.assert_allclose(got[:11], plain[:11], rtol=1e-6)  # DeepSeek's ramp runs from pair 10 to pair 23
  np.testing.assert_allclose(got[23:], plain[23:] / 40, rtol=1e-6)
  ramp = (16 - 10) / 13
  np.testing.assert_allclose(got[16], plain[16] / 40 * ramp + plain[16] * (1 - ramp), rtol=1e-6)


def test_yarn_attention_factor():
  base = {"dim": 8, "theta": 1e4, "kind": "yarn", "factor": 40.0}
  assert RopeConfig(**base, mscale=1.0, mscale_all_dim=1.0).attention_factor == 1.0
  assert RopeConfig(**base).attention_factor == pytest.approx(0.1 * math.log(40) + 1)
  expected = (0.1 * math.log(40) + 1) / (0.08 * math.log(40) + 1)
  assert RopeConfig(**base, mscale=1.0, mscale_all_dim=0.8).attention_factor == pytest.approx(expected)
  assert yarn_mscale(0.5, 1.0) == 1.0


@pytest.mark.parametrize("interleave", [False, True])
def test_rotation_is_a_complex_product(interleave):
  cfg = RopeConfig(dim=6, theta=100.0, interleave=interleave)
  x = np.random.default_rng(0).normal(size=(2, 4, 3, 6))
  angle = POSITIONS[..., None, None] * inverse_frequencies(cfg).astype(np.float64)
  pairs = x[..., 0::2] + 1j * x[..., 1::2] if interleave else x[..., :3] + 1j * x[..., 3:]
  turned = pairs * np.exp(1j * angle)
  got = rotate(jnp.asarray(x, jnp.float32), rope_table(cfg, jnp.asarray(POSITIONS)), interleave=interleave)
  expected = np.concatenate([turned.real, turned.imag], -1)
  # The angle of position 100000 has an error of 4e-3 radians in float32.
  np.testing.assert_allclose(got[0], expected[0], atol=1e-4)
  np.testing.assert_allclose(got, expected, atol=2e-2)


def test_angles_are_float32_whatever_the_dtype():
  cfg = RopeConfig(dim=4, theta=1e4)
  cos, _ = rope_table(cfg, jnp.asarray([[1000, 1001]]))
  assert cos.dtype == jnp.float32
  assert cos[0, 0, 0] != cos[0, 1, 0]
  assert rotate(jnp.ones((1, 2, 1, 4), jnp.bfloat16), rope_table(cfg, jnp.asarray([[3, 4]]))).dtype == jnp.bfloat16


def test_an_odd_dimension_is_refused():
  with pytest.raises(ValueError, match="even"):
    RopeConfig(dim=5, theta=1e4)
