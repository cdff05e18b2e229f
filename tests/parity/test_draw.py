"""The fuzzer's cases: a seed always gives the same case, our config reader accepts it, and all kinds of rows occur."""

import numpy as np
import pytest

from maxtext_like.checkpoint.huggingface.config import interpret
from tests.parity.draw import FAMILIES, IGNORED, TILE, Case, arrays, draw
from tests.parity.shrink import shrink, simpler

SEEDS = range(40)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_reader_takes_what_is_drawn(family: str):
  for seed in SEEDS:
    case = draw(family, seed)
    assert case == draw(family, seed)
    assert interpret(case.config, f"{family} {seed}").model["vocab_size"] == case.text["vocab_size"]


def test_every_kind_is_drawn():
  cases = [draw(family, seed) for family in FAMILIES for seed in SEEDS]
  assert {case.form for case in cases} == {"hub", "saved", "memory"}
  long = {case.tokens for case in cases if case.length > TILE}
  assert long == {"plain", "right", "left", "left, positions", "packed", "offset"}
  assert {case.images > 0 for case in cases if "vision" in case.family} == {True, False}
  windows = {case.text.get("sliding_window") for case in cases if case.length > TILE}
  assert {TILE - 1, TILE, TILE + 1, 129} <= windows


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_stand_where_a_prediction_has_a_meaning(family: str, seed: int):
  case = draw(family, seed)
  found = arrays(case)
  for name, array in arrays(case).items():
    np.testing.assert_array_equal(array, found[name])
  ids, labels = found["input_ids"], found["labels"]
  assert ids.shape == (case.rows, case.length)
  assert (labels[:, 1:] != IGNORED).any()
  mask = found.get("attention_mask", np.ones(ids.shape))
  assert (labels[mask == 0] == IGNORED).all()
  assert (labels[:, 1:][(mask[:, 1:] == 1) & (mask[:, :-1] == 0)] == IGNORED).all()
  if case.tokens == "packed":
    assert (labels[:, 1:][np.diff(found["position_ids"], axis=1) != 1] == IGNORED).all()


def size(case: Case) -> tuple:
  """Returns a key that compares the sizes of cases."""
  plain = [case.tokens == "plain", case.form == "hub", case.stored == "float32", not case.words]
  return case.images, case.text["num_hidden_layers"], case.rows, case.length, case.text["num_attention_heads"], -sum(plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_shrinking_tries_is_another_case_and_no_larger(family: str):
  case = draw(family, 3)
  found = simpler(case)
  assert len(found) > 10
  for change, other in found:
    assert other != case, change
    assert all(a <= b for a, b in zip(size(other), size(case), strict=True)), change
    arrays(other)  # the images still fit in a row


def test_shrinking_keeps_what_fails():
  """The simulated fault needs a sliding window, two layers and a row longer than a tile. Shrinking removes all else."""
  case = next(
    case for case in (draw("gemma3", seed) for seed in SEEDS) if case.length > 600 and case.text["num_hidden_layers"] > 2
  )

  def fails(case: Case) -> bool:
    return case.length > TILE and case.text["num_hidden_layers"] >= 2 and case.text["sliding_window"] != 4096

  assert fails(case)
  smaller = shrink(case, fails)
  assert fails(smaller)
  assert (smaller.length, smaller.text["num_hidden_layers"], smaller.rows) == (TILE + 1, 2, 1)
  assert (smaller.tokens, smaller.form, smaller.words) == ("plain", "hub", ())
