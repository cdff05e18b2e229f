"""Tests the guard around an optimizer: a finite update equals that of the optimizer alone, and a non-finite update changes
nothing."""

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxtext_like.errors import NonFiniteError
from maxtext_like.numerics.finite_guard import FiniteGuard

PARAMS = {"a": jnp.arange(6.0).reshape(2, 3) / 7, "b": {"w": jnp.ones(5, jnp.bfloat16)}}
GRADS = jax.tree.map(lambda p: (p * 0.3 + 0.1).astype(p.dtype), PARAMS)
ADAM: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 9), weight_decay=0.1))


def poisoned(value, leaf="a"):
  grads = jax.tree.map(jnp.copy, GRADS)
  where = grads["b"] if leaf == "w" else grads
  where[leaf] = where[leaf].at[(1,) * where[leaf].ndim].set(value)
  return grads


def same(one, other):
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other)


@pytest.mark.parametrize(
  "inner", [ADAM, optax.sgd(0.1, momentum=0.9), optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()]
)
def test_finite_steps_are_those_of_the_optimizer_alone(inner):
  guard: Any = FiniteGuard(inner)
  plain, guarded, params = inner.init(PARAMS), guard.init(PARAMS), PARAMS
  step = jax.jit(guard.update)
  for _ in range(3):
    expected, plain = jax.jit(inner.update)(GRADS, plain, params)
    got, guarded = step(GRADS, guarded, params)
    same(got, expected)
    params = optax.apply_updates(params, got)
  same(guarded.inner, plain)
  assert guard.check(guarded, params).skipped == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("leaf", ["a", "w"])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(value, leaf):
  guard: Any = FiniteGuard(ADAM)
  _, before = guard.update(GRADS, guard.init(PARAMS), PARAMS)
  updates, after = jax.jit(guard.update)(poisoned(value, leaf), before, PARAMS)
  same(updates, jax.tree.map(jnp.zeros_like, PARAMS))
  same(after.inner, before.inner)
  name = "b.w" if leaf == "w" else "a"
  with pytest.raises(NonFiniteError, match=rf"\(1 in a row\): non-finite gradients of {name};"):
    guard.check(after, PARAMS)


def test_it_never_gives_in_and_goes_on_afterwards():
  """The guard rejects any number of non-finite updates in a row. The next finite update is the same as without the rejected
  ones."""
  guard: Any = FiniteGuard(ADAM)
  state = start = guard.init(PARAMS)
  for n in range(1, 8):  # optax.apply_if_finite applies an update after too many rejections
    updates, state = jax.jit(guard.update)(poisoned(np.nan), state, PARAMS)
    assert not any(np.any(np.asarray(u, np.float32)) for u in jax.tree.leaves(updates))
    assert guard.verdict(state, PARAMS).skipped_in_row == n
  assert guard.check(state, PARAMS, max_skipped=8).skipped == 7
  expected, _ = ADAM.update(GRADS, start.inner, PARAMS)
  updates, state = guard.update(GRADS, state, PARAMS)
  same(updates, expected)
  verdict = guard.verdict(state, PARAMS)
  assert (verdict.applied, verdict.skipped, verdict.skipped_in_row) == (True, 7, 0)
  assert str(verdict).startswith("applied; 7 ")


def test_a_parameter_that_would_leave_its_dtype_is_found():
  """Gradients and update are finite, but the sum of the update and a float16 parameter is infinite."""
  params = {"w": jnp.full(3, 6e4, jnp.float16), "v": jnp.zeros(2)}
  guard: Any = FiniteGuard(optax.sgd(1.0))
  grads = {"w": jnp.full(3, -3e4, jnp.float16), "v": jnp.ones(2)}
  updates, state = guard.update(grads, guard.init(params), params)
  assert guard.verdict(state, params).parameters == ("w",)
  assert not np.any(np.asarray(updates["v"]))


def test_a_state_that_leaves_float32_is_found():
  guard: Any = FiniteGuard(optax.adam(1e-3))
  params = {"w": jnp.ones(2)}
  _, state = guard.update({"w": jnp.full(2, 1e25)}, guard.init(params), params)  # its square in nu is infinite
  verdict = guard.verdict(state, params)
  assert (verdict.applied, verdict.gradients, verdict.optimizer) == (False, (), False)
  assert "non-finite optimizer state" in str(verdict)
  assert np.isfinite(np.asarray(jax.tree.leaves(state.inner)[1])).all()


def test_around_the_optimizer_of_an_nnx_model():
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, FiniteGuard(optax.adamw(1e-2)), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.sum(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss

  before = np.asarray(model.kernel[...])
  step(model, optimizer, jnp.full((4, 3), np.nan))
  np.testing.assert_array_equal(before, np.asarray(model.kernel[...]))
  with pytest.raises(NonFiniteError, match="non-finite gradients of bias, kernel"):
    FiniteGuard.check(optimizer.opt_state, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  step(model, optimizer, jnp.ones((4, 3)))
  assert np.any(before != np.asarray(model.kernel[...]))
  assert FiniteGuard.check(optimizer.opt_state, nnx.to_pure_dict(nnx.state(model, nnx.Param))).applied


def test_a_state_or_a_tree_that_is_not_its_own_is_told():
  guard: Any = FiniteGuard(ADAM)
  state = guard.init(PARAMS)
  with pytest.raises(ValueError, match=r"not the state of a FiniteGuard\n  fix: .*FiniteGuard\(optax.chain"):
    guard.verdict((state, ()), PARAMS)
  with pytest.raises(ValueError, match=r"params has 1 arrays, .* 2\n  fix: .*trained tree"):
    guard.verdict(state, {"a": PARAMS["a"]})


def test_what_is_no_transformation_is_told():
  wrong: Any
  for wrong in (1e-3, optax.adamw, None):
    with pytest.raises(TypeError, match=r"not an optax transformation\n  fix: FiniteGuard\(optax.adamw"):
      FiniteGuard(wrong)


def test_an_optimizer_of_nnx_is_told_to_give_its_state():
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, FiniteGuard(optax.sgd(0.1)), wrt=nnx.Param)
  with pytest.raises(ValueError, match=r"is not the state of a FiniteGuard\n  fix: .*opt_state"):
    FiniteGuard.verdict(optimizer, nnx.state(model))
