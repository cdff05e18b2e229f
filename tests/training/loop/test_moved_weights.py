"""The warning that a step changes few of the 16-bit weights. The states are made by hand, so that no step is compiled."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxtext_like.training.loop.moved_weights import MovedWeights
from maxtext_like.training.step.program import TrainProgram, make_program
from tests.training.small import small_config

HALF = ("weight_dtype=bfloat16", "num_decoder_layers=2", "steps=20")


@functools.cache
def program(*words: str) -> TrainProgram:
  return make_program(small_config("gemma3-tiny", *HALF, *words))


def state(of: TrainProgram, moved: float = 0.0, layers: slice = slice(None)) -> dict[str, Any]:
  """Return a state with weights of 1. In the matrices of ``layers`` the first rows, a fraction ``moved`` of them, are one
  spacing larger."""

  def weights(path, x):
    ones = jnp.ones(x.shape, x.dtype)
    rows = round(moved * x.shape[1]) if len(x.shape) > 2 and "stack" in str(path) else 0
    return ones.at[layers, :rows].add(2.0**-7) if rows else ones

  return {"params": jax.tree_util.tree_map_with_path(weights, of.abstract_state["params"])}


def said(
  of: TrainProgram, moved: float, *, start: int = 0, at: int = 1, skipped: int = 0, layers: slice = slice(None)
) -> list[str]:
  """Return the warnings of 10 steps. Step ``at`` changes the fraction ``moved`` of the matrices in ``layers``; the other steps
  change nothing."""
  watch, lines = MovedWeights(of, start), []
  for step in range(start + 1, start + 11):
    if step == watch.step:
      watch.before(state(of))
      after = state(of, moved, layers) if step == at else state(of)
      lines.append(watch.after(after, skipped=step - start <= skipped))
  return [line for line in lines if line is not None]


def test_few_weights_that_move_are_told_once_with_both_remedies():
  (line,) = said(program(), 0.0)
  assert line.startswith("step 1: WARNING: only 0.0% of the bfloat16 weights changed (sample of ")
  assert "learning rate 0.05)" in line
  assert "stochastic_rounding=true" in line
  assert "weight_dtype=float32" in line


def test_most_weights_that_move_are_enough():
  assert said(program(), 0.75) == []
  assert len(said(program(), 0.25)) == 1


@pytest.mark.parametrize("words", ["weight_dtype=float32", "stochastic_rounding=true", "update_survival_every=5"])
def test_nothing_is_measured_where_it_means_nothing_or_is_measured_already(words):
  assert said(program(words), 0.0) == []


def test_the_step_with_the_highest_rate_is_measured_and_the_next_one_if_it_is_skipped():
  warm = program("warmup_steps_fraction=0.25")  # 5 of 20 steps
  (line,) = said(warm, 0.0)
  assert line.startswith("step 5: ")
  assert said(warm, 1.0, at=5) == []
  assert said(warm, 1.0, at=1) != []
  assert said(program(), 1.0, at=3, skipped=2) == []
  assert said(program("lr_schedule_type=linear"), 0.0, start=4)[0].startswith(
    "step 5: "
  )  # the rate falls, so a resumed run measures its first step


@pytest.mark.slow
def test_layers_that_a_mask_freezes_do_not_count():
  first = program(r"trainable_parameters_mask=[layers\.0\.]")
  assert said(first, 1.0, layers=slice(0, 1)) == []
  assert len(said(first, 1.0, layers=slice(1, 2))) == 1
