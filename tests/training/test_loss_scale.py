"""Dynamic loss scaling: halve and forget, count and double, within bounds."""

import jax.numpy as jnp
import pytest

from maxtext_like.training import loss_scale


def after(scale: float, good: int, finite: bool) -> tuple[float, int]:
  state = {"scale": jnp.float32(scale), "good_steps": jnp.int32(good)}
  new = loss_scale.updated(state, jnp.asarray(finite))
  assert new["good_steps"].dtype == jnp.int32
  assert new["scale"].dtype == jnp.float32
  return float(new["scale"]), int(new["good_steps"])


@pytest.mark.parametrize(
  ("before", "expected"),
  [
    ((2.0**15, 0, True), (2.0**15, 1)),
    ((2.0**15, 1998, True), (2.0**15, 1999)),
    ((2.0**15, 1999, True), (2.0**16, 0)),
    ((2.0**15, 1999, False), (2.0**14, 0)),
    ((2.0**24, 1999, True), (2.0**24, 0)),
    ((2.0**-14, 7, False), (2.0**-14, 0)),
  ],
)
def test_updated(before, expected):
  assert after(*before) == expected


def test_initial():
  state = loss_scale.initial(1024.0)
  assert (float(state["scale"]), int(state["good_steps"])) == (1024.0, 0)
