"""Tests soft caps: values and gradients in every dtype, and the dtype of scores that the flags select."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import named

from maxtext_like.layers.attention.masks import soft_cap, softmax_scores
from maxtext_like.layers.precision import Precision

X = np.array([-1e4, -7.5, -0.3, 0.0, 1e-3, 2.0, 60.0, 3e4])


def narrow(dtype) -> Precision:
  return Precision(dtype=dtype, float32_qk_product=False, float32_logits=False)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-7), ("bfloat16", 1.2e-2), ("float16", 1.5e-3)])
@pytest.mark.parametrize("cap", [0.5, 7.0, 50.2])  # bfloat16 rounds 50.2 up
def test_values_and_gradients_are_those_of_float64(cap, dtype, tolerance):
  g = np.linspace(-2, 3, X.size)
  x = jnp.asarray(X, dtype)
  out, backward = jax.vjp(lambda x: softmax_scores(x, narrow(dtype), cap), x)
  (dx,) = backward(jnp.asarray(g, dtype))
  assert out.dtype == dx.dtype == dtype
  t = np.tanh(np.asarray(x, np.float64) / cap)
  np.testing.assert_allclose(np.asarray(out, np.float64), cap * t, rtol=tolerance, atol=0)
  np.testing.assert_allclose(np.asarray(dx, np.float64), g * (1 - t**2), atol=3 * tolerance)
  assert (np.asarray(dx, np.float64) * g >= 0).all()  # at the cap the slope is 0 and never negative
  np.testing.assert_array_equal(soft_cap(x, cap), out)


def test_without_a_cap_nothing_is_done():
  x = jnp.ones(3)
  assert soft_cap(x, None) is x
  assert not jax.make_jaxpr(lambda x: softmax_scores(x, Precision(dtype="float32"), None))(x).eqns


@pytest.mark.parametrize("cap", [1e-4, 50.0, 65504.0])
def test_float16_holds_every_step(cap):
  """No intermediate value overflows: an infinite score becomes the cap, and a cotangent of 6e4 is multiplied only by factors of
  at most one."""
  x = jnp.asarray([-np.inf, -65504, -1, 0, 6e-8, 1, 65504, np.inf], jnp.float16)
  out, backward = jax.vjp(lambda x: softmax_scores(x, narrow("float16"), cap), x)
  (dx,) = backward(jnp.full(x.shape, 6e4, jnp.float16))
  assert np.isfinite(dx).all()
  if cap < 65504:
    assert np.isfinite(out).all()
    np.testing.assert_allclose(np.asarray(out, np.float64)[[0, -1]], [-cap, cap], rtol=1e-3)
  assert np.float64(dx[3]) == pytest.approx(6e4, rel=1e-3)


@pytest.mark.parametrize("product", [True, False])
@pytest.mark.parametrize("softmax", [True, False])
def test_scores_are_capped_in_float32_where_either_flag_has_them_in_it(product, softmax):
  """tanh is computed in float32 if the product of queries and keys or the softmax is."""
  precision = Precision(dtype="bfloat16", float32_qk_product=product, float32_logits=softmax)
  x = jnp.ones(3, "float32" if product else "bfloat16")
  (tanh,) = named(lambda x: softmax_scores(x, precision, 5.0), x, name="tanh")
  assert str(tanh.outvars[0].aval.dtype) == ("float32" if product or softmax else "bfloat16")
  assert softmax_scores(x, precision, 5.0).dtype == ("float32" if softmax else "bfloat16")
