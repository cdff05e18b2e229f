"""Tests low-rank adapters (LoRA and DoRA): shapes and axes of the factors follow from the weight, and initial factors do not
change results. Products and gradients equal those of the merged weight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers import partition
from maxtext_like.layers.dropout import Dropout, row_keys
from maxtext_like.layers.param import Param, fan_in, init, stack
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.quantization.low_rank import Layout, LowRank, factors, merged
from maxtext_like.layers.quantization.quantized import FORMS, Quantized, quantize
from maxtext_like.layers.weight import Groups, lookup, product

QUERY = Param((8, 2, 4), ("embed", "heads", "head_dim"), "bfloat16", fan_in(0))
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
  assert 0.2 < float(jnp.std(drawn["lora_a"])) < 0.5  # there are 8 inputs
  base = jnp.ones(OUTPUT.shape)
  np.testing.assert_array_equal(merged(base, drawn["lora_a"], drawn["lora_b"], Layout.of(OUTPUT), 2.0), base)


def test_what_multiplies_nothing_has_none():
  """A parameter that is not used in products, such as the scale of a norm, cannot have an adapter."""
  with pytest.raises(ValueError, match=r"embed.*low-rank adapter"):
    factors(Param((5,), ("embed",), contracts=()), 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_product_and_its_gradients_are_those_of_the_merged_weight(dtype):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
  w = LowRank(draw(*OUTPUT.shape), draw(2, 4, 6), draw(6, 5), Layout.of(OUTPUT), 0.5)
  x, g = draw(2, 3, 2, 4), draw(2, 3, 5)
  precision = Precision(dtype=dtype)
  plain = lambda w: merged(w.base, w.a, w.b, w.layout, w.scale)
  run = lambda precision, weight: product(precision, "BTNH,NHD->BTD", x, weight, out="float32").astype(jnp.float32)
  got, d_got = jax.value_and_grad(lambda w: jnp.vdot(run(precision, w), g))(w)
  want, d_want = jax.value_and_grad(lambda w: jnp.vdot(run(Precision(dtype="float32"), plain(w)), g))(w)
  tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
  np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
  for name in ("base", "a", "b"):
    a, b = getattr(d_got, name), getattr(d_want, name)
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=tolerance * float(jnp.max(jnp.abs(b))))


def test_on_one_gpu_the_gradients_of_an_addition_come_as_soon_as_they_can(monkeypatch):
  """On one GPU, a barrier for each factor makes XLA compute the gradients of the factor and of its input together. Without it,
  XLA delays the gradient and keeps its inputs in memory. Results must not change by a bit."""
  x, w = jax.random.normal(jax.random.key(0), (2, 3, 5)), jax.random.normal(jax.random.key(1), (5, 7))
  a, b = jax.random.normal(jax.random.key(2), (5, 2)), jax.random.normal(jax.random.key(3), (2, 7))
  layout = Layout.of(Param(w.shape, ("embed", "mlp"), "float32", fan_in(0)))

  def gradients(x, a, b):
    out = lambda x, a, b: product(Precision(dtype="float32"), "BSD,DF->BSF", x, LowRank(w, a, b, layout, 2.0))
    return jax.grad(lambda *given: jnp.sum(out(*given) ** 2), argnums=(0, 1, 2))(x, a, b)

  plain = gradients(x, a, b)
  barriers = lambda: str(jax.make_jaxpr(lambda *given: gradients(*given))(x, a, b)).count("optimization_barrier")
  assert barriers() == 0
  monkeypatch.setattr(partition, "on_gpu", lambda: True)
  assert barriers() == 2
  for one, other in zip(plain, gradients(x, a, b), strict=True):
    np.testing.assert_array_equal(one, other)


def test_an_addition_on_an_addition():
  """The base of an adapter may be a ``Weight`` too, such as another adapter."""
  rng = np.random.default_rng(1)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  inner = LowRank(draw(*EXPERTS.shape), draw(3, 5, 2), draw(3, 2, 7), Layout.of(EXPERTS), 1.0)
  outer = LowRank(inner, draw(3, 5, 4), draw(3, 4, 7), Layout.of(EXPERTS), 2.0)
  both = merged(merged(inner.base, inner.a, inner.b, inner.layout, 1.0), outer.a, outer.b, outer.layout, 2.0)
  x, exact = draw(3, 4, 5), dataclasses.replace(Precision(), dtype="float32")
  got = product(exact, "EXD,EDF->EXF", x, outer)
  np.testing.assert_allclose(got, jnp.einsum("EXD,EDF->EXF", x, both), rtol=1e-4, atol=1e-4)


def magnitudes(p: Param, seed: int = 2) -> LowRank:
  """Return a DoRA weight with random factors and random magnitudes, which differ from the norms of its outputs."""
  rng, spec = np.random.default_rng(seed), factors(p, 3, dora=True)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)
  a, b, magnitude = (draw(*spec[f"lora_{name}"].shape) for name in ("a", "b", "magnitude"))
  return LowRank(draw(*p.shape), a, b, Layout.of(p), 0.7, 1 + jnp.abs(magnitude))


def exact_weight(w: LowRank) -> jax.Array:
  assert w.magnitude is not None
  total = merged(w.base, w.a, w.b, w.layout, w.scale)
  norms = jnp.sqrt(jnp.sum(jnp.square(total), axis=w.layout.summed, keepdims=True))
  return total / jax.lax.stop_gradient(norms) * jnp.expand_dims(w.magnitude, w.layout.summed)


@pytest.mark.parametrize(
  ("p", "equation", "x"),
  [(QUERY, "BTD,DNH->BTNH", (2, 3, 8)), (OUTPUT, "BTNH,NHD->BTD", (2, 3, 2, 4)), (EXPERTS, "EXD,EDF->EXF", (3, 4, 5))],
)
def test_dora_is_the_weight_whose_outputs_have_the_magnitudes(p, equation, x):
  w, x = magnitudes(p), jnp.asarray(np.random.default_rng(3).normal(size=x), jnp.float32)
  exact = Precision(dtype="float32", matmul_precision="highest")
  run = lambda plain: lambda w: jnp.sum(jnp.sin(product(exact, equation, x, exact_weight(w) if plain else w)))
  (got, d_got), (want, d_want) = (jax.jit(jax.value_and_grad(run(plain)))(w) for plain in (False, True))
  np.testing.assert_allclose(got, want, rtol=1e-5)
  for name in ("base", "a", "b", "magnitude"):
    assert float(jnp.max(jnp.abs(getattr(d_want, name)))) > 1e-2
    np.testing.assert_allclose(getattr(d_got, name), getattr(d_want, name), atol=2e-5, err_msg=name)
  assert w.magnitude is not None
  whole = merged(w.base, w.a, w.b, w.layout, w.scale, w.magnitude)
  np.testing.assert_allclose(whole, exact_weight(w), atol=1e-6)
  norms = jnp.sqrt(jnp.sum(jnp.square(whole), axis=w.layout.summed))
  np.testing.assert_allclose(norms, w.magnitude, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("p", [QUERY, OUTPUT, EXPERTS])
def test_norms_in_sixteen_bits(p, dtype):
  w = magnitudes(p)
  got, exact = (jax.jit(lambda w, d=d: w.norms(dataclasses.replace(Precision(), dtype=d)))(w) for d in (dtype, "float32"))
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, exact, rtol=2e-2)


def test_dora_of_rows_sorted_by_expert():
  w, x = magnitudes(EXPERTS), jnp.asarray(np.random.default_rng(3).normal(size=(8, 5)), jnp.float32)
  exact, groups = Precision(dtype="float32", matmul_precision="highest"), Groups(jnp.array([3, 0, 5], jnp.int32))
  got = product(exact, "MD,EDF->MF", x, w, groups=groups)
  np.testing.assert_allclose(got, product(exact, "MD,EDF->MF", x, exact_weight(w), groups=groups), atol=2e-5)


@pytest.mark.parametrize(("dtype", "scale"), [("float16", 2.0**24), ("float16", 2.0**-30), ("bfloat16", 2.0**-30)])
@pytest.mark.slow
def test_factors_of_experts_whose_sums_are_handed_on_keep_the_range_of_their_gradients(dtype, scale):
  """The loss scale may make gradients larger than float16 can represent, and gradients of rare tokens may be smaller than it
  can represent."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  w = LowRank(draw(*EXPERTS.shape).astype(dtype), draw(3, 5, 6), draw(3, 6, 7), Layout.of(EXPERTS), 0.5)
  x, g, groups = draw(8, 5).astype(dtype), draw(8, 7), Groups(jnp.array([3, 0, 5], jnp.int32), "tiles")
  loss = lambda precision, scale: (
    lambda w: scale * jnp.vdot(product(precision, "MD,EDF->MF", x.astype(precision.dtype), w, groups=groups, out="float32"), g)
  )
  got = jax.grad(loss(Precision(dtype=dtype), scale))(w)
  want = jax.grad(loss(Precision(dtype="float32", matmul_precision="highest"), 1.0))(w)
  for name in ("a", "b"):
    exact = getattr(want, name)
    np.testing.assert_allclose(getattr(got, name) / scale, exact, atol=1e-5 * float(jnp.max(jnp.abs(exact))))


@pytest.mark.parametrize("summed", [0, 1])
@pytest.mark.slow
def test_dora_of_a_table(summed):
  w = magnitudes(Param((9, 4), ("vocab", "embed"), contracts=(summed,)))
  index = jnp.array([[3, 0], [8, 3]])
  np.testing.assert_allclose(lookup(Precision(dtype="float32"), w, index), exact_weight(w)[index], atol=1e-5)


def test_dora_begins_with_the_weight_as_it_is():
  """With initial factors, the product of a DoRA weight equals that of its base to the bit. Here the base is quantized, and one
  of its outputs is zero."""
  x = jnp.asarray(np.random.default_rng(4).normal(size=EXPERTS.shape), jnp.float32).at[1, :, 2].set(0)
  precision = Precision(dtype="bfloat16")
  base = Quantized(quantize(FORMS["int8"], EXPERTS, x), FORMS["int8"], EXPERTS)
  drawn = init(factors(EXPERTS, 3), jax.random.key(0))
  w = LowRank(base, drawn["lora_a"], drawn["lora_b"], Layout.of(EXPERTS), 1.0)
  w = dataclasses.replace(w, magnitude=jax.jit(lambda w: w.norms(precision))(w))
  rows = jnp.asarray(np.random.default_rng(5).normal(size=(3, 4, 5)), jnp.bfloat16)
  run = lambda w: np.asarray(jax.jit(lambda w: product(precision, "EXD,EDF->EXF", rows, w))(w), np.float32)
  np.testing.assert_array_equal(run(w), run(base))


@pytest.mark.slow
def test_dropout_is_of_the_addition_s_input_alone():
  w = magnitudes(OUTPUT)
  w = dataclasses.replace(w, magnitude=None, dropout=Dropout(row_keys(0, jnp.array(0), 2), 0.25))
  x, exact = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 2, 4)), jnp.float32), Precision(dtype="float32")
  assert w.dropout is not None
  dropped = w.dropout(x) / 0.75
  zeros = float(jnp.mean(dropped == 0))
  assert 0.05 < zeros < 0.6
  want = jnp.einsum("BTNH,NHD->BTD", x, w.base) + 0.7 * jnp.einsum("BTNH,NHR,RD->BTD", dropped, w.a, w.b)
  np.testing.assert_allclose(product(exact, "BTNH,NHD->BTD", x, w), want, atol=1e-5)
