"""What is wrong with a configuration, where, and what to do: how ``maxtext_like.config`` reports faults."""

import difflib
import functools
import re
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


def alternatives(names: Iterable[str]) -> str:
  """``a, b or c``."""
  *most, last = names
  return f"{', '.join(most)} or {last}" if most else last


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
  """The known names closest to a given one, best first, by their letters or by their words.

  By letters ``flaot32_logits`` is near ``float32_logits``, by words ``batch_size`` is near ``per_device_batch_size``;
  ``data_sharding`` is near ``allow_data_change`` by neither. Upper case and dashes do not count as differences.
  """
  rated = sorted(((max(_by_letters(name, k) / _LETTERS, _by_words(name, k) / _WORDS), k) for k in known), key=lambda r: -r[0])
  return [k for rating, k in rated[:count] if rating >= 1]


def is_misspelling(name: str, known: str) -> bool:
  """Whether each word of a name is a word of the known one with a slip of the fingers in it."""
  given, meant = _words(name), _words(known)
  return len(given) == len(meant) and all(_ratio(a, b, _LETTERS) for a, b in zip(given, meant, strict=True))


_LETTERS, _WORDS = 0.7, 0.66  # least similarities that make names near


def _fold(name: str) -> str:
  return name.lower().replace("-", "_")


@functools.cache
def _words(name: str) -> list[str]:
  return re.split(r"[_.]+", _fold(name))


def _ratio(a: str, b: str, least: float) -> float:
  """difflib's similarity of two texts, or 0 where it is below ``least``, which is mostly known at once."""
  if 2 * min(len(a), len(b)) < least * (len(a) + len(b)):
    return 0.0
  matcher = difflib.SequenceMatcher(None, a, b)
  return ratio if matcher.quick_ratio() >= least and (ratio := matcher.ratio()) >= least else 0.0


def _by_letters(a: str, b: str) -> float:
  return _ratio(_fold(a), _fold(b), _LETTERS)


def _by_words(a: str, b: str) -> float:
  """Words that two names share, as a share of the words of both (Dice's coefficient)."""
  ours, theirs = _words(a), _words(b)
  return 2 * sum(max(_alike(a, b) for b in theirs) for a in ours) / (len(ours) + len(theirs))


def _alike(a: str, b: str) -> float:
  """1 for the same word, also with a slip of the fingers; 0.8 when one is cut short, as ``len`` for ``length``; else 0."""
  short, long = sorted((a, b), key=len)
  if a == b:
    return 1.0
  if len(short) > 2 and long.startswith(short):
    return 0.8
  return float(len(short) > 3 and _ratio(a, b, 0.8) > 0)


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


class Checked:
  """A section that refuses contradictions when it is built."""

  def __post_init__(self):
    if problems := list(self.problems()):
      raise InvalidSectionError(problems)

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values."""
    yield from ()


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
