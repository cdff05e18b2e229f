"""Tests values and both gradients of every grouped kernel against a product in float64, one row at a time."""

import contextlib
import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.layers.kernels.grouped_matmul import pallas_tpu, registry
from maxtext_like.layers.kernels.grouped_matmul.registry import NAMES, Case, choose, kernel
from maxtext_like.layers.kernels.grouped_matmul.tiles import tile_rows
from tests.tiers import slow

SIZES = {
  "uneven": [3, 9, 1, 20, 4],
  "empty ones": [0, 0, 17, 0, 20],
  "one takes all": [0, 37, 0, 0, 0],
  "the last takes all": [0, 0, 0, 0, 37],
  "whole tiles": [8, 16, 8, 0, 5],
}
D, F = 6, 10
# The other kernels support only 16-bit operands and have their own test files.
PLAIN = [name for name in NAMES if name not in ("pallas_gpu", "pallas_triton")]


@functools.cache
def compiled(name, precision="highest"):
  """Return a function (x, w, sizes, g) -> product, and the gradients of x and w for the cotangent g. The TPU kernel is
  interpreted."""
  product = functools.partial(pallas_tpu.product, interpret=True) if name == "pallas_tpu" else kernel(name).run

  def run(x, w, sizes, g):
    out, back = jax.vjp(lambda x, w: product(x, w, sizes, precision), x, w)
    return out, *back(g)

  return jax.jit(run)


def written_out(x, w, sizes, g):
  """Return the same results, computed in float64."""
  x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
  group = np.repeat(np.arange(len(sizes)), sizes)
  out = np.stack([row @ w[of] for row, of in zip(x, group, strict=True)])
  dx = np.stack([row @ w[of].T for row, of in zip(g, group, strict=True)])
  dw = np.zeros_like(w)
  for row, cotangent, of in zip(x, g, group, strict=True):
    dw[of] += np.outer(row, cotangent)
  return out, dx, dw


def arrays(sizes, dtype="float32", seed=0):
  keys = jax.random.split(jax.random.key(seed), 3)
  shapes = ((sum(sizes), D), (len(sizes), D, F), (sum(sizes), F))
  x, w, g = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))
  return x, w, jnp.asarray(sizes, jnp.int32), g


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", PLAIN)
def test_values_and_gradients(name, sizes, dtype):
  given_ = arrays(sizes, dtype)
  tolerance = {"float32": 2e-6, "bfloat16": 8e-3}[dtype]  # a few roundings, relative to the largest value
  for got, wanted in zip(compiled(name)(*given_), written_out(given_[0], given_[1], sizes, given_[3]), strict=True):
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=tolerance * np.abs(wanted).max())


# Tiles have 128 rows. Groups end at the end of a tile or inside it, a tile has rows of several groups, a group has many tiles,
# and some rows belong to no group.
TILES = {
  "borders everywhere": [100, 0, 1, 150, 27, 22],
  "whole tiles": [128, 0, 128, 0, 0, 44],
  "many in one": [3, 5, 0, 9, 11, 272],
  "one takes all": [0, 0, 300, 0, 0, 0],
  "no one's rows": [10, 0, 120, 0, 9, 0],
  "all are no one's": [0, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("name", ["pallas_tpu", "rounds"])
@pytest.mark.parametrize("sizes", TILES.values(), ids=TILES)
def test_tiles_with_several_groups(name, sizes):
  keys = jax.random.split(jax.random.key(1), 3)
  x, w, g = (jax.random.normal(key, shape) for key, shape in zip(keys, ((300, D), (6, D, F), (300, F)), strict=True))
  used = sum(sizes)
  out, dx, dw = compiled(name)(x.at[used:].set(jnp.nan), w, jnp.asarray(sizes, jnp.int32), g)
  assert not np.asarray(out)[used:].any()
  assert not np.asarray(dx)[used:].any()
  wanted = written_out(x[:used], w, sizes, g[:used]) if used else (np.zeros((0, F)), np.zeros((0, D)), np.zeros_like(w))
  for got, want in zip((out[:used], dx[:used], dw), wanted, strict=True):
    np.testing.assert_allclose(got, want, atol=4e-6 * max(1, np.abs(want).max(initial=0)))


@pytest.mark.slow
def test_three_products_of_halves_are_as_good_as_float16_needs():
  """Mosaic does not support Precision.HIGH, so the kernel multiplies bfloat16 halves of the operands three times. The error
  must be far below the rounding of float16, 5e-4. One product of the upper halves would have an error of 4e-3."""
  x, w, sizes, g = arrays(SIZES["uneven"], "float16")
  wide = [a.astype(jnp.float32) for a in (x, w, g)]
  got = compiled("pallas_tpu", "high")(wide[0], wide[1], sizes, wide[2])
  for found, wanted in zip(got, written_out(x, w, SIZES["uneven"], g), strict=True):
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(("rows", "groups", "most"), [(32768, 128, 1.07), (40960, 8, 1.02), (8192, 64, 1.13), (1024, 16, 1.24)])
@pytest.mark.slow
def test_borders_add_little_work(rows, groups, most):
  """``rows_worked_on`` is an upper bound for the rows that the kernel multiplies, and it is only a little more than the number
  of rows. The report about a compiled program uses it too."""
  tile, part = pallas_tpu.tile_and_part(rows, groups)
  assert pallas_tpu.rows_worked_on(rows, groups) <= most * rows
  sizes = np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups))
  group, at, begin, end = (np.asarray(v) for v in pallas_tpu._visits(jnp.asarray(sizes), rows, tile, empty=False))
  parts = np.where(end > begin, -(-end // part) - begin // part, 0)
  assert rows <= parts.sum() * part <= pallas_tpu.rows_worked_on(rows, groups)
  assert (np.bincount(group, weights=end - begin, minlength=groups) == sizes).all()
  assert (np.bincount(at, weights=end - begin) == tile).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 37), min_size=4, max_size=4), st.integers(0, 99))
def test_any_sizes(cuts, seed):
  ends = np.array([0, *sorted(cuts), 37])
  sizes = [int(size) for size in np.diff(ends)]
  given_ = arrays(sizes, seed=seed)
  wanted = written_out(given_[0], given_[1], sizes, given_[3])
  for name in ("tiles", "rounds"):
    for got, want in zip(compiled(name)(*given_), wanted, strict=True):
      np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


@given(st.integers(1, 100_000), st.integers(1, 512))
def test_tiles_add_little_work(rows, groups):
  """Padding to complete tiles adds at most a fifth of the rows, if groups have 40 rows or more on average."""
  R = tile_rows(rows, groups)
  assert 8 <= R <= 256
  if rows >= 40 * groups:
    assert groups * R <= rows / 5


@pytest.mark.parametrize("name", ["tiles", "pallas_tpu", "rounds"])
def test_nothing_of_one_group_reaches_another(name):
  """NaN in the rows or the matrix of a group does not reach other groups, although tiles extend beyond their group."""
  x, w, sizes, g = arrays(SIZES["uneven"])
  begin, end = 12, 13  # the third group, of one row
  out, dx, dw = compiled(name)(x.at[begin].set(jnp.nan), w, sizes, g)
  others = np.delete(np.arange(37), range(begin, end))
  assert np.isnan(out[begin]).all()
  assert np.isfinite(out[others]).all()
  assert np.isfinite(dx).all()
  assert np.isnan(dw[2]).all()
  assert np.isfinite(dw[np.array([0, 1, 3, 4])]).all()


def test_the_choice():
  old = jax.__version_info__ < (0, 11, 1)
  of_hopper = "pallas_triton" if old else "pallas_gpu"
  auto = {
    (p, d): choose("auto", Case(platform=p, dtype=d)).name for p in ("cpu", "gpu", "tpu") for d in ("bfloat16", "float16")
  }
  assert auto == {
    ("cpu", "bfloat16"): "tiles", ("cpu", "float16"): "tiles",
    ("gpu", "bfloat16"): of_hopper, ("gpu", "float16"): of_hopper,
    ("tpu", "bfloat16"): "pallas_tpu", ("tpu", "float16"): "tiles",
  }  # fmt: skip
  assert choose("tiles", Case(platform="gpu", dtype="bfloat16")).name == "tiles"
  with pytest.raises(ValueError, match=r"grouped_product=ragged_dot .*float16"):
    choose("ragged_dot", Case(platform="tpu", dtype="float16"))
  with pytest.raises(ValueError, match=r"grouped_product=pallas_tpu .*on TPUs, not on gpu"):
    choose("pallas_tpu", Case(platform="gpu", dtype="bfloat16"))
  assert choose("auto", Case(platform="gpu", dtype="bfloat16", capability="9.0")).name == of_hopper
  assert choose("auto", Case(platform="gpu", dtype="bfloat16", capability="10.0")).name == "pallas_triton"
  assert choose("auto", Case(platform="gpu", dtype="float32")).name == "rounds"
  with pytest.raises(ValueError, match=rf"JAX 0\.11\.1, .*{re.escape(jax.__version__)}") if old else contextlib.nullcontext():
    assert choose("pallas_gpu", Case(platform="gpu", dtype="bfloat16")).name == "pallas_gpu"
  with pytest.raises(ValueError, match=r"pallas_gpu .*on Hopper GPUs, not on cpu; .*float32"):
    choose("pallas_gpu", Case(platform="cpu", dtype="float32"))
  assert {name: kernel(name).name for name in NAMES} == {name: name for name in NAMES}
  assert registry.Choice.__args__ == ("auto", *NAMES)


def test_the_platforms_of_the_table_are_those_that_kernels_accept():
  accepted = {
    name: {p for p in ("cpu", "gpu", "tpu") if not kernel(name).refuses(Case(platform=p, dtype="bfloat16"))} for name in NAMES
  }
  for name, platforms in accepted.items():
    own = registry.PLATFORMS.get(name)
    assert platforms <= ({own} if own else {"cpu", "gpu", "tpu"})
    assert bool(own) == (platforms != {"cpu", "gpu", "tpu"})


def test_the_choice_for_sums():
  """If operands are 16-bit and sums are returned in float32, only kernels that accept float32 operands and round them may be
  chosen."""
  auto = {
    (p, d): choose("auto", Case(platform=p, dtype=d, sums=True)).name
    for p in ("cpu", "gpu", "tpu")
    for d in ("bfloat16", "float16")
  }
  assert auto == {
    ("cpu", "bfloat16"): "tiles", ("cpu", "float16"): "tiles",
    ("gpu", "bfloat16"): "pallas_triton", ("gpu", "float16"): "pallas_triton",
    ("tpu", "bfloat16"): "pallas_tpu", ("tpu", "float16"): "pallas_tpu",
  }  # fmt: skip
  # All layers use the same kernel.
  wanted = [Case(platform="gpu", dtype=dtype, sums=sums) for dtype, sums in (("bfloat16", False), ("float16", True))]
  assert choose("auto", *wanted).name == "pallas_triton"
  assert choose("auto", *wanted, Case(platform="gpu", dtype="float32")).name == "rounds"
  with pytest.raises(ValueError, match=r"grouped_product=pallas_gpu .*float32 operands"):
    choose("pallas_gpu", *wanted)


@pytest.mark.parametrize("name", ["tiles", "ragged_dot"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_are_not_rounded(name, dtype):
  x, w, sizes, g = arrays(SIZES["uneven"], dtype)
  far = jnp.float32(2.0) ** 30
  out, back = jax.vjp(lambda x, w: kernel(name).sums(x, w, sizes, dtype, "default"), x.astype(jnp.float32) * far, w)
  dx, dw = back(g.astype(jnp.float32) / far)
  assert [a.dtype.name for a in (out, dx, dw)] == ["float32", "float32", dtype]
  wanted = written_out(x, w, SIZES["uneven"], g)
  for found, want, rounded in zip((out / far, dx * far, dw), wanted, (2e-6, 2e-6, 4e-3), strict=True):
    np.testing.assert_allclose(np.asarray(found, np.float64), want, atol=rounded * np.abs(want).max())


_FOR_A_TPU = """
import sys
from maxtext_like.capacity.aot_tpu import prepare_environment
prepare_environment()
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P
from maxtext_like.layers.kernels.grouped_matmul.registry import kernel
product = kernel("pallas_tpu").run
devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
mesh = jax.sharding.Mesh(np.array(devices), "x")
for M, G, D, F, dtype, precision in eval(sys.argv[1]):
  def run(x, w, sizes, g):
    out, back = jax.vjp(lambda x, w: product(x, w, sizes[0], precision), x, w)
    return out, *back(g)

  specs = (P("x"), P(), P("x"), P("x"))  # of a weight that all share the gradient is a sum over devices
  shapes = ((4 * M, D), dtype), ((G, D, F), dtype), ((4, G), jnp.int32), ((4 * M, F), dtype)
  given = [jax.ShapeDtypeStruct(*s, sharding=jax.NamedSharding(mesh, spec)) for s, spec in zip(shapes, specs)]
  mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(P("x"), P("x"), P())))
  text = mapped.trace(*given).lower(lowering_platforms=("tpu",)).compile().as_text()
  assert text.count('custom_call_target="tpu_custom_call"') == 3, text.count("tpu_custom_call")
"""


def compile_for_a_tpu(*cases):
  done = subprocess.run([sys.executable, "-c", _FOR_A_TPU, repr(cases)], capture_output=True, text=True, env=os.environ)
  assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.tpu
def test_compiles_for_a_tpu_inside_shard_map():
  """Compile to machine code, with sizes that are not multiples of the size of a vector register."""
  compile_for_a_tpu((200, 3, 48, 20, "bfloat16", "default"))


@pytest.mark.tpu
@pytest.mark.slow
def test_compiles_for_a_tpu_in_the_sizes_of_models():
  """Compile the sizes of gemma4-26b without expert parallelism, of DeepSeek V3 with it, of a factor of a low-rank adapter, and
  float32 in two precisions."""
  compile_for_a_tpu(
    (32768, 128, 2816, 704, "bfloat16", "default"),
    (40960, 8, 7168, 2048, "bfloat16", "default"),
    (4096, 16, 2816, 8, "bfloat16", "default"),
    (1000, 16, 640, 304, "float32", "high"),
    (1000, 16, 640, 304, "float32", "highest"),
  )
