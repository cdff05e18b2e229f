"""LoRA's factors: shapes and axes from nothing but the weight, and a start that changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.low_rank import Layout, LowRank, factors, merged
from maxtext_like.layers.param import Param, fan_in, init, stack
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.weight import product

OUTPUT = Param((2, 4, 5), ("heads", "head_dim", "embed"), "bfloat16", fan_in(0, 1))
EXPERTS = Param((3, 5, 7), ("expert", "embed", "mlp"), "float32", fan_in(1))


def described(p: Param) -> dict:
  return {name: (q.shape, q.axes, q.dtype, q.trainable) for name, q in factors(p, 6).items()}


def test_the_axes_that_are_summed_go_to_a_and_the_others_to_b():
  assert described(OUTPUT) == {
    "lora_a": ((2, 4, 6), ("heads", "head_dim", None), "float32", True),
    "lora_b": ((6, 5), (None, "embed"), "float32", True),
  }


def test_experts_have_factors_of_their_own():
  assert described(EXPERTS) == {
    "lora_a": ((3, 5, 6), ("expert", "embed", None), "float32", True),
    "lora_b": ((3, 6, 7), ("expert", None, "mlp"), "float32", True),
  }


def test_a_stack_has_the_factors_of_every_row():
  spec = factors(stack({"w": OUTPUT}, 9)["w"], 6)
  assert {name: (q.shape, q.axes[0], q.rows) for name, q in spec.items()} == {
    "lora_a": ((9, 2, 4, 6), "layers", 9),
    "lora_b": ((9, 6, 5), "layers", 9),
  }


def test_nothing_changes_at_the_start():
  drawn = init(factors(OUTPUT, 6), jax.random.key(0))
  assert not np.any(drawn["lora_b"])
  assert 0.2 < float(jnp.std(drawn["lora_a"])) < 0.5  # 8 inputs
  base = jnp.ones(OUTPUT.shape)
  np.testing.assert_array_equal(merged(base, drawn["lora_a"], drawn["lora_b"], Layout.of(OUTPUT), 2.0), base)


def test_what_multiplies_nothing_has_none():
  with pytest.raises(ValueError, match="multiplies nothing"):
    factors(Param((5,), ("embed",), contracts=()), 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_product_and_its_gradients_are_those_of_the_merged_weight(dtype):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
  w = LowRank(draw(*OUTPUT.shape), draw(2, 4, 6), draw(6, 5), Layout.of(OUTPUT), 0.5)
  x, g = draw(2, 3, 2, 4), draw(2, 3, 5)
  precision = Precision(dtype=dtype)
  plain = lambda w: merged(w.base, w.a, w.b, w.layout, w.scale)
  run = lambda precision, weight: product(precision, "BTNH,NHD->BTD", x, weight, float32=True).astype(jnp.float32)
  got, d_got = jax.value_and_grad(lambda w: jnp.vdot(run(precision, w), g))(w)
  want, d_want = jax.value_and_grad(lambda w: jnp.vdot(run(Precision(dtype="float32"), plain(w)), g))(w)
  tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
  np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
  for name in ("base", "a", "b"):
    a, b = getattr(d_got, name), getattr(d_want, name)
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=tolerance * float(jnp.max(jnp.abs(b))))


def test_an_addition_on_an_addition():
  """A base may itself be no plain array."""
  rng = np.random.default_rng(1)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  inner = LowRank(draw(*EXPERTS.shape), draw(3, 5, 2), draw(3, 2, 7), Layout.of(EXPERTS), 1.0)
  outer = LowRank(inner, draw(3, 5, 4), draw(3, 4, 7), Layout.of(EXPERTS), 2.0)
  both = merged(merged(inner.base, inner.a, inner.b, inner.layout, 1.0), outer.a, outer.b, outer.layout, 2.0)
  x, exact = draw(3, 4, 5), dataclasses.replace(Precision(), dtype="float32")
  got = product(exact, "EXD,EDF->EXF", x, outer)
  np.testing.assert_allclose(got, jnp.einsum("EXD,EDF->EXF", x, both), rtol=1e-4, atol=1e-4)
