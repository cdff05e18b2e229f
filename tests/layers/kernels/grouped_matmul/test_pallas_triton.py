"""Tests the grouped kernel for other NVIDIA GPUs: its results in Pallas' interpreter against float64, and when it is chosen.

The kernel that is compiled for a GPU has a self-test, like every fused kernel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.capacity.topologies import assumed_gpu
from maxtext_like.layers.kernels.grouped_matmul.pallas_triton import KERNEL, product, rows_worked_on, sums, tile_rows
from maxtext_like.layers.kernels.grouped_matmul.registry import Case, choose, kernel
from maxtext_like.layers.kernels.grouped_matmul.row_tiles import row_tiles


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 1_000_000), st.integers(1, 512))
def test_tiles_add_little_work(rows, groups):
  """Padding adds at most a fifth of the rows, and a tenth on average, if groups are large enough for tiles."""
  R = tile_rows(rows, groups)
  assert R in (16, 32, 64, 128)
  assert rows_worked_on(rows, groups) == rows + groups * (R - 1)
  if rows >= 80 * groups:
    assert rows_worked_on(rows, groups) <= 1.2 * rows


@pytest.mark.slow
def test_work_in_the_sizes_of_models():
  """The work never exceeds the declared maximum, with even and uneven loads. Sizes are those of gemma4-26b with 1 and 4 x 4096
  tokens and of DeepSeek V3."""
  for rows, groups in ((32768, 128), (131072, 128), (32768, 256)):
    R = tile_rows(rows, groups)
    for share in (np.full(groups, 1 / groups), np.arange(groups) / np.arange(groups).sum(), np.eye(groups)[3]):
      sizes = np.random.default_rng(0).multinomial(rows, share)
      number = int(row_tiles(jnp.asarray(sizes, jnp.int32), rows, (R,))[1][0])
      assert rows <= number * R <= rows_worked_on(rows, groups)


@jax.jit
def compiled(x, w, sizes, g):
  out, back = jax.vjp(lambda x, w: product(x, w, sizes, interpret=True), x, w)
  return out, *back(g)


def check(sizes, M, S, C, dtype):
  """Compare results with float64; the tolerance is one rounding. Rows without a group are NaN, and their results must be
  zero."""
  rng = np.random.default_rng(1)
  x, w, g = (jnp.asarray(rng.normal(size=s), dtype) for s in ((M, S), (len(sizes), S, C), (M, C)))
  used = sum(sizes)
  lost = np.full((M, 1), False)
  lost[used:] = True
  got = compiled(jnp.where(lost, jnp.nan, x), w, jnp.asarray(sizes, jnp.int32), jnp.where(lost, jnp.nan, g))
  assert {a.dtype.name for a in got} == {dtype}
  out, dx, dw = (np.asarray(a, np.float64) for a in got)
  assert not out[used:].any()
  assert not dx[used:].any()
  x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
  tolerance = {"bfloat16": 4e-3, "float16": 5e-4}[dtype]  # half a unit in the last place
  for i, end in enumerate(np.cumsum(sizes)):
    own = slice(end - sizes[i], end)
    for found, wanted in ((out[own], x[own] @ w[i]), (dx[own], g[own] @ w[i].T), (dw[i], x[own].T @ g[own])):
      np.testing.assert_allclose(found, wanted, atol=tolerance * np.abs(wanted).max(initial=0.1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_and_gradients(dtype):
  """In the first case groups end inside tiles, are smaller than a tile, or are empty, and some rows have no group. In the
  second case one group has all rows."""
  for sizes in ([10, 0, 31, 3, 20], [0, 0, 71, 0, 0]):
    check(sizes, 71, 36, 20, dtype)


LARGER = {
  "several tiles of both axes": ([40, 0, 131, 29], 211, 150, 274),
  "tiles of 32 rows, whole ones": ([192, 128], 330, 64, 128),
  "tiles of 128 rows": ([700, 0], 1300, 40, 24),
  "few rows": ([2, 1], 5, 20, 10),
  "all are no one's": ([0, 0, 0], 40, 24, 24),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("sizes", "M", "S", "C"), LARGER.values(), ids=LARGER)
def test_values_and_gradients_of_larger_ones(sizes, M, S, C, dtype):
  check(sizes, M, S, C, dtype)


def test_nothing_of_one_group_reaches_another():
  """The rows and the matrix of the third group are NaN. The shapes are those of test_values_and_gradients, so no other program
  is compiled."""
  x, w, g = jnp.ones((71, 36), jnp.bfloat16), jnp.ones((5, 36, 20), jnp.bfloat16), jnp.ones((71, 20), jnp.bfloat16)
  sizes, lost = jnp.asarray([30, 0, 11, 20, 10], jnp.int32), (np.arange(71) >= 30) & (np.arange(71) < 41)
  bad = lost[:, None]
  given_ = jnp.where(bad, jnp.nan, x), w.at[2].set(jnp.nan), sizes, jnp.where(bad, jnp.nan, g)
  out, dx, dw = (np.asarray(a, np.float64) for a in compiled(*given_))
  assert (out[~lost] == 36).all()
  assert (dx[~lost] == 20).all()
  for i, size in ((0, 30), (1, 0), (3, 20), (4, 10)):
    assert (dw[i] == size).all()
  for found in (out[lost], dx[lost], dw[2]):
    assert np.isnan(found).all()


@functools.partial(jax.jit, static_argnames="dtype")
def compiled_sums(x, w, sizes, g, dtype):
  out, back = jax.vjp(lambda x, w: sums(x, w, sizes, dtype, interpret=True), x, w)
  return out, *back(g)


@pytest.mark.parametrize(
  ("dtype", "of_rows", "of_w"),
  [
    ("float16", "float32", "float16"),
    ("float16", "float16", "float16"),
    ("float16", "float32", "float32"),
    ("bfloat16", "float32", "float32"),
  ],
)
@pytest.mark.slow
def test_sums_have_the_range_of_float32(dtype, of_rows, of_w):
  """float32 rows have magnitudes from 2^-60 to 2^60, cotangents the inverse, and matrices 2^-40 to 2^40.

  Sums are not rounded, except for the gradient of a 16-bit x or w. NaN in rows without a group, or in one group, must not reach
  other results.
  """
  M, S, C, sizes = 71, 36, 20, [10, 0, 30, 3, 20]
  rng = np.random.default_rng(2)
  used, lost = sum(sizes), slice(40, 43)  # the rows of the group with three rows
  powers = np.exp2((60 if of_rows == "float32" else 5) * (np.arange(M) % 3 - 1))[:, None]
  of_group = np.exp2((40 if of_w == "float32" else 0) * (np.arange(len(sizes)) % 3 - 1))[:, None, None]
  x, w, g = (np.asarray(jnp.asarray(rng.normal(size=n), dtype), np.float64) for n in ((M, S), (len(sizes), S, C), (M, C)))
  x, w, g = x * powers, w * of_group, g / powers
  for rows in (x, g):
    rows[used:] = rows[lost] = np.nan
  given_ = jnp.asarray(x, of_rows), jnp.asarray(w, of_w), jnp.asarray(sizes, jnp.int32), jnp.asarray(g, jnp.float32)
  got = compiled_sums(*given_, dtype)
  assert [a.dtype.name for a in got] == ["float32", of_rows, of_w]
  out, dx, dw = (np.asarray(a, np.float64) for a in got)
  assert not out[used:].any()
  assert not dx[used:].any()
  assert all(np.isnan(found).all() for found in (out[lost], dx[lost], dw[3]))

  def close(found, wanted, of):
    rounded = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 4e-3}[of]
    assert (np.abs(found - wanted) <= rounded * np.abs(wanted).max(initial=0, axis=-1, keepdims=True)).all()

  for i, end in enumerate(np.cumsum(sizes)):
    own = slice(end - sizes[i], end)
    if i != 3:
      close(out[own], x[own] @ w[i], "float32")
      close(dx[own], g[own] @ w[i].T, of_rows)
      close(dw[i], x[own].T @ g[own], of_w)


def test_layers_share_what_is_compiled_for_a_gpu():
  """Compiling a kernel takes seconds, so a program with many layers must contain it once. The report about a program recognizes
  its operations by their paths."""

  def loss(x, w, sizes):
    for _ in range(3):
      x = product(x, w, sizes)
    return jnp.sum(x.astype(jnp.float32))

  of = jax.ShapeDtypeStruct
  arrays = of((96, 128), jnp.bfloat16), of((4, 128, 128), jnp.bfloat16), of((4,), jnp.int32)
  with assumed_gpu():
    lowered = jax.jit(jax.grad(loss, (0, 1))).trace(*arrays).lower(lowering_platforms=("cuda",))
  # Rows in the forward pass, rows in the backward pass, and weights.
  assert lowered.as_text().count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 3
  assert KERNEL.called("jit(step)/transpose(jvp(jit(_rows_times_groups)))/triton_rows_by_group/pallas_call", "custom-call.1")
  assert KERNEL.called("jit(step)/transpose(jvp(jit(_groups_of_rows)))/triton_weights_by_group/pallas_call", "custom-call.2")
  path = "jit(step)/jvp(jit(_rows_times_groups))/gpu_rows_by_group/pallas_call"
  assert not KERNEL.called(path, "custom-call.3")
  assert kernel("pallas_gpu").called(path, "custom-call.3")


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_is_the_choice_where_the_kernel_of_hopper_gpus_is_not(dtype):
  of_hopper = "pallas_triton" if jax.__version_info__ < (0, 11, 1) else "pallas_gpu"
  names = {c: choose("auto", Case(platform="gpu", dtype=dtype, capability=c)).name for c in (None, "7.5", "8.0", "9.0", "12.0")}
  assert names == {None: of_hopper, "7.5": "rounds", "8.0": "pallas_triton", "9.0": of_hopper, "12.0": "pallas_triton"}
  case = Case(platform="gpu", dtype=dtype, capability="9.0")
  assert choose("auto", case, without=("pallas_gpu",)).name == "pallas_triton"
  assert choose("auto", case, without=("pallas_gpu", "pallas_triton")).name == "rounds"
  for other in (Case(platform="cpu", dtype=dtype), Case(platform="gpu", dtype="float32", capability="8.0")):
    assert choose("auto", other).name != "pallas_triton"


@pytest.mark.parametrize(
  ("case", "reason"),
  [
    (Case(platform="cpu", dtype="bfloat16"), "it runs on NVIDIA GPUs, not on cpu"),
    (Case(platform="tpu", dtype="float32"), "it runs on NVIDIA GPUs, not on tpu; .*float32 operands"),
    (Case(platform="gpu", dtype="float32", capability="8.0"), ".*float32 operands"),
    (Case(platform="gpu", dtype="bfloat16", capability="7.5"), r".*compute capability 8\.0 or higher, not 7\.5"),
    (Case(platform="gpu", dtype="float16", capability="gfx942"), ".*compute capability .* not gfx942"),
  ],
)  # fmt: skip
def test_its_refusals_say_why(case, reason):
  with pytest.raises(ValueError, match=rf"^grouped_product=pallas_triton [^;]*: {reason}\n  fix: .*grouped_product=auto$"):
    choose("pallas_triton", case)


def test_a_jax_without_triton_has_not_the_kernel(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  assert KERNEL.refuses(Case(platform="gpu", dtype="bfloat16")) == [f"JAX {jax.__version__} does not have Pallas for Triton"]


def test_other_dtypes_are_refused():
  with pytest.raises(ValueError, match=r"pallas_triton: x is float32 and w is float32.*bfloat16.*float16"):
    product(jnp.ones((8, 64)), jnp.ones((2, 64, 64)), jnp.asarray([4, 4]))
  with pytest.raises(ValueError, match=r"pallas_triton: x is bfloat16 and w is float32.*float16 sums"):
    sums(jnp.ones((8, 64), jnp.bfloat16), jnp.ones((2, 64, 64)), jnp.asarray([4, 4]), "float16")
