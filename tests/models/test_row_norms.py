"""Tests sums of squares by row: the form with few GPU kernels gives the same results as the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.models import row_norms


@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
def test_few_kernels_give_the_same_sums(bad):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  layer = {"norm": draw(3, 5), "weight": draw(3, 5, 2), "scale": draw(3, 5).astype(jnp.bfloat16), "scalar": draw(3)}
  tree = {"embedding": draw(4, 3), "norm": draw(5), "bias": draw(5), "scalar": draw(), "stack_0": {"layer_0": layer}}
  if bad is not None:
    layer["norm"] = layer["norm"].at[1, 2].set(bad)
  plain = row_norms.plain_squares(tree).small
  few = jax.jit(row_norms._sums_of_kernels, static_argnames="terms")(tree, terms=jnp.square)
  assert plain.shape == (4 + 4 * 3,)
  np.testing.assert_allclose(few, plain, rtol=1e-6)
  assert np.isfinite(few).all() == (bad is None)


def test_sums_read_no_array_of_zeros():
  """Without the barrier, XLA for GPUs wrote zeros into memory. It merges equal constants, so one array of zeros for all stacks
  stayed in GPU memory: 1.26 GB for qwen3-0.6b with Adafactor."""
  jaxpr = str(jax.make_jaxpr(row_norms._terms)(jnp.ones((3, 5))))
  assert "optimization_barrier 0.0" in jaxpr
  before, behind = jaxpr.split("optimization_barrier 0.0")
  assert "0.0:f32" not in behind
  assert "select_n" not in before


def test_an_adapter_has_the_rows_of_its_layers():
  tree = {"adapter": {"stack_0": {"layer_0": {"lora_a": jnp.ones((3, 2, 2))}}}, "head": {"kernel": jnp.ones((2, 2))}}
  np.testing.assert_array_equal(row_norms.row_squares(tree).small, [4, 4, 4, 4])


def test_peaks_of_rows_are_largest_magnitudes_and_infinite_where_a_number_is_not_finite():
  stacked = jnp.asarray([[[1.0, -3.0]], [[np.nan, 2.0]], [[0.0, 0.0]]])
  codes = jnp.full((2, 4), 7, jnp.int8)  # codes of a quantized weight, which mean nothing without their scales
  tree = {"norm": jnp.asarray([2.0, -(2.0**120)]), "scalar": jnp.asarray(-np.inf), "stack_0": {"a": stacked, "b": codes}}
  np.testing.assert_array_equal(row_norms.row_peaks(tree), np.asarray([2.0**120, np.inf, 3, np.inf, 0, 0, 0], np.float32))
