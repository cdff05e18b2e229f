"""Tests that models compute and train correctly if every weight is a ``Weight`` instead of an array.

Two kinds are used, both made from the ``Param`` of each weight: a low-rank addition (``layers/quantization/low_rank.py``) and a
scaled int8 weight.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers import partition
from maxtext_like.layers import weight as weight_module
from maxtext_like.layers.attention import attention
from maxtext_like.layers.context import Context
from maxtext_like.layers.param import Param
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.quantization.low_rank import Layout, LowRank, factors, one_layer
from maxtext_like.layers.quantization.low_rank import merged as addition_merged
from maxtext_like.layers.vision.gemma3 import SiglipConfig
from maxtext_like.layers.vision.gemma4 import Gemma4VisionConfig
from maxtext_like.layers.weight import Equation, Rounded, Weight, lookup, product, products
from tests.layers.equations import named
from tests.layers.test_decoder import TWO_LAYERS, UNOPTIMIZED, close, objective
from tests.tiers import nightly, slow, tiers

RANK, SCALE = 2, 0.5
static = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled(Weight):
  """codes * scale, with a scale for each entry of the axes that products do not sum over."""

  codes: jax.Array
  scale: jax.Array
  param: Param = static

  def product(self, how, x):
    e, groups = Equation.of(how.equation), how.groups
    y = how(x, self.codes)
    if groups is not None:
      return y * jnp.repeat(self.scale[:, 0], groups.sizes, axis=0, total_repeat_length=y.shape[0])
    return y * jnp.einsum(f"{e.weight}->{''.join(c for c in e.result if c in e.weight)}", self.scale)[self._spread(e)]

  def _spread(self, e):
    """Return an index that adds an axis for each axis of the result that the weight does not have."""
    return tuple(slice(None) if c in e.weight else None for c in e.result if c != ".")

  def lookup(self, precision, index):
    scale = self.scale[index] if self.scale.shape[0] > 1 else self.scale[0]
    return precision.cast(self.codes[index] * scale)

  def values(self, dtype):
    return merged(self).astype(dtype)

  def cast(self, precision):
    return self


def contracts(p: Param, array: Any) -> tuple[int, ...]:
  """Return the contracted axes of the stored array. An array of a stack has one more axis in front."""
  assert p.contracts is not None
  return tuple(c + array.ndim - len(one_layer(p).shape) for c in p.contracts)


def low_rank(p: Param, base: Any, rng) -> Any:
  """Return the weight with random factors, or the array itself if nothing multiplies by it."""
  if not p.contracts:
    return base
  draw = lambda q: jnp.asarray(rng.normal(size=q.shape) * 0.3, jnp.float32)
  drawn = {name: draw(q) for name, q in factors(p, RANK).items()}
  return LowRank(base, drawn["lora_a"], drawn["lora_b"], Layout.of(p), SCALE)


def merged(w: Any) -> Any:
  """Return the array that a weight represents."""
  if isinstance(w, Scaled):
    return w.codes.astype(jnp.float32) * w.scale
  if not isinstance(w, LowRank):
    return w
  return addition_merged(w.base, w.a, w.b, w.layout, w.scale)


def scaled(p: Param, array: Any) -> Any:
  if not p.contracts:
    return array
  scale = jnp.max(jnp.abs(array), axis=contracts(p, array), keepdims=True) / 127
  return Scaled(jnp.round(array / scale).astype(jnp.int8), scale, one_layer(p))


def is_weight(x: Any) -> bool:
  return isinstance(x, Weight)


QUICK = ["gemma4-moe", slow("gemma4-e2b"), slow("deepseek3.2")]
"""Together they have every kind of layer."""


@pytest.mark.parametrize("family", tiers(("gemma4-moe", "gemma4-e2b", "deepseek3.2"), slow=("deepseek3.2",)))
def test_a_low_rank_addition_trains_through_every_weight(family, tiny_decoder, random_params, batch):
  """Loss and gradients of the factors equal those of the merged arrays, also for experts, tables and the indexer."""
  decoder = tiny_decoder(family, changes=dict(TWO_LAYERS) if family == "gemma4-moe" else {})
  spec, rng = decoder.params(), np.random.default_rng(7)
  p = jax.tree.map(lambda q, x: low_rank(q, x, rng), spec, random_params(spec))
  loss = lambda p: objective(decoder)(p, batch)[0]
  merge = lambda p: jax.tree.map(merged, p, is_leaf=is_weight)
  both = lambda p: (jax.value_and_grad(loss)(p), jax.value_and_grad(lambda p: loss(merge(p)))(p))
  (value, got), (expected_value, expected) = jax.jit(both).lower(p).compile(compiler_options=UNOPTIMIZED)(p)
  np.testing.assert_allclose(value, expected_value, rtol=1e-5)
  close(got, expected, 1e-3)
  found = [w for w in jax.tree.leaves(got, is_leaf=is_weight) if is_weight(w)]
  assert len(found) == sum(bool(q.contracts) for q in jax.tree.leaves(spec))
  assert all((g != 0).any() for w in found for g in (w.a, w.b))


@pytest.mark.parametrize("family", QUICK)
@pytest.mark.slow
def test_a_scaled_int8_weight_is_the_array_it_stands_for(family, tiny_decoder, random_params, batch):
  decoder = tiny_decoder(family, changes=dict(TWO_LAYERS) if family == "gemma4-moe" else {})
  spec = decoder.params()
  p = jax.tree.map(scaled, spec, random_params(spec))
  assert {str(w.codes.dtype) for w in jax.tree.leaves(p, is_leaf=is_weight) if is_weight(w)} == {"int8"}
  loss = lambda p: objective(decoder)(p, batch)[0]
  both = lambda p: (loss(p), loss(jax.tree.map(merged, p, is_leaf=is_weight)))
  value, expected = jax.jit(both).lower(p).compile(compiler_options=UNOPTIMIZED)(p)
  np.testing.assert_allclose(value, expected, rtol=1e-5)


def apart(precision, equation, x, weights, **how):
  """Multiply by each weight separately, as ``products`` does on a machine without a GPU."""
  return [product(precision, equation, x, w, **how) for w in weights]


@pytest.mark.parametrize(
  ("family", "dtype"),
  [
    slow("gemma4-moe", "bfloat16"),
    nightly("gemma4-e2b", "float16"),
    nightly("deepseek3.2", "bfloat16"),
  ],
)
def test_weights_rounded_while_they_are_stacked_give_the_same_numbers(
  family, dtype, tiny_decoder, random_params, batch, monkeypatch
):
  """One GPU without remat casts complete stacks to dtype. Loss and gradients must not change by a bit, and the gradients of
  weights are concatenated in dtype."""
  decoder = tiny_decoder(family, precision={"dtype": dtype, "weight_dtype": "float32"}, scan_layers=False)
  p = random_params(decoder.params())
  results, narrow = [], []
  monkeypatch.setattr(attention, "products", apart)  # the concatenated product rounds the gradient of x only once
  for alone in (False, True):
    for module, name in ((weight_module, "on_one_gpu"), (partition, "on_gpu")):
      monkeypatch.setattr(module, name, lambda alone=alone: alone)
    both = jax.value_and_grad(lambda p: objective(decoder)(p, batch)[0])
    # The name differs between versions of JAX.
    together = [e for name in ("stack", "concatenate") for e in named(both, p, name=name)]
    narrow.append(sum(e.outvars[0].aval.dtype == dtype and e.outvars[0].aval.ndim > 2 for e in together))
    results.append(jax.jit(both).lower(p).compile(compiler_options=UNOPTIMIZED)(p))
  for got, expected in zip(*map(jax.tree.leaves, results), strict=True):
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)
  assert narrow[1] > narrow[0] + 4


def test_where_dtypes_of_layers_differ_none_is_rounded_while_stacked(tiny_decoder, random_params, batch, monkeypatch):
  """Fewer weights are rounded as complete stacks if one layer has another dtype, and none with remat."""
  made = []
  monkeypatch.setattr(attention, "products", apart)
  monkeypatch.setattr(weight_module, "on_one_gpu", lambda: True)
  monkeypatch.setattr(weight_module, "Rounded", lambda *arrays: made.append(1) or Rounded(*arrays))
  decoder = tiny_decoder("gemma3", precision={"dtype": "bfloat16", "weight_dtype": "float32"}, scan_layers=False)
  other = dataclasses.replace(decoder.layers[1], precision=decoder.precision.in_layer(dtype="float32"))
  mixed = dataclasses.replace(decoder, layers=(decoder.layers[0], other, *decoder.layers[2:]))
  found = []
  for one in (decoder, mixed, dataclasses.replace(decoder, cfg=dataclasses.replace(decoder.cfg, remat_policy="full"))):
    made.clear()
    jax.eval_shape(lambda p, one=one: one(p, batch), random_params(decoder.params()))
    found.append(len(made))
  assert found[0] > found[1]
  assert found[2] == 0


@pytest.mark.parametrize("stored", ["arrays", "rounded", "one of each"])
@pytest.mark.slow
def test_products_on_one_gpu_are_one(stored, monkeypatch):
  """Values equal those of separate products, and the gradient of x is rounded once. Separate products are still used with
  adapters, with float8 and on other machines."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  x, plain = draw(2, 3, 5), [draw(5, heads, 4) for heads in (3, 1, 2)]
  narrow = lambda w: Rounded(w, w.astype(jnp.bfloat16))
  kinds = {"arrays": [False] * 3, "rounded": [True] * 3, "one of each": [True, False, True]}[stored]
  weights = [narrow(w) if is_narrow else w for w, is_narrow in zip(plain, kinds, strict=True)]
  half = Precision(dtype="bfloat16")

  def found(precision, weights, alone=True):
    monkeypatch.setattr(weight_module, "on_one_gpu", lambda: alone)
    run = lambda x, weights: products(precision, "BTD,DNH->BTNH", x, weights, large=True)
    count = len(named(run, x, weights, name="dot_general"))
    out, back = jax.vjp(run, x, weights)
    return count, out, back([jnp.ones_like(y) for y in out])

  (one, out, (dx, dw)), (three, want, (want_dx, want_dw)) = found(half, weights), found(half, weights, alone=False)
  assert (one, three) == (1, 3)
  for got, expected in zip(out, want, strict=True):
    np.testing.assert_array_equal(got, expected)
  for got, expected in zip(jax.tree.leaves(dw), jax.tree.leaves(want_dw), strict=True):
    np.testing.assert_array_equal(got, expected)
  np.testing.assert_allclose(dx, want_dx, rtol=2e-2, atol=5e-2)
  assert found(Precision(dtype="bfloat16", matmul_dtype="float8"), weights)[0] == 3
  other = Scaled(plain[2], jnp.ones((1, 2, 4)), Param((5, 2, 4), ("embed", "kv_heads", "head_dim")))
  assert found(half, [*weights[:2], other])[0] == 3


def test_a_rounded_weight_is_read_as_it_is_stored_where_a_product_is_float32():
  """A ``Rounded`` weight has the stored array and a 16-bit copy. Products in float32 must use the stored array."""
  stored = jnp.asarray([[1.001], [2.003]])
  x, w = jnp.asarray([[3.0, 5.0]]), Rounded(stored, stored.astype(jnp.float16))
  half = Precision(dtype="float16")
  exact = 3 * np.float32(1.001) + 5 * np.float32(2.003)
  assert product(half.exact, "BD,DF->BF", x, w)[0, 0] == product(half, "BD,DF->BF", x, w, unbounded=True)[0, 0] == exact
  assert product(half, "BD,DF->BF", x, w).dtype == jnp.float16
  np.testing.assert_array_equal(w.values("float32"), stored)
  np.testing.assert_array_equal(w.values("bfloat16"), stored.astype(jnp.bfloat16))  # rounded once, not twice


TOWERS = {
  "gemma3": (
    SiglipConfig(
      image_size=8, patch_size=2, emb_dim=6, mlp_dim=7, num_layers=2, num_heads=2, tokens_per_image=4, output_dim=5
    ),
    (2, 3, 8, 8),
    None,
  ),
  "gemma4": (
    Gemma4VisionConfig(
      patch_size=2, emb_dim=6, mlp_dim=7, num_layers=2, num_heads=2, head_dim=4, position_table_size=5, output_dim=5,
      pooling=2, clipped=True,
    ),
    (1, 4, 12),
    jnp.asarray([[[0, 0], [1, 0], [0, 1], [1, 1]]]),
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.slow
def test_a_tower_multiplies_through_the_seam_too(name, random_params):
  """Vision towers with ``Weight`` objects give the same results as with the merged arrays."""
  cfg, shape, positions = TOWERS[name]
  tower = cfg.layer(Precision(dtype="float32"))
  spec, rng = tower.params(), np.random.default_rng(3)
  pixels = jnp.asarray(rng.uniform(size=shape), jnp.float32)
  plain = random_params(spec)
  if name == "gemma4":
    for part in ("attention", "mlp"):  # wide bounds, as in a model where they have no effect
      for bounds in plain["layers"][part]["clip"].values():
        for side in bounds:
          bounds[side] = jnp.full_like(bounds[side], -3e38 if side.endswith("min") else 3e38)
  run = lambda p: tower(p, pixels, positions, Context(positions))[0]
  for p in (jax.tree.map(scaled, spec, plain), jax.tree.map(lambda q, x: low_rank(q, x, rng), spec, plain)):
    got, expected = jax.jit(lambda p: (run(p), run(jax.tree.map(merged, p, is_leaf=is_weight))))(p)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_what_is_summed_over_is_said_alike_by_param_and_equation(family, tiny_decoder, batch):
  """For every product in a traced model, the axes that its equation sums over are those of its ``Param``."""
  decoder = tiny_decoder(family, scan_layers=False)
  spec = decoder.params()
  seen = []

  @dataclasses.dataclass(frozen=True)
  class Told(Weight):
    codes: Any
    param: Param = static

    def product(self, how, x):
      seen.append((Equation.of(how.equation), self.param))
      return how(x, self.codes)

    def lookup(self, precision, index):
      return lookup(precision, self.codes, index)

    def values(self, dtype):
      return self.codes.astype(dtype)

    def cast(self, precision):
      return self

  jax.tree_util.register_dataclass(Told)
  p = jax.tree.map(lambda q: Told(jax.ShapeDtypeStruct(q.shape, q.dtype), one_layer(q)) if q.contracts else
                   jax.ShapeDtypeStruct(q.shape, q.dtype), spec)  # fmt: skip
  jax.eval_shape(lambda p: decoder(p, batch)[0], p)
  assert len(seen) >= 4 * len(decoder.layers)
  for e, param in seen:
    assert tuple(e.weight.index(c) for c in e.summed) == param.contracts


def test_one_device_multiplies_as_it_always_did_and_several_by_matrices():
  """One device keeps the original form of products, so that runs resumed from older checkpoints give the same bits. On several
  devices the weight [D, N, H] is multiplied as a matrix, so that its complete gradient is never sent to all devices."""
  precision, x, w = Precision(dtype="float32"), jnp.zeros((2, 3, 8)), jnp.zeros((8, 2, 4))
  run = lambda x, w: product(precision, "BTD,DNH->BTNH", x, w)
  plain = lambda x, w: precision.einsum("BTD,DNH->BTNH", x, w)
  assert str(jax.make_jaxpr(run)(x, w)) == str(jax.make_jaxpr(plain)(x, w))
  for devices, axes in ((1, (3, 3)), (2, (3, 2))):
    mesh = jax.sharding.AbstractMesh((devices,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
      (dot,) = [e for e in jax.make_jaxpr(run)(x, w).jaxpr.eqns if e.primitive.name == "dot_general"]
    assert tuple(v.aval.ndim for v in dot.invars) == axes


def test_each_copy_of_a_table_adds_up_the_gradients_of_its_own_rows():
  """Without this, every device of two slices would hold a gradient of the complete table, 5.25 GiB for the 31B model."""
  gradient = jax.grad(lambda table, index: jnp.sum(lookup(Precision(), table, index)))
  for sizes, shape in (((1, 4), (7, 8)), ((2, 2), (2, 7, 8)), ((4, 1), (7, 8))):
    mesh = jax.sharding.AbstractMesh(sizes, ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
      program = jax.make_jaxpr(gradient)(jnp.zeros((7, 8)), jnp.zeros((4, 3), jnp.int32))
    assert f"f32[{','.join(map(str, shape))}] = scatter-add" in str(program)


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2}])
@pytest.mark.slow
def test_the_gradient_of_a_row_that_many_places_read_adds_up_in_float32(mesh):
  """A sum in bfloat16 would stop at 256, where numbers are 2 apart and adding 1 rounds back to 256."""
  table, index = jnp.ones((3, 2), jnp.bfloat16), jnp.asarray([[1] * 512] * 2)
  gradient = jax.grad(lambda table: jnp.sum(lookup(Precision(), table, index)))
  sizes = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))
  with jax.sharding.use_abstract_mesh(sizes) if mesh else contextlib.nullcontext():
    program = str(jax.make_jaxpr(gradient)(table))
  assert "bf16[3,2] = scatter-add" not in program
  assert "scatter-add" in program
  if not mesh:
    found = gradient(table)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, [[0, 0], [1024, 1024], [0, 0]])
