"""Delta debugging: reduces a set of changes to a small subset with the same effect (Zeller and Hildebrandt 2002)."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Unit = TypeVar("Unit", bound=Hashable)


def ddmin(units: Sequence[Unit], works: Callable[[tuple[Unit, ...]], bool]) -> tuple[Unit, ...]:
  """Return a 1-minimal subset of ``units`` that works: no single unit can be removed from it.

  Args:
    units: all changes, preferred ones first. All together must work, and the empty set must not.
    works: the test, called with subsets of ``units`` in their order. It may be called twice with the same subset, so it should
      cache its results.

  Returns:
    The units, in order. If several subsets work, the first one found; a smaller one without common units may exist.
  """
  kept, pieces = tuple(units), 2
  while len(kept) > 1:
    chunks = _chunks(kept, pieces)
    if alone := next((chunk for chunk in chunks if works(chunk)), None):
      kept, pieces = alone, 2
      continue
    rests = [tuple(u for u in kept if u not in chunk) for chunk in chunks] if pieces > 2 else []
    # From the end, so that preferred units are kept.
    if fewer := next((rest for rest in reversed(rests) if works(rest)), None):
      kept, pieces = fewer, max(pieces - 1, 2)
    elif pieces >= len(kept):
      return kept
    else:
      pieces = min(2 * pieces, len(kept))
  return kept


def _chunks(units: tuple[Unit, ...], pieces: int) -> list[tuple[Unit, ...]]:
  """Split into ``pieces`` parts of nearly equal size."""
  edges = [len(units) * i // pieces for i in range(pieces + 1)]
  return [units[a:b] for a, b in itertools.pairwise(edges)]
