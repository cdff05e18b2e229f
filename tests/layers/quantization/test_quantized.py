"""Tests quantized weights: stored codes against bitsandbytes and plain references, products, gradients, and complete models."""

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from equations import named
from jax.extend.core import jaxprs_in_params

from maxtext_like.layers.param import Param, abstract, fan_in, init, stack
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.quantization.low_rank import one_layer
from maxtext_like.layers.quantization.quantized import (
  FORMS,
  NF4,
  Form,
  Quantized,
  dynamic_map,
  dynamic_number,
  quantize,
  stored_params,
)
from maxtext_like.layers.remat import remat
from maxtext_like.layers.weight import Groups, Weight, product
from tests.layers.test_decoder import UNOPTIMIZED, close, objective
from tests.tiers import tiers

MAP = Param((130, 3, 50), ("embed", "heads", "head_dim"), "float32", fan_in(0))
OUTPUT = Param((2, 70, 90), ("heads", "head_dim", "embed"), "float32", fan_in(0, 1))
EXPERTS = Param((3, 70, 150), ("expert", "embed", "mlp"), "float32", fan_in(1))
WEIGHTS = [MAP, OUTPUT, EXPERTS]
ERRORS = {"bfloat16": 0.002, "nf4": 0.095, "int8": 0.007, "fp8_block": 0.028}


def drawn(p: Param, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.RandomState(seed).standard_normal(p.shape) * 0.02, jnp.float32)


def weight(form: Form, p: Param, x: jax.Array) -> Quantized:
  return Quantized(jax.jit(functools.partial(quantize, form, p))(x), form, one_layer(p))


def test_nf4_is_what_bitsandbytes_stores():
  """The digests are those of bitsandbytes 0.50.2, quantize_4bit(blocksize=64, compress_statistics=True, quant_type="nf4"), for
  these numbers as [out, in]."""
  x = np.random.RandomState(0).standard_normal((160, 128)).astype(np.float32) * 0.02
  stored = jax.jit(functools.partial(quantize, FORMS["nf4"], Param((128, 160), ("embed", "mlp"))))(jnp.asarray(x.T))
  # We store inputs i and i + 32 of a block in one byte, bitsandbytes stores inputs 2 i and 2 i + 1.
  halves = np.asarray(stored["codes"]).reshape(2, 32, 160)
  codes = np.concatenate([halves >> 4, halves & 15], axis=1).reshape(128, 160)
  theirs = {
    "codes": "f1e39b5af26993533fb0ad0ff2307c92",
    "scales": "ac2cdf47d46a0173f399459691677ee9",
    "map": "e732639a65f497b4ad684bb166a44677",
  }
  ours = {"codes": (codes[::2] << 4 | codes[1::2]).T, "scales": stored["scales"].T, "map": dynamic_map()}
  assert {name: hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()[:32] for name, a in ours.items()} == theirs
  sizes = [float(v).hex() for v in (*stored["scale_scales"], stored["scale_mean"])]
  assert sizes == [
    "0x1.9115540000000p-6",
    "0x1.3236c20000000p-5",
    "0x1.a652860000000p-5",
  ]
  np.testing.assert_allclose(dynamic_number(jnp.arange(256, dtype=jnp.uint8)), dynamic_map(), rtol=4e-7)
  np.testing.assert_array_equal(NF4[[0, 7, 8, 15]], np.array([-1, 0, 0.07958029955625534, 1], np.float32))


@pytest.mark.parametrize("name", FORMS)
def test_fewer_rows_than_experts_dequantize_no_more_experts_than_rows(name, monkeypatch):
  """Three of four rows belong to three of seven experts, and the last row belongs to none. Only four experts may be
  dequantized."""
  p = Param((7, 70, 150), ("expert", "embed", "mlp"), "float32", fan_in(1))
  w, form = weight(FORMS[name], p, drawn(p)), FORMS[name]
  x, g = drawn(Param((4, 70), ("batch", "embed"))), drawn(Param((4, 150), ("batch", "mlp")))
  sizes, precision = jnp.array([0, 1, 0, 0, 1, 0, 1], jnp.int32), Precision(dtype="float32", matmul_precision="highest")
  real = lambda y: jnp.where(jnp.arange(4)[:, None] < 3, y, 0)
  run = lambda x, w: real(product(precision, "MD,EDF->MF", x, w, groups=Groups(sizes)))
  expected, of_expected = jax.vjp(lambda x: run(x, w.values("float32")), x)
  dequantized, values = [], type(form).values
  counted = lambda self, plan, stored, dtype: dequantized.append(len(stored["codes"])) or values(self, plan, stored, dtype)
  monkeypatch.setattr(type(form), "values", counted)
  got, of_got = jax.vjp(lambda x: run(x, w), x)
  np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)
  np.testing.assert_allclose(of_got(g)[0], of_expected(g)[0], rtol=1e-6, atol=1e-7)
  assert set(dequantized) == {4}


def nf4_written_out(matrix: np.ndarray) -> np.ndarray:
  """Return the dequantized matrix [K, M]. Blocks have 64 numbers along K, and their maxima are stored in 8 bits."""
  K, M = matrix.shape
  blocks = np.zeros((-(-K // 64) * 64, M), np.float64)
  blocks[:K] = matrix
  blocks = blocks.reshape(-1, 64, M)
  largest = np.abs(blocks).max(axis=1)
  codes = np.abs(blocks / largest[:, None] - NF4.astype(np.float64)[:, None, None, None]).argmin(axis=0)
  listed = largest.T.reshape(-1)
  mean, table, back = listed.mean(), dynamic_map().astype(np.float64), np.zeros_like(listed)
  for start in range(0, len(listed), 256):
    part = listed[start : start + 256] - mean
    most = np.abs(part).max()
    back[start : start + 256] = table[np.abs(part / most - table[:, None]).argmin(axis=0)] * most + mean
  return (NF4[codes] * back.reshape(M, -1).T[:, None]).reshape(-1, M)[:K]


def int8_written_out(matrix: np.ndarray) -> np.ndarray:
  scale = np.abs(matrix).max(axis=0) / 127
  return np.round(matrix / scale) * scale


def fp8_written_out(matrix: np.ndarray) -> np.ndarray:
  result = np.zeros_like(matrix)
  for i in range(0, matrix.shape[0], 128):
    for j in range(0, matrix.shape[1], 128):
      block = matrix[i : i + 128, j : j + 128]
      scale = np.abs(block).max() / 448
      result[i : i + 128, j : j + 128] = (block / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
  return result


@pytest.mark.parametrize(
  ("name", "reference"), [("nf4", nf4_written_out), ("int8", int8_written_out), ("fp8_block", fp8_written_out)]
)
@pytest.mark.parametrize("p", WEIGHTS, ids=["map", "output", "experts"])
def test_a_form_is_its_reference(name, reference, p):
  """Some blocks are incomplete. Each expert is quantized separately."""
  x = drawn(p)
  values = np.asarray(weight(FORMS[name], p, x).values("float32"))
  assert values.shape == p.shape
  assert p.contracts is not None
  experts = p.shape[0] if p.axes[0] == "expert" else 1
  inputs = int(np.prod([p.shape[i] for i in p.contracts]))
  ours, plain = (np.asarray(a, np.float64).reshape(experts, inputs, -1) for a in (values, x))
  for own, matrix in zip(ours, plain, strict=True):
    expected = reference(matrix)
    different = np.abs(own - expected) > 1e-6 * np.abs(matrix).max()
    assert different.mean() < 1e-3  # ties, and numbers halfway between two codes, which float32 and float64 round differently


@pytest.mark.parametrize("name", FORMS)
def test_what_is_stored_is_what_is_declared(name):
  for p in (*WEIGHTS, stack({"w": MAP}, 2)["w"]):
    spec, own = stored_params(FORMS[name], p), one_layer(p)
    made = jax.eval_shape(functools.partial(quantize, FORMS[name], own), jax.ShapeDtypeStruct(own.shape, "float32"))
    rows = () if p.rows is None else (p.rows,)
    assert {k: (q.shape, q.dtype) for k, q in spec.items()} == {k: ((*rows, *x.shape), str(x.dtype)) for k, x in made.items()}
    assert not any(q.trainable for q in spec.values())


@pytest.mark.parametrize("name", FORMS)
def test_zeros_and_the_size_of_the_error(name):
  zeros = weight(FORMS[name], MAP, jnp.zeros(MAP.shape))
  np.testing.assert_array_equal(zeros.values("float32"), 0.0)
  x = drawn(MAP)
  error = jnp.linalg.norm((weight(FORMS[name], MAP, x).values("float32") - x).ravel()) / jnp.linalg.norm(x.ravel())
  assert ERRORS[name] / 2 < error < ERRORS[name]


@pytest.mark.parametrize("summed", [0, 1])
def test_a_table_is_none_of_these(summed):
  """Embedding tables cannot be quantized."""
  table = Param((10, 8), ("vocab", "embed"), contracts=(summed,))
  with pytest.raises(ValueError, match=r"vocab.*is a table"):
    stored_params(FORMS["nf4"], table)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMS)
def test_a_product_is_that_of_the_values_in_the_dtype_and_so_is_its_gradient(name, dtype):
  """Results are equal to the bit: the weight is rounded to the dtype once, and in the same way in the backward pass."""
  w, precision = weight(FORMS[name], MAP, drawn(MAP)), Precision(dtype=dtype)
  x, g = drawn(Param((2, 5, 130), (None,) * 3), 1), drawn(Param((2, 5, 3, 50), (None,) * 4), 2)
  run = lambda x, w: jnp.vdot(product(precision, "BTD,DNH->BTNH", x, w, out="float32"), g)
  got = jax.value_and_grad(run)(x, w)
  expected = jax.value_and_grad(run)(x, w.values(dtype))
  jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_nothing_but_codes_is_kept_for_the_backward_pass():
  w = weight(FORMS["nf4"], MAP, drawn(MAP))
  run = lambda x: product(Precision(), "BTD,DNH->BTNH", x, w)
  _, backward = jax.vjp(run, jnp.zeros((2, 5, 130)))
  assert (
    sum(leaf.nbytes for leaf in jax.tree.leaves(backward) if leaf.size > 2 * 5 * 130) < 0.75 * 130 * 150
  )  # 192 inputs are stored


def quantized(form: Form, p: Param, array: Any) -> Any:
  if not p.contracts or p.axes[0 if p.rows is None else 1] == "vocab":
    return array
  if p.rows is None:
    return weight(form, p, array)
  return Quantized(jax.lax.map(functools.partial(quantize, form, p), array), form, one_layer(p))


def whole(w: Any) -> Any:
  if not isinstance(w, Weight):
    return w
  assert isinstance(w, Quantized)
  stacked = w.stored["codes"].ndim > len(stored_params(w.form, w.param)["codes"].shape)
  return jax.lax.map(lambda s: Quantized(s, w.form, w.param).values("float32"), w.stored) if stacked else w.values("float32")


@pytest.mark.parametrize("family", tiers(("gemma4-moe", "gemma4-e2b", "deepseek3.2", "gemma3"), slow=("deepseek3.2",)))
def test_it_stands_for_every_map_of_a_model(family, tiny_decoder, random_params, batch):
  """Compare the loss, and the gradients of the embedding and the final norm, under scan and remat. Experts, head and indexer
  are quantized too."""
  decoder = tiny_decoder(family, remat_policy="full")
  spec = decoder.params()
  p = jax.tree.map(functools.partial(quantized, FORMS["nf4"]), spec, random_params(spec))
  is_weight = lambda x: isinstance(x, Weight)
  assert sum(map(is_weight, jax.tree.leaves(p, is_leaf=is_weight))) >= 7
  floats = lambda p: {"final_norm": p["final_norm"], "embedding": p["embedding"]}
  loss = lambda own, p: objective(decoder)({**p, **own}, batch)[0]
  plain = lambda p: jax.tree.map(whole, p, is_leaf=is_weight)
  both = lambda p: (jax.value_and_grad(loss)(floats(p), p), jax.value_and_grad(loss)(floats(p), plain(p)))
  (value, got), (expected_value, expected) = jax.jit(both).lower(p).compile(compiler_options=UNOPTIMIZED)(p)
  np.testing.assert_allclose(value, expected_value, rtol=1e-5)
  close(got, expected, 1e-3)


@pytest.fixture(scope="module")
def nf4_loops(tiny_decoder, batch):
  """Return abstract parameters in nf4, and the loops over them in both passes."""
  decoder = tiny_decoder("gemma3", remat_policy="full")
  spec = decoder.params()
  p = jax.eval_shape(lambda a: jax.tree.map(functools.partial(quantized, FORMS["nf4"]), spec, a), abstract(spec))
  loss = lambda table, p: objective(decoder)({**p, "embedding": table}, batch)[0]
  return p, named(jax.grad(loss), p["embedding"], p, name="scan")


@pytest.mark.slow
def test_a_row_of_a_stack_is_cut_out_where_it_multiplies(nf4_loops):
  """In both passes, each loop over rows gets the codes of the complete stack and cuts out those that it multiplies. If a loop
  got the codes of one row as an argument, they would stay in memory for all layers of the row."""
  seen = 0
  for e in nf4_loops[1]:
    (body,) = jaxprs_in_params(e.params)
    codes = [(v.aval, own.aval) for v, own in zip(e.invars, body.invars, strict=True) if v.aval.dtype == jnp.uint8]
    assert all(str(v) == str(own) for v, own in codes)  # dtype and shape
    assert not [v for v in e.outvars if v.aval.dtype == jnp.uint8]
    seen += bool(codes)
  assert seen >= 2


def test_no_constant_leaves_a_loop(nf4_loops):
  """JAX moves computations that do not depend on inputs out of a loop that it differentiates. No array with a constant for each
  code may be moved out, because it would take memory."""
  p, every = nf4_loops
  codes = [
    w.stored["codes"].shape for w in jax.tree.leaves(p, is_leaf=lambda x: isinstance(x, Quantized)) if isinstance(w, Quantized)
  ]
  shapes = {(rows // 32, *each, outputs) for *_, rows, outputs in codes for each in [(64,), ()]}
  loops = [e for e in every if any(v.aval.dtype == jnp.uint8 for v in e.invars)]
  assert len(loops) >= 2
  assert not [v.aval for e in loops for v in e.invars if v.aval.dtype == jnp.float32 and v.aval.shape in shapes]


@pytest.mark.slow
def test_drawn_weights_are_those_that_are_drawn_whole():
  """Small leaves are initialized together, large ones row by row. Both get the same values as without quantization."""
  spec = {
    "small": stack({"w": MAP}, 2)["w"],
    "large": Param((2, 128, 1100), ("layers", "embed", "mlp"), rows=2, init=fan_in(0)),
  }
  key, form = jax.random.key(3), FORMS["int8"]
  got = init(spec, key, store=lambda path, p: functools.partial(quantize, form, p))
  for name, array in init(spec, key).items():
    expected = jax.lax.map(functools.partial(quantize, form, spec[name]), array)
    jax.tree.map(np.testing.assert_array_equal, got[name], expected)


@pytest.mark.parametrize("form", ["bfloat16", "nf4"])
def test_minimal_keeps_its_product(form):
  """The remat policy ``minimal`` keeps the product. A policy does not see names inside a custom derivative."""
  p = Param((64, 96), ("embed", "mlp"), "float32", fan_in(0))
  w, precision = weight(FORMS[form], p, drawn(p)), Precision(dtype="bfloat16")
  layer = lambda x: jnp.sum(jnp.sin(product(precision, "TD,DF->TF", jnp.cos(x), w).astype(jnp.float32)))
  pull = jax.eval_shape(lambda x: jax.vjp(remat(layer, "minimal", isolated=True), x)[1], jnp.ones((5, 64), jnp.bfloat16))
  assert ((5, 96), "bfloat16") in [(x.shape, x.dtype.name) for x in jax.tree.leaves(pull)]
