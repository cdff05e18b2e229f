"""How the configuration reports problems: what is wrong, where, the fix, and suggestions for misspelled names."""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from maxtext_like.errors import UserError


@dataclass(frozen=True)
class Problem:
  """One problem of a configuration.

  Attributes:
    what: description with the values, one line.
    keys: names of the keys involved; the loader replaces them by places (file and line, or the command line).
    fix: what to type, one line; may be empty.
    where: the place, if the caller knows it already.
  """

  what: str
  keys: tuple[str, ...] = ()
  fix: str = ""
  where: str = ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """Return the end of a sentence, ``, did you mean 'train'?``, or "" if no known name is similar.

  For names of things, such as verbs and platforms. ``did_you_misspell`` is for keys and values.
  """
  near = nearest(name, known)
  return f", did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def did_you_misspell(name: str, known: Iterable[str]) -> str:
  """Return the end of a sentence, ``, did you mean 'steps'?``, or "" if ``name`` is not a misspelling of a known name.

  A key that merely shares words with a known one (``embedding_learning_rate``, ``rope_local_base_freq``) usually means another
  quantity, so it is not offered.
  """
  near = candidates(name, known)
  return f", did you mean {alternatives(map(repr, near))}?" if near else ""


def alternatives(names: Iterable[str]) -> str:
  """Return names as ``a, b or c``."""
  *most, last = names
  return f"{', '.join(most)} or {last}" if most else last


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
  """Return the known names most similar to ``name``, best first, compared by letters and by words.

  ``flaot32_logits`` is similar to ``float32_logits`` by letters, ``batch_size`` to ``per_device_batch_size`` by words.
  ``data_sharding`` and ``allow_data_change`` are similar by neither. Upper case and dashes are ignored.
  """
  rated = sorted(((max(_by_letters(name, k) / _LETTERS, _by_words(name, k) / _WORDS), k) for k in known), key=lambda r: -r[0])
  return [k for rating, k in rated[:count] if rating >= 1]


def misspelled(name: str, known: Iterable[str]) -> str | None:
  """Return the known name that ``name`` misspells, or None. With several candidates, the one with the fewest edits."""
  return next(iter(candidates(name, known)), None)


def candidates(name: str, known: Iterable[str]) -> tuple[str, ...]:
  """Return the known names that ``name`` misspells with the fewest edits, sorted: ``oi_token_id`` may be two of them."""
  given = _spelling(name)
  edits = {k: n for k in known if (n := _edits(given, _spelling(k))) is not None}
  return tuple(sorted(k for k, n in edits.items() if n == min(edits.values())))


@dataclass(frozen=True)
class _Spelling:
  """A name in the form for comparison: words, sorted words, all letters without underscores, and digits."""

  words: tuple[str, ...]
  ordered: tuple[str, ...]
  joined: str
  digits: str


@functools.cache
def _spelling(name: str) -> _Spelling:
  words = tuple(_words(name))
  joined = "".join(words)
  return _Spelling(words, tuple(sorted(words)), joined, re.sub(r"[^0-9]", "", joined))


def _edits(given: _Spelling, meant: _Spelling) -> int | None:
  """Return the number of single-letter mistakes between a known name and the typed one, or None if it is another name.

  Case, dashes, missing underscores and the order of words are ignored. Every word of four letters or more may have one
  mistake, a name two in total. First letters and digits must agree: ``patch_size`` is not ``batch_size``, and ``beta2`` is not
  ``beta1``. A single slip of the keyboard may be anywhere, also in a short word.
  """
  if _abbreviates(given.words, meant.words):
    return 1
  if abs(len(given.joined) - len(meant.joined)) > 2:
    return None
  if given.ordered == meant.ordered or given.joined == meant.joined:
    return 0
  if len(given.words) != len(meant.words) or given.digits != meant.digits:
    return None
  if _is_slip(given.joined, meant.joined):
    return 1
  edits = 0
  for a, b in zip(given.words, meant.words, strict=True):
    if a != b:
      if len(b) < 4 or a[:1] != b[:1] or not _one_edit(a, b):
        return None
      # A word of four letters is too short to have a wrong letter (size, side), but not for a swapped or a missing one.
      if len(b) == 4 and sorted(a) != sorted(b) and not (len(a) == 3 and len(meant.words) > 1):
        return None
      edits += 1
  return edits if edits <= 2 else None


def _one_edit(a: str, b: str) -> bool:
  """Return True if one letter is missing, added or replaced, or two neighboring letters are swapped."""
  if abs(len(a) - len(b)) > 1:
    return False
  i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
  rest_a, rest_b = a[i:], b[i:]
  exchanged = rest_a[:2] == rest_b[1::-1] and rest_a[2:] == rest_b[2:]
  return exchanged or rest_a[1:] == rest_b[1:] or rest_a[1:] == rest_b or rest_a == rest_b[1:]


def _abbreviates(given: tuple[str, ...], meant: tuple[str, ...]) -> bool:
  """Return True if one of several words is cut to its first three or four letters, such as ``len`` for ``length``."""
  if len(given) != len(meant):
    return False
  differ = [(a, b) for a, b in zip(given, meant, strict=True) if a != b]
  return len(meant) > 1 == len(differ) and len(differ[0][0]) in (3, 4) and differ[0][1].startswith(differ[0][0])


def _is_slip(a: str, b: str) -> bool:
  """Return True if a known name ``b`` was typed as ``a`` with one letter missing or added, or two neighboring letters swapped.

  A wrong letter is no slip, because it makes another word of a short one (size, side). The first letter of a short name must
  agree: ``type`` is not ``dtype``.
  """
  if len(b) < 4 or (len(b) < 7 and a[:1] != b[:1]):
    return False
  return (len(a) != len(b) or sorted(a) == sorted(b)) and _one_edit(a, b)


_LETTERS, _WORDS = 0.7, 0.66  # minimum similarity, by letters and by words, for a suggestion


def _fold(name: str) -> str:
  return name.lower().replace("-", "_")


@functools.cache
def _words(name: str) -> list[str]:
  return re.split(r"[_.]+", _fold(name))


def _ratio(a: str, b: str, least: float) -> float:
  """Return difflib's similarity of two texts, or 0 if it is below ``least``; cheap upper bounds are checked first."""
  if 2 * min(len(a), len(b)) < least * (len(a) + len(b)):
    return 0.0
  matcher = difflib.SequenceMatcher(None, a, b)
  return ratio if matcher.quick_ratio() >= least and (ratio := matcher.ratio()) >= least else 0.0


def _by_letters(a: str, b: str) -> float:
  return _ratio(_fold(a), _fold(b), _LETTERS)


def _by_words(a: str, b: str) -> float:
  """Return the share of words that two names have in common (Dice's coefficient)."""
  ours, theirs = _words(a), _words(b)
  return 2 * sum(max(_alike(a, b) for b in theirs) for a in ours) / (len(ours) + len(theirs))


def _alike(a: str, b: str) -> float:
  """Return 1 for the same word or a misspelling of it, 0.8 for an abbreviation (``len`` for ``length``), otherwise 0."""
  short, long = sorted((a, b), key=len)
  if a == b:
    return 1.0
  if len(short) > 2 and long.startswith(short):
    return 0.8
  return float(len(short) > 3 and _ratio(a, b, 0.8) > 0)


def error_of(problems: list[Problem]) -> UserError:
  """Return one error that lists all problems, each as ``what`` / ``where:`` / ``fix:``."""
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
  """A section was built with invalid values."""

  def __init__(self, problems: list[Problem]):
    super().__init__("; ".join(p.what + (f" ({p.fix})" if p.fix else "") for p in problems))
    self.problems = problems


class Checked:
  """Base class of sections: raises ``InvalidSectionError`` if ``problems`` yields anything when the section is built."""

  def __post_init__(self):
    if problems := list(self.problems()):
      raise InvalidSectionError(problems)

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values."""
    yield from ()


def at_least(section: object, low: int, *names: str) -> Iterator[Problem]:
  """Yield a problem for each key whose value is below ``low``; null is accepted."""
  for name in names:
    value = getattr(section, name)
    if value is not None and value < low:
      yield Problem(f"{name} = {value} is below {low}", (name,), f"set {name} to {low} or more")


def above_zero(section: object, *names: str) -> Iterator[Problem]:
  """Yield a problem for each key whose value is not positive; null is accepted."""
  for name in names:
    value = getattr(section, name)
    if value is not None and not value > 0:
      yield Problem(f"{name} = {value} is not above 0", (name,), f"set {name} above 0")
