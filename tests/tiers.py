"""Which cases of a parametrized test run when: quick, slow (once in CI) or nightly."""

from collections.abc import Iterable

import pytest


def tiers(cases: Iterable[str], quick: Iterable[str] = (), slow: Iterable[str] = ()) -> list:
  """Return the cases as pytest parameters: those of neither ``quick`` nor ``slow`` are nightly.

  Raises:
    AssertionError: ``quick`` or ``slow`` names a case that does not exist.
  """
  cases, quick, slow = list(cases), set(quick), set(slow)
  assert quick | slow <= set(cases), (quick | slow) - set(cases)
  marks = lambda case: [] if case in quick else pytest.mark.slow if case in slow else pytest.mark.nightly
  return [pytest.param(case, marks=marks(case)) for case in cases]
