"""Tests declared arrays: initialization, stacking, and sharding specs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.param import Param, abstract, constant, count, fan_in, init, normal, stack

SPEC = {"a": {"w": Param((3, 5), ("embed", "mlp"))}, "b": Param((7,), (None,), "bfloat16", constant(1.0))}


def test_init_gives_shapes_dtypes_and_is_the_same_for_the_same_key():
  one, two = init(SPEC, jax.random.key(0)), init(SPEC, jax.random.key(0))
  assert one["a"]["w"].shape == (3, 5)
  assert one["b"].dtype == jnp.bfloat16
  assert (one["a"]["w"] == two["a"]["w"]).all()
  assert not (one["a"]["w"] == init(SPEC, jax.random.key(1))["a"]["w"]).all()


def test_adding_a_param_moves_no_other():
  more = {**SPEC, "a": {**SPEC["a"], "aa": Param((2,), (None,), init=normal(1.0))}}
  assert (init(more, jax.random.key(0))["a"]["w"] == init(SPEC, jax.random.key(0))["a"]["w"]).all()


def test_a_deeper_stack_begins_with_the_same_rows():
  two, five = (init(stack(SPEC, n), jax.random.key(3)) for n in (2, 5))
  assert five["a"]["w"].shape == (5, 3, 5)
  np.testing.assert_array_equal(two["a"]["w"], five["a"]["w"][:2])
  assert not (five["a"]["w"][0] == five["a"]["w"][1]).all()
  assert stack(SPEC, 4)["a"]["w"].axes == ("layers", "embed", "mlp")


@pytest.mark.parametrize(
  ("shape", "axes", "in_size"), [((300, 40), (0,), 300), ((4, 300, 40), (1,), 300), ((30, 10, 40), (0, 1), 300)]
)
def test_fan_in_counts_the_axes_that_are_summed(shape, axes, in_size):
  w = fan_in(*axes)(jax.random.bits(jax.random.key(0), shape))
  np.testing.assert_allclose(np.std(w), in_size**-0.5, rtol=0.03)


def test_shape_and_axes_must_match():
  with pytest.raises(ValueError, match=r"shape \(2, 3\) and axes \('embed',\)"):
    Param((2, 3), ("embed",))


def test_abstract_and_count():
  shapes = abstract(SPEC)
  assert shapes["b"].shape == (7,)
  assert shapes["b"].dtype == jnp.bfloat16
  assert count(SPEC) == 22
  assert count(stack(SPEC, 3)) == 66
