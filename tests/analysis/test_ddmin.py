"""Delta debugging on small sets: the result passes the test, and it fails without any one of its elements."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtext_like.analysis.ddmin import ddmin


@pytest.mark.parametrize("culprits", [{0}, {7}, {3}, {0, 7}, {3, 4}, {1, 4, 6}, set(range(8))])
def test_culprits_are_found_exactly(culprits):
  asked = []

  def works(part):
    asked.append(part)
    return culprits <= set(part)

  assert set(ddmin(range(8), works)) == culprits
  if len(culprits) == 1:
    assert len(asked) <= 2 * 3  # two halves, three times


def test_of_several_answers_the_first_one_that_is_preferred():
  assert ddmin("abcdef", lambda part: bool({"b", "e"} & set(part))) == ("b",)


@given(st.lists(st.sets(st.integers(0, 6), min_size=1), min_size=1, max_size=4))
def test_what_is_found_works_and_is_minimal(answers):
  """A part works if it contains one of the drawn sets. Such a test is monotone, so ddmin returns a minimal part."""

  def works(part):
    return any(a <= set(part) for a in answers)

  found = ddmin(range(7), works)
  assert works(found)
  assert not any(works(rest) for rest in itertools.combinations(found, len(found) - 1))


def test_a_test_that_is_not_monotone():
  """Change 1 undoes change 0, and change 2 repairs that: {0} works, {0, 1} does not, and all three together do."""

  def works(part):
    return set(part) in ({0}, {0, 1, 2}, {0, 2})

  found = ddmin(range(3), works)
  assert works(found)
  assert not any(works(rest) for rest in itertools.combinations(found, len(found) - 1))
