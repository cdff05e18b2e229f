"""The held-out split and the order of reading."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.data.order import Order, Share


@settings(deadline=None)
@given(st.integers(1, 500), st.fractions(0, Fraction(99, 100), max_denominator=200))
def test_splits_are_disjoint_complete_and_stable(documents, fraction):
  train, held_out = (list(Share(documents, float(fraction), split)) for split in ("train", "eval"))
  assert sorted([*train, *held_out]) == list(range(documents))
  assert len(held_out) == int(documents * fraction)
  assert held_out == [i for i in range(documents) if (i + 1) * fraction // 1 > i * fraction // 1]
  assert list(Share(documents + 37, float(fraction), "eval"))[: len(held_out)] == held_out
  for split, kept in (("train", train), ("eval", held_out)):
    share = Share(documents, float(fraction), split)
    assert [share.before(i) for i in range(documents + 1)] == [sum(k < i for k in kept) for i in range(documents + 1)]


def test_an_impossible_fraction():
  with pytest.raises(ValueError, match=r"eval_fraction is 1\.0"):
    Share(10, 1.0)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**31), st.booleans())
def test_every_epoch_visits_every_document_once(documents, seed, grouped):
  indices = Share(3 * documents, 2 / 3)  # 0, 3, 6, ...
  groups = list(range(0, 3 * documents, 7)) if grouped else None
  order = Order(indices, shuffle_seed=seed, passes=None, groups=groups)
  stream = [order[i] for i in range(3 * documents)]
  for epoch in range(3):
    assert sorted(stream[epoch * documents : (epoch + 1) * documents]) == list(indices)
  if grouped:  # inside an epoch, a group is read to its end before the next one starts
    visited = [number // 7 for number in stream[:documents]]
    assert len([1 for a, b in pairwise(visited) if a != b]) == len(set(visited)) - 1


def test_large_sets_are_permuted_without_a_table(monkeypatch):
  monkeypatch.setattr("maxtext_like.data.order.TABLE_UP_TO", 0)
  order = Order(Share(1500), shuffle_seed=3, passes=None)
  first, second = ([order[epoch * 1500 + i] for i in range(1500)] for epoch in (0, 1))
  assert sorted(first) == sorted(second) == list(range(1500))
  assert first != second


def test_epochs_and_seeds_have_their_own_order():
  def order(seed):
    return Order(Share(40), shuffle_seed=seed, passes=None)

  epochs = {tuple(order(seed)[epoch * 40 + i] for i in range(40)) for seed in (0, 1) for epoch in (0, 1)}
  assert len(epochs) == 4
  assert tuple(range(40)) not in epochs
  assert [order(5)[i] for i in range(99)] == [order(5)[i] for i in range(99)]


def test_without_shuffling_and_for_one_pass():
  order = Order(Share(10, 0.3, "eval"), shuffle_seed=None, passes=1)
  assert len(order) == 3
  assert [order[i] for i in range(3)] == [3, 6, 9]
