"""The held-out split and the order of reading."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.data.order import Order, Share, shuffled_index


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
  if grouped:  # inside an epoch, a group is read completely before the next one starts
    visited = [number // 7 for number in stream[:documents]]
    assert len([1 for a, b in pairwise(visited) if a != b]) == len(set(visited)) - 1


def test_large_sets_are_permuted_without_a_table(monkeypatch):
  monkeypatch.setattr("maxtext_like.data.order.TABLE_UP_TO", 0)
  order = Order(Share(1500), shuffle_seed=3, passes=None)
  first, second = ([order[epoch * 1500 + i] for i in range(1500)] for epoch in (0, 1))
  assert sorted(first) == sorted(second) == list(range(1500))
  assert first != second


STORED = [
  (1, 2, 3280387012, 0),
  (920, 1500, 506456969, 961),
  (63944, 65538, 901749037, 23342),
  (56723, 100000, 3589583794, 68967),
  (116755, 131073, 3294916953, 115426),
  (619869, 1000000, 3443818037, 787611),
  (665698, 1048578, 4059906722, 297078),
  (106727, 2097153, 131383004, 813468),
  (930287327, 2147483655, 3784870617, 2117076810),
  (3117513184, 4294967296, 4161997890, 3102061072),
  (965352745103, 1099511627776, 2266151100, 1078761394378),
  (0, 70000, 0, 11375),
  (69999, 70000, 4294967295, 40030),
]
"""position, size, seed, result: of grain 0.2.18's ``index_shuffle``, which ordered the documents of older checkpoints."""


@pytest.mark.parametrize(("position", "size", "seed", "expected"), STORED)
def test_the_order_of_stored_checkpoints_is_kept(position, size, seed, expected):
  assert shuffled_index(position, size, seed) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 255, 257, 65536, 65537, 65538, 70000])
@pytest.mark.slow
def test_a_shuffled_index_is_a_permutation(size):
  assert sorted(shuffled_index(i, size, seed=5) for i in range(size)) == list(range(size))


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
