"""Learning-rate schedules, compared with their formulas."""

import math

import numpy as np
import pytest

from maxtext_like.training.optimizers.schedule import make_schedule
from tests.tiers import slow
from tests.training.toy import toy_config


def rates(kind: str, *more: str) -> list[float]:
  settings = ["steps=10", "learning_rate=2.0", "warmup_steps_fraction=0.2", "learning_rate_final_fraction=0.25"]
  config = toy_config(*settings, f"lr_schedule_type={kind}", *more)
  schedule = make_schedule(config.training)
  return [float(schedule(step)) for step in range(11)]


def test_warm_up_never_spends_a_step_on_rate_0():
  for kind in ("cosine", "linear", "constant", "wsd"):
    assert rates(kind)[:2] == [1.0, 2.0]


def test_cosine():
  expected = [0.5 + 1.5 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
  np.testing.assert_allclose(rates("cosine")[2:], expected, rtol=1e-6)


def test_linear():
  np.testing.assert_allclose(rates("linear")[2:], [2.0 - 1.5 * k / 8 for k in range(9)], rtol=1e-6)


def test_constant():
  assert rates("constant")[2:] == [2.0] * 9


def test_wsd_is_constant_then_falls_in_its_last_part():
  found = rates("wsd", "wsd_decay_steps_fraction=0.4")
  np.testing.assert_allclose(found[2:], [2.0] * 5 + [1.625, 1.25, 0.875, 0.5], rtol=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_a_schedule_of_its_own_length_does_not_follow_steps(kind):
  frozen = rates(kind, "steps=37", "lr_schedule_steps=10")
  assert frozen == rates(kind)
  assert frozen != rates(kind, "steps=37")


def test_a_schedule_may_be_longer_than_the_run():
  assert rates("linear", "steps=5", "lr_schedule_steps=10") == rates("linear")


@pytest.mark.parametrize("kind", ["cosine", "linear", slow("wsd")])
def test_the_end_is_held(kind):
  schedule = make_schedule(toy_config("steps=10", "learning_rate=2.0", f"lr_schedule_type={kind}").training)
  assert float(schedule(25)) == pytest.approx(0.2)
