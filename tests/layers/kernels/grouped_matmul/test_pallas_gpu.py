"""Tests the grouped kernel for Hopper GPUs: its list of tiles, and its results in Pallas' interpreter against float64.

The kernel that is compiled for a GPU has a self-test, like every fused kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxtext_like.layers.kernels.grouped_matmul import hopper, pallas_gpu_weights
from maxtext_like.layers.kernels.grouped_matmul.hopper import Tiles
from maxtext_like.layers.kernels.grouped_matmul.pallas_gpu import KERNEL, product, row_counts, rows_worked_on
from maxtext_like.layers.kernels.grouped_matmul.registry import Case
from maxtext_like.layers.kernels.grouped_matmul.row_tiles import row_tiles

# JAX 0.10 can neither compile nor interpret the kernels. The interpreter of JAX 0.11 fails if a barrier is not waited for at
# the end.
INTERPRETER: Any = getattr(plgpu, "InterpretGPUParams", None) if jax.__version_info__ >= (0, 12) else None
interpreted = pytest.mark.skipif(INTERPRETER is None, reason="this JAX has no interpreter for the kernels")
compiled_for_gpus = pytest.mark.skipif(bool(KERNEL.refuses(Case(platform="gpu", dtype="bfloat16"))), reason="refused")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 700)), min_size=1, max_size=6), st.sampled_from([32, 96, 256]))
@pytest.mark.slow
def test_tiles_cover_every_row_and_stay_in_their_group(sizes, most):
  counts = row_counts(most)
  rows, ends = sum(sizes), np.cumsum(sizes)
  visits, number = jax.jit(row_tiles, static_argnums=(1, 2))(jnp.asarray(sizes, jnp.int32), rows, counts)
  assert number[0] <= visits.shape[1]
  seen, worked = np.zeros(rows, int), 0
  for group, row, kind, valid in np.asarray(visits).T[: number[0]]:
    assert ends[group] - sizes[group] <= row
    assert row + valid <= ends[group]
    assert valid == min(counts[kind], sizes[group])
    assert valid > (counts[kind] - 1) // 32 * 32  # only the last part that is written may be incomplete
    seen[row : row + valid] += 1
    worked += counts[kind]
  assert (seen > 0).all()
  assert worked <= rows_worked_on(rows, len(sizes))


@pytest.mark.slow
def test_work_in_the_sizes_of_models():
  """Rounding up the last tile of each group adds at most 12 % of rows. The declared maximum is at most 25 % above the number of
  rows."""
  for rows, groups, most, bound in ((32768, 128, 1.06, 1.13), (131072, 128, 1.02, 1.04), (32768, 256, 1.12, 1.25)):
    sizes = jnp.asarray(np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups)), jnp.int32)
    counts = row_counts(256)
    visits, number = row_tiles(sizes, rows, counts)
    worked = np.asarray(counts)[np.asarray(visits)[2, : number[0]]].sum()
    assert rows <= worked <= min(most * rows, rows_worked_on(rows, groups))
    assert rows_worked_on(rows, groups) <= bound * rows


def test_a_tile_has_one_of_few_numbers_of_rows():
  assert row_counts(256) == (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
  assert row_counts(80) == (8, 16, 32, 48, 64, 80)
  assert row_counts(16) == (8, 16)


def test_the_gradient_of_the_weights_works_on_little_more():
  """Incomplete steps add at most a tenth of the rows, in the sizes of gemma4-26b and DeepSeek V3. The steps of a group cover
  all of its rows."""
  for rows, groups, most in ((32768, 128, 1.06), (131072, 128, 1.02), (32768, 256, 1.1)):
    for seed in range(3):
      ends = jnp.cumsum(jnp.asarray(np.random.default_rng(seed).multinomial(rows, np.full(groups, 1 / groups)), jnp.int32))
      begins = jnp.roll(ends, 1).at[0].set(0)
      first, whole, steps = pallas_gpu_weights._steps(begins, ends)
      worked = whole * hopper.DEPTH + (steps - whole) * pallas_gpu_weights._FEW
      assert (first <= begins).all()
      assert (first + worked >= ends).all()
      assert (first + worked - ends < pallas_gpu_weights._FEW).all()
      assert worked.sum() <= most * rows
  assert [int(n) for n in pallas_gpu_weights._steps(jnp.int32(13), jnp.int32(13))] == [8, 0, 0]


def test_the_gradient_of_the_weights_has_tiles_that_divide_it():
  """Test the sizes of gemma4-26b in both directions, those of DeepSeek V3, and sizes that are not multiples of the largest
  tile."""
  assert pallas_gpu_weights._wide((2816, 704), 256) == (True, 256)
  assert pallas_gpu_weights._wide((704, 2816), 256) == (False, 256)
  assert pallas_gpu_weights._wide((7168, 2048), 256) == (False, 256)
  assert pallas_gpu_weights._wide((1152, 704), 256) == (True, 192)
  assert pallas_gpu_weights._wide((704, 448), 256) == (False, 256)
  assert pallas_gpu_weights._wide((64, 64), 256) == (False, 64)


@functools.cache
def compiled(tiles):
  def run(x, w, sizes, g):
    out, back = jax.vjp(lambda x, w: product(x, w, sizes, tiles=tiles, interpret=INTERPRETER()), x, w)
    return out, *back(g)

  return run


SMALL = Tiles(rows=64, columns=128, stages=2, high=128, wide=128, weight_stages=2)
CASES = {
  "borders and no one's rows": ([10, 0, 70, 3, 40], 128, 64, 64, SMALL),
  "one takes all, a warpgroup has no columns": ([0, 100, 0], 100, 64, 192, SMALL),
  "few rows": ([2, 1], 5, 20, 10, SMALL),
  "wide tiles": ([97, 0, 31, 72], 200, 128, 256, Tiles(rows=96, columns=256, stages=3, high=128, wide=128, weight_stages=2)),
  "the gradient's tiles lie across": ([40, 0, 31, 9], 90, 256, 64, Tiles(rows=96, stages=2, weight_stages=2)),
}


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("sizes", "M", "S", "C", "tiles"), CASES.values(), ids=CASES)
def test_values_and_gradients(sizes, M, S, C, tiles, dtype, monkeypatch):
  monkeypatch.setattr(hopper, "BLOCKS", 2)
  keys = jax.random.split(jax.random.key(1), 3)
  shapes = ((M, S), (len(sizes), S, C), (M, C))
  x, w, g = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))
  used = sum(sizes)
  got = compiled(tiles)(x.at[used:].set(jnp.nan), w, jnp.asarray(sizes, jnp.int32), g.at[used:].set(jnp.nan))
  out, dx, dw = (np.asarray(a, np.float64) for a in got)
  assert {a.dtype.name for a in got} == {dtype}
  assert not out[used:].any()
  assert not dx[used:].any()
  x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
  tolerance = {"bfloat16": 4e-3, "float16": 5e-4}[dtype]  # half a unit in the last place
  for i, end in enumerate(np.cumsum(sizes)):
    own = slice(end - sizes[i], end)
    for found, wanted in ((out[own], x[own] @ w[i]), (dx[own], g[own] @ w[i].T), (dw[i], x[own].T @ g[own])):
      np.testing.assert_allclose(found, wanted, atol=tolerance * np.abs(wanted).max(initial=0.1))


@interpreted
@pytest.mark.slow
def test_nothing_of_one_group_reaches_another(monkeypatch):
  """The rows and the matrix of the second group are NaN. The results of other groups must not change."""
  monkeypatch.setattr(hopper, "BLOCKS", 2)
  x, w, g = jnp.ones((80, 64), jnp.bfloat16), jnp.ones((3, 64, 64), jnp.bfloat16), jnp.ones((80, 64), jnp.bfloat16)
  sizes = jnp.asarray([30, 11, 39], jnp.int32)
  out, dx, dw = compiled(SMALL)(x.at[30:41].set(jnp.nan), w.at[1].set(jnp.nan), sizes, g)
  others = np.r_[0:30, 41:80]
  assert (np.asarray(out)[others] == 64).all()
  assert (np.asarray(dx)[others] == 64).all()
  assert (np.asarray(dw)[0] == 30).all()
  assert (np.asarray(dw)[2] == 39).all()
  assert np.isnan(np.asarray(out, np.float32)[30:41]).all()


@interpreted
@pytest.mark.slow
def test_the_gradient_of_the_weights_ends_where_its_group_does(monkeypatch):
  """The sizes of groups are just below, at and above multiples of 16 and 64 rows, the sizes of steps. Groups of NaN are between
  them, so that groups begin at different offsets."""
  monkeypatch.setattr(hopper, "BLOCKS", 2)
  own = np.asarray([0, 1, 15, 16, 17, 31, 49, 63, 64, 65, 97, 16, 64])
  sizes = np.stack([own, np.asarray([3, 2, 1, 31, 5, 40, 7, 1, 95, 0, 7, 0, 9])], 1).reshape(-1)
  begins, rows, S, C = np.cumsum(sizes) - sizes, sizes.sum(), 64, 128
  others = np.repeat(np.arange(len(sizes)) % 2 == 1, sizes)[:, None]
  x, g = (jax.random.normal(jax.random.key(i), (rows, n)).astype(jnp.bfloat16) for i, n in enumerate((S, C)))
  run = functools.partial(pallas_gpu_weights.groups_of_rows, tiles=SMALL, interpret=INTERPRETER())
  dw = run(jnp.where(others, jnp.nan, x), jnp.where(others, jnp.nan, g), jnp.asarray(sizes, jnp.int32))
  x, g, dw = (np.asarray(a, np.float64) for a in (x, g, dw))
  assert np.isnan(dw[1::2]).all((1, 2)).tolist() == (sizes[1::2] > 0).tolist()
  for i, begin in enumerate(begins[::2]):
    rows_of = slice(begin, begin + own[i])
    wanted = x[rows_of].T @ g[rows_of]
    np.testing.assert_allclose(dw[2 * i], wanted, atol=4e-3 * np.abs(wanted).max(initial=0.1), err_msg=f"{own[i]} rows")


@compiled_for_gpus
def test_layers_share_what_is_compiled_for_a_gpu():
  """Compiling a kernel takes seconds, so a program with many layers must contain it once."""
  tiles = Tiles(rows=32, stages=2, weight_stages=2)

  def loss(x, w, sizes):
    for _ in range(3):
      x = product(x, w, sizes, tiles=tiles)
    return jnp.sum(x.astype(jnp.float32))

  of = jax.ShapeDtypeStruct
  arrays = of((96, 128), jnp.bfloat16), of((4, 128, 128), jnp.bfloat16), of((4,), jnp.int32)
  text = jax.jit(jax.grad(loss, (0, 1))).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
  # Rows in the forward pass, rows in the backward pass, and weights.
  assert text.count("stablehlo.custom_call @mosaic_gpu") == 3


@compiled_for_gpus
def test_its_results_vary_over_devices_as_its_arguments_do():
  """shard_map requires that a gradient varies over devices exactly if its argument does. Here rows differ between devices, and
  the matrices are the same on all."""
  mesh = jax.sharding.AbstractMesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  own, same = jax.P("fsdp"), jax.P()

  def grads(x, w, sizes):
    return jax.grad(lambda x, w: jnp.sum(product(x, w, sizes).astype(jnp.float32)), (0, 1))(x, w)

  of = jax.ShapeDtypeStruct
  arrays = of((64, 128), jnp.bfloat16), of((4, 128, 64), jnp.bfloat16), of((8,), jnp.int32)
  dx, dw = jax.eval_shape(jax.shard_map(grads, mesh=mesh, in_specs=(own, same, own), out_specs=(own, same)), *arrays)
  assert (dx.shape, dw.shape) == ((64, 128), (4, 128, 64))


def test_other_dtypes_are_refused():
  with pytest.raises(ValueError, match=r"pallas_gpu: x is float32 and w is float32.*bfloat16.*float16"):
    product(jnp.ones((8, 64)), jnp.ones((2, 64, 64)), jnp.asarray([4, 4]))
