"""Tests products in float8 against the same rounding in numpy's float64, and where ``matmul_dtype`` has an effect."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from equations import dtypes, named
from jax.ad_checkpoint import print_saved_residuals

from maxtext_like.layers.context import Context
from maxtext_like.layers.mlp import MLP, MLPConfig
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.quantization import float8
from maxtext_like.layers.quantization.low_rank import Layout, LowRank
from maxtext_like.layers.remat import remat
from maxtext_like.layers.weight import Groups, product
from tests.layers.conftest import FAMILIES
from tests.tiers import slow, tiers

RNG = np.random.default_rng(0)
LIMITS = {float8.NUMBERS: 448.0, float8.GRADIENTS: 57344.0}
SPECS = [
  ("BTD,DF->BTF", [(2, 3, 37), (37, 7)]),
  ("BTD,DNH->BTNH", [(2, 3, 37), (37, 2, 5)]),
  ("BTNH,NHD->BTD", [(2, 3, 2, 5), (2, 5, 7)]),
  ("EXD,EDF->EXF", [(3, 5, 11), (3, 11, 7)]),
]


def quantized(x, dtype: str) -> np.ndarray:
  """Return the float8 values of x times their scale, in float64: x is divided by the smallest sufficient power of two, rounded,
  and scaled back."""
  x = np.asarray(x, np.float64)
  scale = 2.0 ** math.ceil(math.log2(np.abs(x).max() / LIMITS[dtype]))
  return (x / scale).astype(np.float32).astype(getattr(ml_dtypes, dtype)).astype(np.float64) * scale


def draw(*shape: int, dtype: str = "bfloat16", scale: float = 1.0) -> jax.Array:
  return jnp.asarray(scale * RNG.normal(size=shape), dtype)


def vjp(spec: str, precision: Precision, x, y, g, **how: Any):
  out, pull = jax.vjp(lambda x, y: precision.einsum(spec, x, y, large=True, **how), x, y)
  return out, *pull(g.astype(out.dtype))


def norm_error(got, exact) -> float:
  return float(np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
  "x", [[448.0, -1.3, 0.01], [449.0, 1e-6, 0.0], [1e-30, -3e-31, 0.0], [3e38, 1.0, -1e37], [-0.3, 0.2, 0.1]]
)
def test_a_tensor_is_divided_by_the_least_power_of_two_that_brings_it_within_the_format(x, dtype):
  values, scale = float8.scaled(jnp.asarray(x, jnp.float32), dtype)
  scale = float(scale)
  assert math.frexp(scale)[0] == 0.5
  largest = max(map(abs, x)) / scale
  assert LIMITS[dtype] / 2 < largest <= LIMITS[dtype]
  np.testing.assert_array_equal(np.asarray(values).astype(np.float64) * scale, quantized(np.asarray(x, np.float32), dtype))


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("x", [[0.0, -0.0], [1e-45, 0.0]])
def test_zeros_and_what_float32_scarcely_holds_are_zeros(x, dtype):
  """Tensors of zeros, and of the smallest float32 numbers, become zeros. Their scale must still be positive."""
  values, scale = float8.scaled(jnp.asarray(x, jnp.float32), dtype)
  assert not np.asarray(values).astype(np.float32).any()
  assert 0 < float(scale) < 1e-37


def test_the_rounding_of_a_number_does_not_depend_on_the_rest_of_the_tensor():
  """A large number in the tensor changes the scale, but not the rounding of other numbers, unless they are tiny. If it did,
  rows of a batch, microbatches, devices and generated tokens would influence each other."""
  x = draw(64)
  alone = float8.scaled(x, float8.NUMBERS)
  beside = float8.scaled(jnp.concatenate([x, jnp.asarray([31.0], x.dtype)]), float8.NUMBERS)
  assert float(beside.scale) > 4 * float(alone.scale)
  back = lambda s: np.asarray(s.values).astype(np.float64)[:64] * float(s.scale)
  big = np.abs(np.asarray(x, np.float64)) > 31 / 2**14
  np.testing.assert_array_equal(back(alone)[big], back(beside)[big])


@pytest.mark.parametrize(
  ("dtype", "jitted"), [("bfloat16", False), slow("bfloat16", True), slow("float32", True), ("float16", True)]
)
@pytest.mark.parametrize(("spec", "shapes"), SPECS, ids=[s[0] for s in SPECS])
def test_product_and_gradients_are_those_of_the_rounded_numbers(spec, shapes, dtype, jitted):
  x, y = draw(*shapes[0], dtype=dtype), draw(*shapes[1], dtype=dtype, scale=0.02)
  exact = lambda s, a, b: np.einsum(s, a, b)
  x8, y8 = quantized(x, float8.NUMBERS), quantized(y, float8.NUMBERS)
  g = draw(*exact(spec, x8, y8).shape, dtype=dtype, scale=1e-3)
  g8 = quantized(g, float8.GRADIENTS)
  operands, result = spec.split("->")
  x_axes, y_axes = operands.split(",")
  want = exact(spec, x8, y8), exact(f"{result},{y_axes}->{x_axes}", g8, y8), exact(f"{result},{x_axes}->{y_axes}", g8, x8)
  precision = Precision(dtype=dtype, matmul_dtype="float8")  # type: ignore[arg-type]
  run = lambda x, y, g: vjp(spec, precision, x, y, g)
  got = (jax.jit(run) if jitted else run)(x, y, g)
  # The result is rounded once to the dtype. In float16 some results are subnormal.
  tolerance = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-10}[dtype]
  for a, b in zip(got, want, strict=True):
    assert a.dtype == dtype
    np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=tolerance, atol=tolerance * np.abs(b).max())


def test_a_float32_result_is_not_rounded_to_the_dtype():
  x, y = draw(3, 37), draw(37, 5)
  out = Precision(matmul_dtype="float8").einsum("BD,DF->BF", x, y, large=True, out="float32")
  assert out.dtype == jnp.float32
  np.testing.assert_allclose(out, quantized(x, float8.NUMBERS) @ quantized(y, float8.NUMBERS), rtol=1e-6, atol=1e-6)


def test_errors_are_of_the_size_that_the_formats_have():
  """The error is relative to the norm. Rounding to e4m3 has a maximum error of 2^-4 and an rms of 2.6 %. For e5m2 both are
  twice that."""
  x, y, g = draw(64, 512), draw(512, 96, scale=0.02), draw(64, 96, scale=1e-3)
  f64 = lambda a: np.asarray(a, np.float64)
  out, dx, dy = vjp("BD,DF->BF", Precision(matmul_dtype="float8"), x, y, g)
  errors = [norm_error(out, f64(x) @ f64(y)), norm_error(dx, f64(g) @ f64(y).T), norm_error(dy, f64(x).T @ f64(g))]
  assert 0.03 < errors[0] < 0.045
  assert all(0.05 < e < 0.07 for e in errors[1:])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_its_own_sums_and_no_other(bad):
  """A NaN or an infinity makes only those sums non-finite that contain it. It must not change the scale of the tensor."""
  x, y, g = draw(2, 3, 37), draw(37, 7), draw(2, 3, 7)
  run = jax.jit(lambda x, y, g: vjp("BTD,DF->BTF", Precision(matmul_dtype="float8"), x, y, g))
  clean = run(x, y, g)
  out, dx, dy = run(x.at[1, 2, 5].set(bad), y, g)
  assert not np.isfinite(np.asarray(out, np.float32)[1, 2]).any()
  rest = np.ones((2, 3), bool)
  rest[1, 2] = False
  np.testing.assert_array_equal(np.asarray(out)[rest], np.asarray(clean[0])[rest])
  assert np.isfinite(np.asarray(dx, np.float32)).all()
  assert not np.isfinite(np.asarray(dy, np.float32)[5]).any()
  out, dx, dy = run(x, y.at[5, 3].set(bad), g)
  assert not np.isfinite(np.asarray(out, np.float32)[..., 3]).any()
  assert not np.isfinite(np.asarray(dx, np.float32)[..., 5]).any()
  assert np.isfinite(np.asarray(dy, np.float32)).all()
  out, dx, dy = run(x, y, g.at[1, 2, 3].set(bad))
  assert not np.isfinite(np.asarray(dx, np.float32)[1, 2]).any()
  assert not np.isfinite(np.asarray(dy, np.float32)[:, 3]).any()


def test_zeros_give_zeros():
  x, y = draw(3, 37), jnp.zeros((37, 5), jnp.bfloat16)
  for out in vjp("BD,DF->BF", Precision(matmul_dtype="float8"), x, y, jnp.zeros((3, 5))):
    assert not np.asarray(out, np.float32).any()


def test_forward_and_both_gradients_multiply_float8_numbers():
  mlp = MLP(MLPConfig(emb_dim=16, mlp_dim=24), Precision(matmul_dtype="float8"))
  p = {name: draw(*param.shape) for name, param in mlp.params().items()}
  step = lambda p, x: jax.vjp(lambda p, x: mlp(p, x, Context.of(x)), p, x)[1](jnp.ones((2, 3, 16), jnp.bfloat16))
  dots = [dtypes(dot) for dot in named(step, p, draw(2, 3, 16), name="dot_general")]
  assert sorted(dots) == sorted(
    3 * [(float8.NUMBERS, float8.NUMBERS, "bfloat16")]
    + 3 * [(float8.GRADIENTS, float8.NUMBERS, "bfloat16")]
    + 3 * [(float8.NUMBERS, float8.GRADIENTS, "bfloat16")]
  )


@pytest.mark.parametrize("policy", ["minimal", "save_mlp", "save_outputs"])
def test_a_policy_keeps_the_products_that_it_keeps_in_the_dtype(policy, capsys):
  """The backward pass never recomputes a product in float8 that it would not recompute in bfloat16."""
  kept = []
  for matmul_dtype in ("dtype", "float8"):
    mlp = MLP(MLPConfig(emb_dim=16, mlp_dim=24), Precision(matmul_dtype=matmul_dtype))  # type: ignore[arg-type]
    p = {name: draw(*param.shape) for name, param in mlp.params().items()}
    layer = remat(lambda p, x, mlp=mlp: jnp.sum(jnp.sin(mlp(p, jnp.cos(x), Context.of(x)))), policy, isolated=True)
    print_saved_residuals(layer, p, draw(2, 3, 16))
    lines = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    kept.append(sorted(line.split()[0] for line in lines))
  assert kept[0] == kept[1]
  assert kept[0]


def test_products_that_do_not_ask_for_it_stay_as_they_are():
  """Only products that are called with ``large=True`` use float8, and grouped products never do."""
  precision, x, w = Precision(matmul_dtype="float8"), draw(4, 8), draw(8, 6)
  (dot,) = named(lambda x, w: product(precision, "MD,DF->MF", x, w), x, w, name="dot_general")
  assert dtypes(dot) == ("bfloat16",) * 3
  groups = Groups(jnp.asarray([1, 3], jnp.int32))
  grouped = lambda p: product(p, "MD,EDF->MF", x, draw(2, 8, 6), groups=groups, large=True).dtype
  assert grouped(precision) == jnp.bfloat16  # no grouped kernel multiplies float8 numbers


def test_an_adapter_stays_in_its_dtype_beside_a_base_in_float8():
  x, base, a, b = draw(3, 37), draw(37, 5), draw(37, 2, dtype="float32"), draw(2, 5, dtype="float32")
  weight = LowRank(base, a, b, Layout(2, (0,), False), 0.5)
  run = lambda x, w: product(Precision(matmul_dtype="float8"), "BD,DF->BF", x, w, large=True)
  dots = [dtypes(dot)[:2] for dot in named(run, x, weight, name="dot_general")]
  assert sorted(dots) == sorted([("bfloat16",) * 2, ("bfloat16",) * 2, (float8.NUMBERS,) * 2])


def test_on_devices_it_is_what_it_is_on_one():
  """Scales are computed from complete tensors. The float32 partial sums of gradients are added as for other dtypes."""
  from jax.sharding import NamedSharding, PartitionSpec

  if jax.device_count() < 4:
    pytest.skip("needs 4 devices")
  mesh = jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4])
  x, y, g = draw(8, 3, 16), draw(16, 24), draw(8, 3, 24)
  run = lambda x, y, g: vjp("BTD,DF->BTF", Precision(matmul_dtype="float8"), x, y, g)
  alone = jax.jit(run)(x, y, g)
  rows, weight = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec("fsdp"))
  with jax.set_mesh(mesh):
    split = jax.jit(run)(jax.device_put(x, rows), jax.device_put(y, weight), jax.device_put(g, rows))
  for a, b in zip(split, alone, strict=True):
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=1e-2)


CASES = [(family, dtype) for family in FAMILIES for dtype in ("bfloat16", "float16")]
SOME = {("gemma4-moe", "bfloat16"), ("deepseek3.2", "float16")}
"""Together these cases have attention, latent attention, MLPs, and the experts of both routers. Products of per-layer inputs
are like those of an MLP."""


@pytest.mark.parametrize(("family", "dtype"), tiers(CASES, slow=SOME))
def test_every_family_has_finite_gradients_and_a_loss_near_that_of_its_dtype(family, dtype, tiny_decoder, random_params, batch):
  def gradients(**precision):
    decoder = tiny_decoder(family, precision={"dtype": dtype, **precision})
    p = random_params(decoder.params())
    loss = lambda p: jnp.mean(jnp.square(decoder(p, batch)[0].astype(jnp.float32)))
    return jax.jit(jax.value_and_grad(loss))(p)

  (loss, low), (exact, _) = gradients(matmul_dtype="float8"), gradients()
  assert abs(float(loss) / float(exact) - 1) < 0.1
  assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(low))


def test_a_layer_may_differ():
  assert Precision().in_layer(matmul_dtype="float8").matmul_dtype == "float8"
  assert dataclasses.replace(Precision(matmul_dtype="float8"), dtype="float32").matmul_dtype == "float8"
