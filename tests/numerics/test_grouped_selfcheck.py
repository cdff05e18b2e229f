"""Tests the self-test of grouped kernels: correct kernels pass, and a kernel with a known fault fails the case that covers this
fault."""

import functools

import jax
import jax.numpy as jnp
import pytest

from maxtext_like.layers.kernels.grouped_matmul import pallas_tpu, pallas_triton, tiles
from maxtext_like.numerics.grouped_selfcheck import cases, grouped_shape, self_test
from tests.tiers import slow


def shape(dtype="bfloat16", rows=160, groups=4, sums=False):
  return grouped_shape(
    "pallas_tpu", dtype=dtype, sums=sums, precision="default", summed=24, columns=12, groups=groups, rows=rows
  )  # fmt: skip


def faulty(x, w, sizes, precision, *, fault):
  if fault == "forgets the last row of a group":
    sizes = jnp.where(sizes > 1, sizes - 1, sizes)
  out = tiles.product(x, w, sizes, precision)
  if fault == "no gradient of a group without neighbors":
    alone = jnp.sum(sizes > 0) == 1
    return jnp.where(alone, jax.lax.stop_gradient(out), out)
  if fault == "NaN where there are no rows":
    return out + jnp.where(jnp.any(sizes == 0), jnp.nan, 0).astype(out.dtype)
  if fault == "raises":
    raise NotImplementedError("no such tile\nand more lines")
  return out


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_kernels_pass(dtype):
  for product in (tiles.product, functools.partial(pallas_tpu.product, interpret=True)):
    results = self_test(shape(dtype), product)
    assert [r.problem for r in results] == [""] * len(cases(shape(dtype)))
    assert max(r.gradient_error or 0.0 for r in results) < (1e-2 if dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_sums_of_any_range_pass_and_rows_without_it_fail(dtype):
  asked = shape(dtype, sums=True)
  assert str(asked) == f"pallas_tpu, {dtype}, float32 sums, [165, 24] times 4 of [24, 12]"
  by_triton = lambda x, w, sizes, dtype, precision: pallas_triton.sums(x, w, sizes, dtype, interpret=True)
  for product in (tiles.KERNEL.sums, by_triton):
    results = self_test(asked, product)
    assert [r.problem for r in results] == [""] * len(cases(asked))
  plain = lambda x, w, sizes, dtype, precision: tiles.product(x.astype(dtype), w, sizes, precision).astype(jnp.float32)
  for result in self_test(asked, plain):
    assert ("not finite" if dtype == "float16" else "values: relative error") in result.problem


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.slow
def test_every_row_of_sums_counts_however_small_it_is(rank):
  """Rows have three magnitudes. A kernel that flushes the rows of one magnitude and their gradients to zero fails."""

  def faulty(x, w, sizes, dtype, precision):
    kept = (jnp.arange(x.shape[0]) % 3 != rank)[:, None]
    out = tiles.KERNEL.sums(x, w, sizes, dtype, precision)
    return jnp.where(kept, out, jax.lax.stop_gradient(out * 0))

  for result in self_test(shape("float16", sums=True), faulty):
    assert "values: relative error" in result.problem
    assert "dx: relative error" in result.problem


@pytest.mark.parametrize(
  ("fault", "failed", "words"),
  [
    ("forgets the last row of a group", "borders inside tiles", "values: relative error"),
    ("no gradient of a group without neighbors", "one group has all rows", "dw: relative error"),
    ("NaN where there are no rows", "groups without rows", "numbers are not finite"),
    ("raises", "rows of no group", "NotImplementedError: no such tile"),
  ],
)
def test_faults_are_found_and_named(fault, failed, words):
  results = {r.name: r for r in self_test(shape(), functools.partial(faulty, fault=fault))}
  assert words in results[failed].problem
  assert results[failed].raised == (fault == "raises")


def test_a_shape_stands_for_larger_ones_and_keeps_what_matters():
  large = grouped_shape(
    "pallas_tpu", dtype="bfloat16", sums=False, precision="default", summed=2816, columns=704, groups=128, rows=32768
  )
  assert (large.summed, large.columns, large.groups) == (512, 704, 6)
  assert pallas_tpu.tile_and_part(large.rows, large.groups) == pallas_tpu.tile_and_part(32768, 128)
  assert "[1541, 512] times 6 of [512, 704]" in str(large)
  sizes = cases(large)
  assert all(s.shape == (6,) for s in sizes.values())
  assert {name: bool((s == 0).any()) for name, s in sizes.items()}["groups without rows"]
  assert sizes["rows of no group"].sum() < large.rows
