"""Every grouped kernel against a product written out row by row, in float64: values and both gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.layers.kernels.grouped import registry
from maxtext_like.layers.kernels.grouped.registry import NAMES, Case, choose, kernel
from maxtext_like.layers.kernels.grouped.tiles import tile_rows

SIZES = {
  "uneven": [3, 9, 1, 20, 4],
  "empty ones": [0, 0, 17, 0, 20],
  "one takes all": [0, 37, 0, 0, 0],
  "the last takes all": [0, 0, 0, 0, 37],
  "whole tiles": [8, 16, 8, 0, 5],
}
D, F = 6, 10


@functools.cache
def compiled(name):
  """(x, w, sizes, g) -> the product and the gradients of x and w for the cotangent g."""

  def run(x, w, sizes, g):
    out, back = jax.vjp(lambda x, w: kernel(name).run(x, w, sizes, "highest"), x, w)
    return out, *back(g)

  return jax.jit(run)


def written_out(x, w, sizes, g):
  """The same in float64."""
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name, sizes, dtype):
  given_ = arrays(sizes, dtype)
  tolerance = {"float32": 2e-6, "bfloat16": 8e-3}[dtype]  # a few roundings, relative to the largest value
  for got, wanted in zip(compiled(name)(*given_), written_out(given_[0], given_[1], sizes, given_[3]), strict=True):
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=tolerance * np.abs(wanted).max())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 37), min_size=4, max_size=4), st.integers(0, 99))
def test_any_sizes(cuts, seed):
  ends = np.array([0, *sorted(cuts), 37])
  sizes = [int(size) for size in np.diff(ends)]
  given_ = arrays(sizes, seed=seed)
  for got, wanted in zip(compiled("tiles")(*given_), written_out(given_[0], given_[1], sizes, given_[3]), strict=True):
    np.testing.assert_allclose(got, wanted, atol=2e-6 * np.abs(wanted).max())


@given(st.integers(1, 100_000), st.integers(1, 512))
def test_tiles_add_little_work(rows, groups):
  """At most a fifth, where groups are so large that tiles can be; none of a tile's rows are wanted beyond its group's end."""
  R = tile_rows(rows, groups)
  assert 8 <= R <= 256
  if rows >= 40 * groups:
    assert groups * R <= rows / 5


def test_nothing_of_one_group_reaches_another():
  """NaN in a group's rows or matrix stays in it, though tiles reach beyond their group."""
  x, w, sizes, g = arrays(SIZES["uneven"])
  begin, end = 12, 13  # the third group, of one row
  out, dx, dw = compiled("tiles")(x.at[begin].set(jnp.nan), w, sizes, g)
  others = np.delete(np.arange(37), range(begin, end))
  assert np.isnan(out[begin]).all()
  assert np.isfinite(out[others]).all()
  assert np.isfinite(dx).all()
  assert np.isnan(dw[2]).all()
  assert np.isfinite(dw[np.array([0, 1, 3, 4])]).all()


def test_the_choice():
  auto = {
    (p, d): choose("auto", Case(platform=p, dtype=d)).name for p in ("cpu", "gpu", "tpu") for d in ("bfloat16", "float16")
  }
  assert auto == {
    ("cpu", "bfloat16"): "tiles", ("cpu", "float16"): "tiles",
    ("gpu", "bfloat16"): "ragged_dot", ("gpu", "float16"): "ragged_dot",
    ("tpu", "bfloat16"): "ragged_dot", ("tpu", "float16"): "tiles",
  }  # fmt: skip
  assert choose("tiles", Case(platform="gpu", dtype="bfloat16")).name == "tiles"
  with pytest.raises(ValueError, match="grouped_product=ragged_dot cannot be used here: there is no grouped float16 product"):
    choose("ragged_dot", Case(platform="tpu", dtype="float16"))
  assert {name: kernel(name).name for name in NAMES} == {name: name for name in NAMES}
  assert registry.Choice.__args__ == ("auto", *NAMES)
