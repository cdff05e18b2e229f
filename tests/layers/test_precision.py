"""Tests ``Precision.einsum``: the dtype of operands, accumulator and result, and the gradient of a float32 product."""

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from equations import dtypes, named
from jax.sharding import PartitionSpec

from maxtext_like.layers.norms import LayerNorm, NormConfig, RMSNorm
from maxtext_like.layers.precision import Precision

RNG = np.random.default_rng(0)
X, Y = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in [(2, 3, 5), (5, 7)])
LOW = ["bfloat16", "float16"]


def product(function):
  """Return the only matrix product of a function of X and Y."""
  (dot,) = named(function, X, Y, name="dot_general")
  return dot


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("out", [None, "float32"])
def test_operands_are_low_and_the_result_may_be_the_accumulator(dtype, out):
  einsum = Precision(dtype=dtype).einsum
  dot = product(lambda x, y: einsum("BTD,DF->BTF", x, y, out=out))
  assert dtypes(dot) == (dtype, dtype, out or dtype)


def test_in_float32_there_is_one_product_whatever_the_flags():
  einsum = Precision(dtype="float32").einsum
  options: list[dict[str, Any]] = [{}, {"out": "float32"}, {"unbounded": True}]
  texts = {str(jax.make_jaxpr(lambda x, y, kw=kw: einsum("BTD,DF->BTF", x, y, **kw))(X, Y)) for kw in options}
  assert len(texts) == 1


@pytest.mark.parametrize(("dtype", "expected"), [("float16", "float32"), ("bfloat16", "bfloat16")])
def test_an_unbounded_operand_is_not_rounded_to_float16(dtype, expected):
  einsum = Precision(dtype=dtype).einsum
  assert dtypes(product(lambda x, y: einsum("BTD,DF->BTF", x, y, unbounded=True))) == (expected,) * 3
  big = einsum("BTD,DF->BTF", X * 1e5, Y, unbounded=True)
  assert jnp.isfinite(big).all()


@pytest.mark.parametrize("dtype", LOW)
def test_a_float32_product_of_low_operands_is_exact(dtype):
  x, y = X.astype(dtype), Y.astype(dtype)
  got = Precision(dtype=dtype).einsum("BTD,DF->BTF", x, y, out="float32")
  np.testing.assert_allclose(got, np.asarray(x, np.float64) @ np.asarray(y, np.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1.5e-2), ("float16", 1e-3)])
@pytest.mark.parametrize(
  ("spec", "shapes"),
  [
    ("BTD,DF->BTF", [(2, 3, 5), (5, 7)]),
    ("BTKGH,BSKH->BKGTS", [(2, 3, 2, 3, 5), (2, 4, 2, 5)]),
    ("BTF,FD->BTD", [(2, 3, 5), (5, 7)]),
    ("BTNH,NHD->BTD", [(2, 3, 2, 5), (2, 5, 7)]),
  ],
)
def test_gradient_of_a_float32_product(dtype, tolerance, spec, shapes):
  x, y = (jnp.asarray(RNG.normal(size=s), dtype).astype(jnp.float32) for s in shapes)
  exact = jnp.einsum(spec, x, y)
  cotangent = jnp.asarray(RNG.normal(size=exact.shape), jnp.float32)
  low = Precision(dtype=dtype).einsum

  @jax.jit
  def gradients(x, y, g):
    plain, flagged = (lambda x, y: jnp.einsum(spec, x, y)), (lambda x, y: low(spec, x, y, out="float32"))
    return jax.vjp(flagged, x, y)[1](g), jax.vjp(plain, x, y)[1](g)

  for got, expected in zip(*gradients(x, y, cotangent), strict=True):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=tolerance * float(jnp.abs(expected).max()))


def test_a_large_cotangent_of_a_float16_product_is_not_rounded_to_float16():
  """The gradient is 1e6 * 1e-3 per term. The cotangent alone would be infinite in float16."""
  low = Precision(dtype="float16").einsum
  _, pull = jax.vjp(lambda x: low("BTD,DF->BTF", x, jnp.full((5, 7), 1e-3), out="float32"), X)
  (gradient,) = pull(jnp.full((2, 3, 7), 1e6))
  np.testing.assert_allclose(gradient, np.full((2, 3, 5), 7e3), rtol=2e-3)


@pytest.mark.parametrize(
  ("dtype", "residual_dtype", "expected"),
  [
    ("bfloat16", None, "bfloat16"),
    ("float32", None, "float32"),
    ("float16", None, "float32"),
    ("float16", "float16", "float16"),
    ("bfloat16", "float32", "float32"),
  ],
)
def test_residual_dtype(dtype, residual_dtype, expected):
  assert Precision(dtype=dtype, residual_dtype=residual_dtype).residual == expected


DECIDES: dict[str, Callable[[Precision], str]] = {
  "float32_qk_product": lambda p: p.qk_dtype,
  "float32_logits": lambda p: p.softmax_dtype,
  "indexer_float32_logits": lambda p: p.indexer_dtype,
  "float32_gate_product": lambda p: p.gate_dtype,
  "float32_vision_pool": lambda p: p.pool_dtype,
  "float32_gate_logits": lambda p: p.for_router.dtype,
  "float32_weight_sum": lambda p: p.for_weight_sum.dtype,
  "cast_logits_to_fp32": lambda p: p.logits_dtype,
  "logits_dot_in_fp32": lambda p: p.for_logits.dtype,
}


@pytest.mark.parametrize("dtype", ["float32", *LOW])
@pytest.mark.parametrize("key", DECIDES)
def test_each_flag_decides_one_dtype(key, dtype):
  off: dict[str, Any] = {"dtype": dtype, **dict.fromkeys(DECIDES, False)}
  on: dict[str, Any] = off | {key: True}
  flagged = {name: decides(Precision(**on)) for name, decides in DECIDES.items()}
  expected = dict.fromkeys(DECIDES, dtype) | {key: "float32"}
  if dtype == "float16":  # a sum over experts could overflow
    expected["float32_weight_sum"] = "float32"
  assert flagged == expected


def test_float16_keeps_outputs_and_gate_products_in_float32():
  half, wide = Precision(dtype="float16"), Precision(dtype="bfloat16")
  assert (half.branch_dtype, half.gate_dtype, half.expert_dtype) == ("float32",) * 3
  assert (wide.branch_dtype, wide.gate_dtype, wide.expert_dtype) == ("bfloat16",) * 3
  half = Precision(dtype="float16", float32_gate_product=False)
  assert (half.branch_dtype, half.gate_dtype, half.expert_dtype) == ("float32", "float16", "float32")
  wide = Precision(dtype="bfloat16", float32_gate_product=True)
  assert (wide.branch_dtype, wide.gate_dtype, wide.expert_dtype) == ("bfloat16", "float32", "float32")


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matmul_precision_reaches_the_product(dtype, precision):
  einsum = Precision(dtype=dtype, matmul_precision=precision).einsum
  dot = product(lambda x, y: einsum("BTD,DF->BTF", x, y, out="float32"))
  assert dot.params["precision"] == (jax.lax.Precision(precision),) * 2


@pytest.mark.parametrize(
  ("spec", "x_shape", "y_shape"),
  [
    ("BTD,DF->BTF", (2, 3, 64), (64, 5)),
    ("BTNH,NHD->BTD", (2, 3, 4, 6), (4, 6, 7)),
    ("BTKGH,BSKH->BKGTS", (2, 3, 2, 2, 16), (2, 5, 2, 16)),
  ],
)
def test_a_float32_product_is_within_the_bound_of_its_sum(spec, x_shape, y_shape):
  """Check the bound |error| <= n u sum |x| |y| for n terms in any order (Higham 1993), against float64. The program has one
  product for each precision."""
  x, y = (np.asarray(jax.random.normal(jax.random.key(i), shape)) for i, shape in enumerate((x_shape, y_shape)))
  exact, sizes = (np.einsum(spec, f(x).astype(np.float64), f(y).astype(np.float64)) for f in (np.asarray, np.abs))
  operands, result = spec.split("->")
  terms = math.prod(size for letter, size in zip(operands.split(",")[0], x_shape, strict=True) if letter not in result)
  for precision in ("default", "highest"):
    einsum = Precision(dtype="float32", matmul_precision=precision).einsum
    assert (np.abs(einsum(spec, jnp.asarray(x), jnp.asarray(y)) - exact) <= terms * 2.0**-24 * sizes).all()
    assert str(jax.make_jaxpr(einsum, static_argnums=0)(spec, x, y)).count("dot_general") == 1


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", *LOW])
def test_float8_operands_are_multiplied_exactly(stored, dtype):
  """bfloat16 and float16 represent every float8 number, and float32 represents the product of two of them."""
  x, y = X.astype(stored), Y.astype(stored)
  got = Precision(dtype=dtype).einsum("BTD,DF->BTF", x, y, out="float32")
  exact = np.einsum("BTD,DF->BTF", np.asarray(x, np.float64), np.asarray(y, np.float64))
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-6)
  gradient = jax.grad(lambda x: jnp.sum(Precision(dtype=dtype).einsum("BTD,DF->BTF", x, y, out="float32")))(x.astype(dtype))
  np.testing.assert_allclose(np.float32(gradient), np.broadcast_to(np.float32(y).sum(1), x.shape), rtol=1e-2)


@pytest.mark.parametrize("dtype", LOW)
def test_the_gradient_of_a_shared_operand_adds_up_inside_shard_map(dtype):
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  loss = lambda x, y: jnp.sum(jnp.sin(Precision(dtype=dtype).einsum("BTD,DF->BTF", x, y, out="float32")))
  parts = lambda x, y: jax.lax.psum(loss(x, y), "data")
  spread = jax.shard_map(parts, mesh=mesh, in_specs=(PartitionSpec("data"), PartitionSpec()), out_specs=PartitionSpec())
  got, want = (jax.grad(f, (0, 1))(X, Y) for f in (spread, loss))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


@pytest.mark.parametrize("dtype", ["float32", *LOW])
@pytest.mark.parametrize(
  ("spec", "shapes"),
  [("BTD,DF->BTF", [(2, 3, 5), (5, 7)]), ("BTNH,NHD->BTD", [(2, 3, 4, 5), (4, 5, 7)]), ("...D,VD->...V", [(2, 0, 3), (4, 3)])],
)
def test_on_one_cpu_the_leading_axes_are_one(dtype, spec, shapes):
  """On one CPU, products merge the leading axes of x into one axis, because XLA for CPUs would otherwise copy transposed
  operands. Results must not change."""
  einsum = lambda x, y: Precision(dtype=dtype).einsum(spec, x, y, out="float32")
  pull = lambda x, y: (einsum(x, y), *jax.grad(lambda x, y: jnp.sum(jnp.sin(einsum(x, y))), (0, 1))(x, y))
  x, y = (jnp.asarray(RNG.normal(size=s), dtype) for s in shapes)
  want = pull(x, y)
  with jax.set_mesh(jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))):
    got = jax.jit(pull)(x, y)
    ranks = [v.aval.ndim for dot in named(pull, x, y, name="dot_general") for v in dot.invars]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-2, atol=1e-2), got, want)
  # No operand of a product with a weight, or of its gradients, has two axes of rows. Summed axes are therefore never
  # transposed.
  assert max(ranks) <= len(shapes[0]) - 1


@pytest.mark.parametrize(
  ("axis", "reduction", "dtypes"),
  [
    # Forward, gradient of x, gradient of the weight: only rows are split.
    ("fsdp", "float32", ["bfloat16", "bfloat16", "float32"]),
    ("tensor", "float32", ["float32", "float32", "float32"]),
    ("tensor", "dtype", ["bfloat16", "bfloat16", "bfloat16"]),
    (None, "float32", ["bfloat16", "bfloat16", "bfloat16"]),
  ],
)
def test_sums_that_devices_share_are_handed_on_in_the_reduction_dtype(axis, reduction, dtypes):
  """If a product is a partial sum that is added over devices, its result has the ``reduction_dtype``. All other products return
  bfloat16."""
  precision = Precision(dtype="bfloat16", reduction_dtype=reduction)
  mesh = jax.sharding.AbstractMesh((2,), (axis or "fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

  def pull(x, w, g):
    y, back = jax.vjp(lambda x, w: precision.einsum("...D,DF->...F", x, w), x, w)
    return y, *back(g)

  shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((4, 3, 8), (8, 6), (4, 3, 6))]
  with jax.sharding.use_abstract_mesh(mesh) if axis else contextlib.nullcontext():
    found = jax.make_jaxpr(pull)(*shapes)
  assert [v.aval.dtype.name for v in found.jaxpr.outvars] == ["bfloat16"] * 3
  products = re.findall(r"(\w+)\[[\d,]*\] = dot_general", str(found))
  assert sorted(products) == sorted({"bfloat16": "bf16", "float32": "f32"}[d] for d in dtypes)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_gradient_of_what_all_rows_share_is_a_float32_sum_and_rounded_behind_it(stored):
  """Biases and the scales of norms are examples. A barrier stops compilers from rounding the partial sum of each device."""
  precision = Precision(dtype="bfloat16")
  mesh = jax.sharding.AbstractMesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  uses = {
    "bias": lambda p, x: precision.plus(x, p),
    "RMSNorm": lambda p, x: RMSNorm(NormConfig(dim=8), precision)({"scale": p}, x),
    "LayerNorm": lambda p, x: LayerNorm(NormConfig(dim=8), precision)({"scale": p, "bias": p}, x),
    "weight of a float32 product": lambda p, x: precision.exact.einsum("BTD,DF->BTF", x, p[:, None]),
  }
  x = jnp.asarray(RNG.normal(size=(2, 3, 8)), "bfloat16")
  p = jnp.asarray(RNG.normal(size=8), stored)
  for name, use in uses.items():
    gradient = jax.grad(lambda p, x, use=use: jnp.sum(use(p, x).astype(jnp.float32) ** 2))
    with jax.sharding.use_abstract_mesh(mesh):
      found = jax.make_jaxpr(gradient)(p, x)
    text = str(found)
    rounded = re.findall(r"bf16\[[\d,]*\] = convert_element_type\[[^\]]*\] (\w+)", text)
    barred = re.findall(r"(\w+):f32\[[\d,]*\] = optimization_barrier", text)
    assert bool(barred) == (stored == "bfloat16"), name
    assert set(barred) <= set(rounded), name
    np.testing.assert_array_equal(jax.extend.core.jaxpr_as_fun(found)(p, x)[0], gradient(p, x), err_msg=name)


@pytest.mark.parametrize(
  ("axes", "barred"), [(("fsdp",), 0), (("fsdp", "expert"), 0), (("data",), 1), (("fsdp", "context"), 2)]
)
def test_the_gradient_of_a_weight_is_rounded_behind_the_sum_where_it_is_added_up_whole(axes, barred):
  """In the last case a mesh axis may split heads or the hidden size. The gradient of x is then also a sum over devices, and is
  rounded after the addition too."""
  mesh = jax.sharding.AbstractMesh((2,) * len(axes), axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
  gradient = jax.grad(lambda w, x: jnp.sum(Precision(dtype="bfloat16").einsum("BTD,DF->BTF", x, w).astype(jnp.float32)))
  x, w = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((4, 3, 8), (8, 6)))
  with jax.sharding.use_abstract_mesh(mesh):
    assert str(jax.make_jaxpr(gradient)(w, x)).count("= optimization_barrier") == barred


@pytest.mark.slow
def test_a_large_table_s_gradient_is_made_in_parts(monkeypatch):
  precision = Precision(dtype="bfloat16")
  mesh = jax.sharding.AbstractMesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  x, table = (jnp.asarray(RNG.normal(size=s), jnp.bfloat16) for s in ((2, 3, 8), (12, 8)))
  gradient = jax.grad(lambda w, x: jnp.sum(precision.einsum("BTD,VD->BTV", x, w) ** 2))
  whole = gradient(table, x)
  monkeypatch.setattr("maxtext_like.layers.precision._TILE_BYTES", 12 * 8)  # a quarter of the gradient
  with jax.sharding.use_abstract_mesh(mesh):
    parts = jax.make_jaxpr(gradient)(table, x)
  np.testing.assert_array_equal(jax.extend.core.jaxpr_as_fun(parts)(table, x)[0], whole)
  assert re.findall(r"f32\[3,8\] = dot_general", str(parts))
  assert re.findall(r"length=(\d+)", str(parts)) == ["4"]
