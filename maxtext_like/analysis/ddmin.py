"""Delta debugging: a small set of changes that does what all of them together do (Zeller and Hildebrandt 2002)."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Unit = TypeVar("Unit", bound=Hashable)


def ddmin(units: Sequence[Unit], works: Callable[[tuple[Unit, ...]], bool]) -> tuple[Unit, ...]:
  """A part of ``units`` that works, and none of whose units can be left out: it is 1-minimal.

  Args:
    units: all changes, preferred ones first. Together they work, and none of them does not.
    works: the test, called with parts of ``units`` in their order. A part may be asked for twice; remember the answers.

  Returns:
    The units, in order. Where several parts would do, the one found first; a smaller one that shares no unit with it may
    exist.
  """
  kept, pieces = tuple(units), 2
  while len(kept) > 1:
    chunks = _chunks(kept, pieces)
    if alone := next((chunk for chunk in chunks if works(chunk)), None):
      kept, pieces = alone, 2
      continue
    rests = [tuple(u for u in kept if u not in chunk) for chunk in chunks] if pieces > 2 else []
    # From the end: what is preferred is kept.
    if fewer := next((rest for rest in reversed(rests) if works(rest)), None):
      kept, pieces = fewer, max(pieces - 1, 2)
    elif pieces >= len(kept):
      return kept
    else:
      pieces = min(2 * pieces, len(kept))
  return kept


def _chunks(units: tuple[Unit, ...], pieces: int) -> list[tuple[Unit, ...]]:
  """``pieces`` parts of nearly equal size."""
  edges = [len(units) * i // pieces for i in range(pieces + 1)]
  return [units[a:b] for a, b in itertools.pairwise(edges)]
