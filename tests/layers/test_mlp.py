"""Tests the gated MLP against float64: exact results and counts at the limits of float16, and no additional work in
bfloat16."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations, named
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from written_out import gelu, silu, tree64

from maxtext_like.layers.context import Context
from maxtext_like.layers.mlp import (
  FLOAT16_SAFE_MAX,
  MLP,
  MLPConfig,
  activate,
  float16_gated_product,
  gated_product,
  gated_product_at_once,
)
from maxtext_like.layers.precision import Precision

D, F = 5, 7
X = np.random.default_rng(0).normal(size=(2, 3, D))
CFG = MLPConfig(emb_dim=D, mlp_dim=F)


def params(random_params, factor=1.0):
  p = random_params(MLP(CFG, Precision(dtype="float32")).params())
  return {name: w * factor for name, w in p.items()}


def written(p, x, activation=gelu):
  return (activation(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def counted(layer, p, x):
  """Return the output, and the number of clamped values."""
  ctx = Context.of(x).collecting()
  return layer(p, x, ctx), ctx.aux["clamped"]


def forward(precision, p, x=X, activation: Any = "gelu"):
  layer = MLP(MLPConfig(emb_dim=D, mlp_dim=F, activation=activation), precision)
  return jax.jit(lambda p, x: counted(layer, p, x))(p, jnp.asarray(x, jnp.float32))


@pytest.mark.parametrize(("activation", "formula"), [("gelu", gelu), ("silu", silu)])
def test_against_float64(activation, formula, random_params):
  p = params(random_params)
  out, clamped = forward(Precision(dtype="float32"), p, activation=activation)
  np.testing.assert_allclose(out, written(tree64(p), X, formula), atol=2e-6)
  assert clamped == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float16_clamp_changes_no_instruction_of_other_dtypes(dtype, random_params):
  p = params(random_params)

  def text(clamp):
    layer = MLP(CFG, Precision(dtype=dtype, float16_clamp=clamp))
    gradient = jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(layer.standalone(p, x))))
    return gradient.lower(p, jnp.asarray(X, jnp.float32)).as_text()

  assert text(True) == text(False)


@pytest.mark.parametrize(
  ("dtype", "flag", "expected"),
  [
    ("bfloat16", "auto", "bfloat16"),
    ("bfloat16", True, "float32"),
    ("bfloat16", False, "bfloat16"),
    ("float16", "auto", "float32"),
    ("float16", True, "float32"),
    ("float16", False, "float16"),
    ("float32", True, "float32"),
    ("float32", False, "float32"),
  ],
)
def test_dtype_of_the_product_and_the_activation(dtype, flag, expected, random_params):
  layer = MLP(CFG, Precision(dtype=dtype, float32_gate_product=flag))
  found = list(equations(layer.standalone, params(random_params), jnp.asarray(X, jnp.float32)))
  # The activation is always computed in float32, because bfloat16 would leave 8 bits of its sigmoid.
  assert {str(e.outvars[0].aval.dtype) for e in found if e.primitive.name == "logistic"} == {"float32"}
  activations = [e for e in found if "custom_vjp" in e.primitive.name and "logistic" in str(e.params)]
  assert {str(e.outvars[0].aval.dtype) for e in activations} == {expected}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("flag", ["auto", True, False])
def test_low_precision_is_near_float64(dtype, flag, random_params):
  p = params(random_params)
  out, clamped = forward(Precision(dtype=dtype, float32_gate_product=flag), p)
  exact = written(tree64(p), X)
  tolerance = {"bfloat16": 3e-2, "float16": 3e-3}[dtype]
  np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=tolerance * np.abs(exact).max())
  assert out.dtype == ("float32" if dtype == "float16" else dtype)
  assert clamped == 0


# --- values beyond the range of float16 ---

KEPT, PLAIN = Precision(dtype="float16"), Precision(dtype="float16", float32_gate_product=False)


def gradients(precision, p, x):
  layer = MLP(CFG, precision)

  def loss(p, x):
    out, clamped = counted(layer, p, x)
    return jnp.sum(jnp.tanh(out / 1e6)), clamped

  run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
  (value, clamped), g = run(p, jnp.asarray(x, jnp.float32))
  assert jnp.isfinite(value)
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(g))
  return int(clamped)


def test_a_product_beyond_float16_is_exact_to_float16_s_own_rounding(random_params):
  """gate * up is near 1e7. It is divided by a power of two before the last product and multiplied by it afterwards, so no value
  is clamped."""
  p = params(random_params, 30.0)
  x = X * 60
  out, clamped = forward(KEPT, p, x)
  exact = written(tree64({n: w.astype(jnp.float16) for n, w in p.items()}), x.astype(np.float16).astype(np.float64))
  hidden = gelu(x @ tree64(p)["gate"]) * (x @ tree64(p)["up"])
  assert np.abs(hidden).max() > 20 * FLOAT16_SAFE_MAX
  np.testing.assert_allclose(out, exact, atol=2e-3 * np.abs(exact).max())
  assert clamped == 0
  assert gradients(KEPT, p, x) == 0


def test_an_output_beyond_float16_is_kept_too(random_params):
  """The hidden values fit float16, but their sum does not."""
  p = params(random_params) | {"down": jnp.full((F, D), 3000.0)}
  x = np.abs(X) * 20
  p["gate"], p["up"] = jnp.abs(p["gate"]), jnp.abs(p["up"])
  out, clamped = forward(KEPT, p, x)
  exact = written(tree64(p), x)
  assert exact.max() > 65504
  np.testing.assert_allclose(out, exact, rtol=3e-3)
  assert clamped == 0
  assert gradients(KEPT, p, x) == 0


def test_without_the_float32_product_the_clamp_clips_and_counts(random_params):
  p = params(random_params, 30.0)
  out, clamped = forward(PLAIN, p, X * 60)
  assert jnp.isfinite(out).all()
  gate = (X * 60) @ tree64(p)["gate"]
  hidden = gelu(gate) * ((X * 60) @ tree64(p)["up"])
  assert clamped == np.sum(np.abs(hidden) > FLOAT16_SAFE_MAX) > 0
  assert gradients(PLAIN, p, X * 60) == clamped


def test_gate_and_up_beyond_float16_are_neutralised_before_the_activation(random_params):
  """The gate is infinite in float16. Clamping it after the activation would make the gradient NaN."""
  p = params(random_params, 3000.0)
  assert gradients(PLAIN, p, X * 60) > 0
  unclamped = Precision(dtype="float16", float32_gate_product=False, float16_clamp=False)
  assert not jnp.isfinite(forward(unclamped, p, X * 60)[0]).all()


BAD = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["gate", "up"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_bad_number_becomes_zero_with_zero_gradient_and_is_counted(bad, where, dtype):
  good = {"gate": np.array([[1.0, 2.0, -3.0]]), "up": np.array([[4.0, 5.0, 6.0]])}
  values = {name: a.copy() for name, a in good.items()}
  values[where][0, 1] = BAD[bad]

  def product(gate, up):
    hidden, unit, clamped = float16_gated_product(gate, up, "gelu", KEPT)
    return jnp.sum(hidden.astype(jnp.float32) * unit), (hidden, unit, clamped)

  run = jax.jit(jax.grad(product, (0, 1), has_aux=True))
  gradients, (hidden, unit, clamped) = run(*(jnp.asarray(values[name], dtype) for name in ("gate", "up")))
  expected = gelu(good["gate"]) * good["up"]
  expected[0, 1] = 0
  np.testing.assert_allclose(hidden.astype(jnp.float32), expected, rtol=2e-3)
  assert clamped == 1
  assert unit == 1
  for g in gradients:
    assert jnp.isfinite(g).all()
    assert g[0, 1] == 0
    assert (np.asarray(g)[0, [0, 2]] != 0).any()


def test_the_activation_s_float16_gradient_is_finite_up_to_the_largest_number():
  gate = jnp.asarray([40.0, 42.0, -42.0, 3000.0, -3000.0, 65504.0, -65504.0], jnp.float16)
  activations: tuple[Any, ...] = ("gelu", "silu")
  for activation in activations:
    gradient = jax.jit(jax.grad(lambda g, a=activation: jnp.sum(jnp.asarray(activate(g, a), jnp.float32))))(gate)
    np.testing.assert_array_equal(gradient, [1, 1, 0, 1, 0, 1, 0])


@pytest.mark.parametrize("peak", [65279.0, 65280.0, 65281.0, 65280.0 * 2, 65280.0 * 2 + 64, 1e9, 1e30])
def test_a_row_is_divided_by_the_smallest_power_of_two_that_fits(peak):
  """silu returns a large gate unchanged, so the exact product is known."""
  gate = jnp.asarray([[100.0, 50.0], [100.0, 50.0]])
  up = jnp.asarray([[peak / 100, peak / 128], [1.0, 2.0]])
  run: Any = jax.jit(lambda g, u: float16_gated_product(g, u, "silu", KEPT))
  hidden, unit, clamped = run(gate, up)
  largest = float(jnp.float32(100) * jnp.float32(peak / 100))
  exponent = max(0, int(np.ceil(np.log2(largest / FLOAT16_SAFE_MAX))))
  assert unit[:, 0].tolist() == [2.0**exponent, 1.0]
  np.testing.assert_allclose(hidden[0].astype(jnp.float32) * unit[0], [peak, peak * 50 / 128], rtol=5e-4)
  np.testing.assert_array_equal(hidden[1], [100.0, 100.0])
  assert clamped == 0


def test_without_clamp_a_bad_number_is_left_to_be_seen():
  off = Precision(dtype="float16", float16_clamp=False)
  hidden, _, clamped = float16_gated_product(jnp.asarray([[jnp.nan, 1.0]]), jnp.asarray([[1.0, 1.0]]), "gelu", off)
  assert jnp.isnan(hidden).any()
  assert clamped == 0


def test_an_output_that_is_still_infinite_becomes_zero_and_is_counted(random_params):
  """The weights are above 65504, so they are infinite in float16."""
  p = params(random_params) | {"down": jnp.full((F, D), 1e5)}
  out, clamped = forward(KEPT, p)
  assert (out == 0).all()
  assert clamped == out.size


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_the_activation_keeps_its_digits_at_negative_gates(activation: Any):
  """1 + tanh would lose all digits there. A norm after a narrow product would amplify this error."""
  x = np.linspace(-6, 6, 241)
  exact = {"gelu": gelu, "silu": silu}[activation](x)
  got = np.asarray(activate(jnp.asarray(x, jnp.float32), activation), np.float64)
  nonzero = x != 0
  assert np.max(np.abs(got / np.where(nonzero, exact, 1) - 1)[nonzero]) < 3e-5
  rounded = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
  got = np.asarray(activate(jnp.asarray(x, jnp.bfloat16), activation), np.float64)
  exact = {"gelu": gelu, "silu": silu}[activation](rounded)
  np.testing.assert_allclose(got, exact, rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_the_activation_s_gradient(activation: Any):
  x = np.linspace(-9, 9, 61)
  exact = {"gelu": gelu, "silu": silu}[activation]
  slope = (exact(x + 1e-6) - exact(x - 1e-6)) / 2e-6
  got = jax.vmap(jax.grad(lambda t: activate(t, activation)))(jnp.asarray(x, jnp.float32))
  np.testing.assert_allclose(got, slope, atol=2e-6)
  far = jax.vmap(jax.grad(lambda t: activate(t, activation)))(jnp.asarray([-3e38, -1e15, 1e15, 3e38], jnp.float32))
  np.testing.assert_array_equal(far, [0, 0, 1, 1])


@pytest.mark.parametrize("kept_apart", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_gradients_that_one_kernel_makes_are_the_same_to_the_bit(activation: Any, dtype, kept_apart):
  """``gated_product_at_once`` lets one GPU kernel compute both gradients. Its results equal those of ``gated_product`` to the
  bit."""
  rng = np.random.default_rng(0)
  gate, up, g = (jnp.asarray(rng.normal(size=(3, F)) * 4, dtype) for _ in range(3))
  ways = functools.partial(gated_product, activation), functools.partial(gated_product_at_once, activation, kept_apart)
  both = [jax.vjp(of, gate, up) for of in ways]
  (plain, pull), (at_once, pull_at_once) = both
  for a, b in zip((plain, *pull(g)), (at_once, *pull_at_once(g)), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("platform", "reads_together"), [("gpu", 1), ("tpu", 0), ("cpu", 0)])
def test_on_gpus_alone_gate_up_and_the_cotangent_are_read_together(platform, reads_together, random_params):
  """On GPUs, an optimization barrier makes XLA compute both gradients in one kernel. Other platforms need no barrier."""
  layer = MLP(CFG, Precision(dtype="bfloat16"))
  mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("any", 1, platform))
  loss = lambda p: jnp.sum(layer.standalone(p, jnp.asarray(X, jnp.bfloat16)).astype(jnp.float32))
  with jax.sharding.use_abstract_mesh(mesh):
    found = named(jax.grad(loss), random_params(layer.params()), name="optimization_barrier")
  assert len(found) == reads_together
