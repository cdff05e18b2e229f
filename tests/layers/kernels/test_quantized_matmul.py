"""Tests the kernel for products of few rows with quantized weights, in the interpreter on the CPU, against dequantized
weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.kernels.quantized_matmul import MOST_ROWS, quantized_matmul
from maxtext_like.layers.param import Param, normal
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.quantization import quantized
from maxtext_like.layers.quantization.quantized import CODES, FORMS, NF4, FormName, MatrixView, Quantized, quantize
from maxtext_like.layers.weight import product
from tests.tiers import slow

interpreted = functools.partial(quantized_matmul, interpret=True)
BFLOAT16 = Precision(dtype="bfloat16", weight_dtype="bfloat16")


def drawn(*size, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=size), jnp.float32)


def rounded_nf4(view, stored):
  """Return the dequantized weight in float64, with the values of the codes rounded to bfloat16."""
  ones = FORMS["nf4"].values(view, stored | {CODES: jnp.full_like(stored[CODES], 0xFF)}, "float32")  # the maxima of the blocks
  codes = np.asarray(stored[CODES]).reshape(-1, 32, view.M)
  codes = np.concatenate([codes >> 4, codes & 15], axis=1).reshape(-1, view.M)[: view.K]
  return np.asarray(NF4.astype(jnp.bfloat16), np.float64)[codes] * np.asarray(ones, np.float64)


@pytest.mark.parametrize("form", [slow("int8"), "nf4", slow("fp8_block")])
@pytest.mark.parametrize("sizes", [(3, 200, 150), slow((40, 640, 256)), slow((1, 1100, 130))])
def test_products_of_dequantized_weights(form: FormName, sizes):
  """The sizes include incomplete blocks of inputs and outputs, and sums that are computed in several parts."""
  (R, K, M), of = sizes, FORMS[form]
  view = MatrixView((), (K,), (M,), (None, None))
  stored = of.quantize(view, drawn(K, M) * drawn(K, 1, seed=1))
  x = drawn(R, K, seed=2).astype(jnp.bfloat16)
  got = interpreted(form, x, stored | {CODES: stored[CODES].T}, M, values=of.table)
  values = np.asarray(of.values(view, stored, "float32"), np.float64)
  if form == "nf4":
    # The kernel rounds the values of the codes to bfloat16.
    values = rounded_nf4(view, stored)
  want = np.asarray(x, np.float64) @ values
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


def error(got, want):
  got, want = np.float64(got), np.float64(want)
  return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.fixture
def counted(monkeypatch):
  """Interpret the kernel, and count its calls."""
  calls = []

  def multiply(*args, **how):
    calls.append(args[1].shape)
    return interpreted(*args, **how)

  monkeypatch.setattr(quantized, "quantized_matmul", multiply)
  return calls


def weight_of(shape, contracts, form: FormName = "nf4", row=None):
  p = Param(shape, ("embed", "q_heads", None)[: len(shape)], "float32", normal(1.0), contracts=contracts)
  stored = quantize(FORMS[form], p, drawn(*shape))
  if row is not None:
    stored, row = {name: jnp.stack([jnp.zeros_like(x), x]) for name, x in stored.items()}, jnp.int32(row)
  return Quantized(stored, FORMS[form], p, row=row, kernel="pallas_triton").for_few_rows()


def declared(weight):
  """Return the same weight with its codes in the declared order. Products always dequantize such a weight."""
  codes = jnp.swapaxes(weight.stored[CODES], -1, -2)
  return dataclasses.replace(weight, stored=weight.stored | {CODES: codes}, by_output=False)


@pytest.mark.parametrize(
  ("equation", "x_shape", "shape", "contracts"),
  [("BTD,DNH->BTNH", (3, 1, 96), (96, 4, 8), (0,)), ("BTNH,NHD->BTD", (2, 1, 4, 24), (4, 24, 40), (0, 1))],
)
@pytest.mark.parametrize("row", [slow(None), 1])
def test_a_product_of_few_rows_uses_the_kernel(counted, equation, x_shape, shape, contracts, row):
  weight = weight_of(shape, contracts, row=row)
  x = drawn(*x_shape, seed=3).astype(jnp.bfloat16)
  for out in (None, "float32"):
    got = product(BFLOAT16, equation, x, weight, out=out)
    want = product(BFLOAT16, equation, x, declared(weight), out=out)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert error(got, want) < 5e-3
  assert len(counted) == 2


def test_the_gradient_is_that_of_the_dequantized_weight(counted):
  weight, x = weight_of((96, 4, 8), (0,)), drawn(2, 1, 96, seed=4).astype(jnp.bfloat16)
  of = lambda w: jax.grad(lambda x: jnp.sum(product(BFLOAT16, "BTD,DNH->BTNH", x, w).astype(jnp.float32) ** 2))(x)
  assert error(of(weight), of(declared(weight))) < 5e-3
  assert counted


@pytest.mark.slow
def test_the_values_do_not_depend_on_the_order_of_the_codes():
  for row in (None, 1):
    weight = weight_of((96, 4, 8), (0,), row=row)
    assert weight.by_output
    np.testing.assert_array_equal(weight.values("float32"), declared(weight).values("float32"))
  experts = Param((3, 64, 40), ("expert", "embed", "mlp"), "float32", normal(1.0), contracts=(1,))
  whole = Quantized(quantize(FORMS["nf4"], experts, drawn(3, 64, 40)), FORMS["nf4"], experts, kernel="pallas_triton")
  assert whole.for_few_rows() is whole


@pytest.mark.slow
def test_other_products_dequantize_the_weight(counted):
  weight = weight_of((96, 4, 8), (0,))
  few, many = (drawn(rows, 1, 96).astype(jnp.bfloat16) for rows in (2, MOST_ROWS + 1))
  product(BFLOAT16, "BTD,DNH->BTNH", many, weight)  # more rows
  product(BFLOAT16, "BTD,DNH->BNHT", few, weight)  # another order of axes
  product(Precision(dtype="float32"), "BTD,DNH->BTNH", few, weight)
  product(Precision(dtype="float32"), "BTD,DNH->BTNH", few, weight.cast(BFLOAT16))
  product(dataclasses.replace(BFLOAT16, matmul_dtype="float8"), "BTD,DNH->BTNH", few, weight, large=True)
  assert not counted
