"""What rounding takes from weights and the first moment pays, against updates written out in numpy and float32 weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.layers.param import Param
from maxtext_like.models.naming import path_keys
from maxtext_like.training.optimizers import moments
from maxtext_like.training.optimizers.dynamic8 import Blocks
from maxtext_like.training.optimizers.feedback import Settling
from maxtext_like.training.optimizers.optimizer import Optimizer, make_optimizer
from maxtext_like.training.rounding import StochasticRounding
from maxtext_like.training.schedule import make_schedule
from tests.training.optimizers.test_moments import at
from tests.training.toy import toy_config

ROUNDED = ("weight_dtype=bfloat16", "stochastic_rounding=true", "rounding_feedback=true", "mu_dtype=float32")
SPEC = {
  "stack_0": {"matrix": Param((3, 48, 96), ("layers", "embed", "mlp")), "norm": Param((3, 48), ("layers", "embed"))},
  "table": Param((160, 32), ("vocab", "embed")),
  "frozen": None,
}
MASKS = {"stack_0": {"matrix": np.array([True, False, True]), "norm": True}, "table": True, "frozen": None}
TRAINED = {**MASKS, "stack_0": {"matrix": True, "norm": True}}
PLAIN = ("weight_dtype=float32", "stochastic_rounding=false", "rounding_feedback=false")
SCHEDULE = ("lr_schedule_type=cosine", "steps=30", "warmup_steps_fraction=0.2", "learning_rate=1e-4")


def draw(seed: int) -> Any:
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), SPEC)


def begun(*words: str) -> tuple[Optimizer, Any, Any, Any]:
  """(the optimizer, weights in bfloat16, its first state, a function (gradients, state, weights, step, masks) -> settled)."""
  config = toy_config(*ROUNDED, *SCHEDULE, *words)
  optimizer = make_optimizer(config.training, SPEC, "bfloat16")
  params = jax.tree.map(lambda x: jnp.asarray(0.05 * x, jnp.bfloat16), draw(0))
  schedule, rounding = make_schedule(config.training), StochasticRounding(7)

  def settle(grads, state, params, step, masks):
    return optimizer.settle(grads, state, params, Settling(rounding, masks, schedule, schedule(step), step))

  return optimizer, params, optimizer.init(params), settle


def spacing(x: np.ndarray) -> np.ndarray:
  """Of bfloat16, beside numbers that are not tiny."""
  return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 1e-30))) - 7)


def test_what_is_lost_is_what_the_moment_owes():
  """Three updates of AdamW with decay, a frozen row, and warm-up, written out in float64 from the weights that were stored."""
  words = ("opt_type=adamw", "adam_b1=0.8", "adam_b2=0.9", "adam_weight_decay=0.1")
  optimizer, params, state, settle = begun(*words)
  schedule = make_schedule(toy_config(*ROUNDED, *SCHEDULE, *words).training)
  expected = {path: (np.zeros(p.shape), np.zeros(p.shape)) for path, p in jax.tree_util.tree_leaves_with_path(SPEC)}
  run = jax.jit(lambda *given: settle(*given, MASKS))
  owing = 0
  for step in range(3):
    grads = draw(step + 1)
    direction, after, state = run(grads, state, params, jnp.int32(step))
    later = np.arange(1, 60)
    rates = np.array([float(schedule(step + int(k))) for k in later]) / (1 - 0.8 ** (step + 1 + later))
    to_come = np.sum(0.8**later * rates) / np.sum(0.8**later)
    for path, p in jax.tree_util.tree_leaves_with_path(SPEC):
      get = functools.partial(at, path_keys(path))
      g, before = get(grads).astype(np.float64), np.asarray(get(params), np.float64)
      m, v = expected[path]
      m, v, t = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2, step + 1
      below = np.sqrt(v / (1 - 0.9**t)) + 1e-8
      down = m / (1 - 0.8**t) / below + (0.1 * before if p.axes[-1] != "embed" or "vocab" in p.axes else 0)
      if p.shape == (3, 48, 96):
        down[1] = 0
      moved, stored = before - float(schedule(step)) * down, np.asarray(get(after), np.float64)
      np.testing.assert_allclose(get(direction), down, rtol=1e-4, atol=1e-5)
      assert np.all(np.abs(stored - moved) <= spacing(moved) * 1.001)
      owed = (stored - moved) * np.minimum(1 / to_come, 1e4 / spacing(moved))
      owing += int(np.sum(np.abs(0.25 * owed * below) > 0.1))
      m = m + 0.25 * owed * below
      # An update that is next to nothing beside the weight is a difference of float32 numbers.
      np.testing.assert_allclose(get(state[0].mu), m, rtol=1e-3, atol=2e-2)
      assert optimizer.rule.bound(jnp.float32(np.abs(g).max()), jnp.float32(5.0)).moment >= np.abs(m).max()
      expected[path] = np.asarray(get(state[0].mu), np.float64), v
    np.testing.assert_array_equal(after["stack_0"]["matrix"][1], params["stack_0"]["matrix"][1])
    params = after
  assert owing > 3000  # beside means of gradients of 0.2 to 0.5


@pytest.mark.parametrize(
  ("words", "most"),
  [
    ((), 0.5),
    pytest.param(("mu_dtype=bfloat16",), 0.5, marks=pytest.mark.slow),
    pytest.param(("mu_dtype=dynamic8", "nu_dtype=dynamic8"), 0.55, marks=pytest.mark.slow),
  ],
)
def test_weights_are_where_they_were_meant_to_go(words, most):
  """Root mean squares of errors behind 100 updates by gradients that turn, beside those without feedback."""
  steps = 100
  words = (
    "opt_type=adamw",
    *words,
    f"steps={steps}",
    "lr_schedule_type=cosine",
    "warmup_steps_fraction=0.1",
    "learning_rate=1e-4",
  )

  def ends(*more: str) -> Any:
    _, params, state, settle = begun(*words, *more)
    config = toy_config(*ROUNDED, *SCHEDULE, *words, *more)
    schedule, rounding, optimizer = (
      make_schedule(config.training),
      StochasticRounding(7),
      make_optimizer(config.training, SPEC, ""),
    )
    exact = "weight_dtype=float32" in more
    if exact:
      params = jax.tree.map(lambda x: x.astype(jnp.float32), params)

    def step(carry, number):
      params, state = carry
      key = jax.random.fold_in(jax.random.key(0), number)
      grads = jax.tree.map(lambda x: jax.random.normal(key, x.shape), params)
      if optimizer.owes:
        _, params, state = settle(grads, state, params, number, TRAINED)
      else:
        direction, state = optimizer.update(grads, state, params)
        moved = jax.tree.map(lambda p, d: p.astype(jnp.float32) - schedule(number) * d, params, direction)
        params = moved if exact else rounding(moved, params, number)
      return (params, state), None

    params, _ = jax.jit(lambda *given: jax.lax.scan(step, given, jnp.arange(steps))[0])(params, state)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)

  exact, dropped, paid = ends(*PLAIN), ends("rounding_feedback=false"), ends()
  for path, x in jax.tree_util.tree_leaves_with_path(exact):
    with_it, without = (np.sqrt(np.mean(np.square(at(path_keys(path), found) - x))) for found in (paid, dropped))
    assert with_it < most * without, (path, with_it / without)


def test_pieces_are_settled_as_the_whole_is(monkeypatch):
  words = ("opt_type=adamw", "mu_dtype=dynamic8", "nu_dtype=dynamic8", "adam_weight_decay=0.1")
  _, params, state, settle = begun(*words)
  run = lambda: jax.device_get(jax.jit(lambda *given: settle(*given, MASKS))(draw(1), state, params, jnp.int32(5)))
  whole = run()
  monkeypatch.setattr(moments, "PIECE", 1000)
  pieces = run()
  assert jax.tree.structure(pieces) == jax.tree.structure(whole)
  for a, b in zip(jax.tree.leaves(pieces[1]), jax.tree.leaves(whole[1]), strict=True):
    assert np.mean(a == b) > 0.999  # the same bits for every number, wherever its piece begins
  for a, b in zip(jax.tree.leaves(pieces[2]), jax.tree.leaves(whole[2]), strict=True):
    assert np.mean(np.isclose(a.astype(np.float32), b.astype(np.float32), rtol=1e-4)) > 0.99
  assert any(isinstance(x, Blocks) for x in jax.tree.leaves(whole[2], is_leaf=lambda x: isinstance(x, Blocks)))


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (("stochastic_rounding=false",), "rounding_feedback = true with stochastic_rounding: false"),
    (("opt_type=lion",), "does nothing with opt_type: lion"),
    (("opt_type=adafactor",), "does nothing with opt_type: adafactor"),
    (("adam_b1=0",), "does nothing with opt_type: adamw and adam_b1: 0"),
  ],
)
def test_refused_where_nothing_can_pay(words, said):
  given = [word for word in ROUNDED if word.split("=")[0] not in {w.split("=")[0] for w in words}]
  made = lambda: make_optimizer(load_config("gemma4-tiny", [*given, *words]).config.training, SPEC, "bfloat16")
  with pytest.raises(UserError, match=said):
    made()
