"""What is wrong with a configuration, where, and what to do: how ``maxtext_like.config`` reports faults."""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from maxtext_like.errors import UserError


@dataclass(frozen=True)
class Problem:
  """One fault.

  Attributes:
    what: the fault with the values, one line.
    keys: names of the leaves that take part; the loader turns them into places (file and line, or the command line).
    fix: what to do about it, one line; may be empty.
    where: the place itself, where it is known at once.
  """

  what: str
  keys: tuple[str, ...] = ()
  fix: str = ""
  where: str = ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """The end of a sentence, ``, did you mean 'steps'?``, or nothing when no known name is near."""
  near = nearest(name, known)
  return f", did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
  """The known names closest to a misspelt one, best first; upper case and dashes do not count as differences."""
  by_folded = {k.lower().replace("-", "_"): k for k in known}
  folded = name.lower().replace("-", "_")
  return [by_folded[m] for m in difflib.get_close_matches(folded, by_folded, n=count, cutoff=0.6)]


def error_of(problems: list[Problem]) -> UserError:
  """One error that lists every problem: ``what`` / ``where:`` / ``fix:``."""
  if len(problems) == 1:
    return UserError(_lines(problems[0], indent="  "))
  text = [f"{len(problems)} problems in the configuration"]
  text += [f"  {i}. " + _lines(problem, indent="     ") for i, problem in enumerate(problems, start=1)]
  return UserError("\n".join(text))


def _lines(problem: Problem, indent: str) -> str:
  lines = [problem.what]
  if problem.where:
    lines.append(f"{indent}where: {problem.where}")
  if problem.fix:
    lines.append(f"{indent}fix: {problem.fix}")
  return "\n".join(lines)


class InvalidSectionError(ValueError):
  """A section was built with values that contradict each other."""

  def __init__(self, problems: list[Problem]):
    super().__init__("; ".join(p.what + (f" ({p.fix})" if p.fix else "") for p in problems))
    self.problems = problems


def at_least(section: object, low: int, *names: str) -> Iterator[Problem]:
  """A problem for each named value that is below ``low``; null is not judged."""
  for name in names:
    value = getattr(section, name)
    if value is not None and value < low:
      yield Problem(f"{name} = {value} is below {low}", (name,), f"set {name} to {low} or more")


def above_zero(section: object, *names: str) -> Iterator[Problem]:
  """A problem for each named value that is not positive; null is not judged."""
  for name in names:
    value = getattr(section, name)
    if value is not None and not value > 0:
      yield Problem(f"{name} = {value} is not above 0", (name,), f"set {name} above 0")
