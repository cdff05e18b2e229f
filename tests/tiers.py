"""When the cases of a parametrized test run: quick, slow (once in CI) or nightly.

``tiers`` sorts a list of names. ``slow`` and ``nightly`` mark one row of a written-out table.
"""

from collections.abc import Hashable, Iterable
from typing import Any, Literal

import pytest


def slow(*values: object) -> Any:
  """Return the values of one case as a slow pytest parameter."""
  return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: object) -> Any:
  """Return the values of one case as a nightly pytest parameter."""
  return pytest.param(*values, marks=pytest.mark.nightly)


def tiers(
  cases: Iterable[Hashable],
  quick: Iterable[Hashable] = (),
  slow: Iterable[Hashable] = (),
  rest: Literal["slow", "nightly"] = "nightly",
) -> list[Any]:
  """Return the cases as pytest parameters. A tuple is a case with several values.

  Args:
    cases: every case, in order.
    quick: cases without a mark.
    slow: slow cases.
    rest: mark of the cases that are neither in ``quick`` nor in ``slow``.

  Raises:
    AssertionError: ``quick`` or ``slow`` names a case that does not exist.
  """
  cases, quick, slow = list(cases), set(quick), set(slow)
  assert quick | slow <= set(cases), (quick | slow) - set(cases)
  marks = lambda case: [] if case in quick else getattr(pytest.mark, "slow" if case in slow else rest)
  return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case)) for case in cases]
