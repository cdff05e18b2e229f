"""``key=value`` words, and other ways people type them: understood or refused, never ignored."""

from pathlib import Path

from maxtext_like.config import foreign_names, maxtext
from maxtext_like.config.files import SUFFIXES
from maxtext_like.config.problems import Problem, did_you_mean, is_misspelling, nearest
from maxtext_like.config.schema import LEAVES, SECTIONS
from maxtext_like.config.yaml_file import Entry, parse_value
from maxtext_like.errors import UserError


class TypedWord(str):
  """A word of a command line, which errors and origins call so. Any other override is an argument of a function."""

  __slots__ = ()


class UnknownKeyError(KeyError):
  """No key of ours, nor one of MaxText's that has a meaning here.

  Attributes:
    what: one sentence, with the nearest name or what other trainers mean by it.
    foreign: what is known of the name, where it is another trainer's.
  """

  def __init__(self, what: str, foreign: foreign_names.Foreign | None = None):
    super().__init__(what)
    self.what, self.foreign = what, foreign

  def problem(self, place: str, value: str) -> Problem:
    """What to say about it where it was written with that value."""
    return Problem(f"{place}: {self.what}", fix=self.foreign.fix(value) if self.foreign else "")


def leaf_of(key: str) -> str:
  """The leaf that a key among overrides or in a file names: ``steps``, ``training.steps`` or a MaxText name.

  Raises:
    UnknownKeyError: with the nearest name, or what another trainer means by it.
  """
  if key in LEAVES or key in maxtext.KNOWN:
    return key
  section, _, leaf = key.rpartition(".")
  if section in SECTIONS:
    if leaf in LEAVES and LEAVES[leaf][0] == section:
      return leaf
    if leaf in LEAVES:
      raise UnknownKeyError(f"unknown key {key!r}, did you mean {LEAVES[leaf][0] + '.' + leaf!r}?")
    if leaf in maxtext.KNOWN:
      return leaf
  raise _unknown(key, leaf)


def _unknown(key: str, leaf: str) -> UnknownKeyError:
  """Whole foreign names, then slips of the fingers, then families of foreign names, then what is near."""
  if key in SECTIONS:
    return UnknownKeyError(f"unknown key {key!r}: it is a section, whose keys stand without it, as steps")
  foreign = foreign_names.NAMES.get(foreign_names.fold(leaf))
  if foreign is None and not any(is_misspelling(leaf, known) for known in (*LEAVES, *maxtext.KNOWN)):
    foreign = foreign_names.find(leaf)
  if foreign is not None:
    return UnknownKeyError(f"unknown key {key!r}: {foreign.says}", foreign)
  if leaf != key:
    near = did_you_mean(key, [f"{section}.{name}" for name, (section, _) in LEAVES.items()]) or did_you_mean(leaf, LEAVES)
  else:
    near = did_you_mean(key, LEAVES) or did_you_mean(key, maxtext.KNOWN)
  if not near and (others := nearest(leaf, foreign_names.NAMES)):
    foreign = foreign_names.NAMES[others[0]]
    return UnknownKeyError(f"unknown key {key!r}, perhaps {others[0]!r}: {foreign.says}", foreign)
  return UnknownKeyError(
    f"unknown key {key!r}{near or '; maxtext-like train --help-keys (maxtext_like.list_keys in Python) has them all'}"
  )


def is_key(word: str) -> bool:
  """Whether a word is a key as it stands."""
  try:
    leaf_of(word)
  except UnknownKeyError:
    return False
  return True


def parse_overrides(words: list[str]) -> tuple[list[str], list[Entry], list[Problem]]:
  """Splits the words after the model into overlays and values.

  Args:
    words: ``key=value``, ``section.key=value``, ``--key=value``, ``--key value``, ``key value``, ``file.yml``,
      ``hardware=file.yml``.

  Returns:
    Paths of overlays and entries, each in the order of the words; a problem for every word that is none of
    these, every empty key, empty value and unknown key.
  """
  hardware: list[str] = []
  entries: list[Entry] = []
  problems: list[Problem] = []
  rest = list(words)
  while rest:
    word = rest.pop(0)
    called = "command line" if isinstance(word, TypedWord) else "argument"
    key, equals, value = word.partition("=")
    key = key.strip()
    bare = key.lstrip("-") if key.startswith("-") else key
    if equals:
      shown = f"{key}={value}"
    elif not key.startswith("-") and Path(word).suffix in SUFFIXES:
      hardware.append(word)
      continue
    else:
      known = is_key(bare) or bare == "hardware"
      follows = bool(rest) and "=" not in rest[0] and not rest[0].startswith("--") and not is_key(rest[0])
      if not known:
        see = "; see --help" if isinstance(word, TypedWord) else ""
        problems.append(_not_understood(f"{called} {word!r}", word, bare, see))
        if word.startswith("-") and follows and Path(rest[0]).suffix not in SUFFIXES:
          rest.pop(0)  # the value of an option that is not known
        continue
      if not follows:
        problems.append(Problem(f"{called} {word!r}: no value", fix=f"write {bare}=VALUE{_spaces_hint(rest)}"))
        continue
      value = rest.pop(0)
      shown = f"{word} {value}"
    value = value.strip()
    origin = f'{called} "{shown}"'
    if not bare:
      problems.append(Problem(f"{called} {word!r}: no key before '='", fix=f"write KEY{equals}{value}, without a space"))
    elif not value:
      fix = f"write {bare}=VALUE without spaces, null for no value"
      problems.append(Problem(f"{called} {shown!r}: no value after '='", fix=fix))
    elif bare == "hardware":
      hardware.append(value)
    else:
      try:
        entries.append(Entry(leaf_of(bare), parse_value(value, origin), origin))
      except UnknownKeyError as error:
        problems.append(error.problem(origin, value))
      except UserError as error:
        problems.append(Problem(str(error)))
  return hardware, entries, problems


def _spaces_hint(rest: list[str]) -> str:
  return " without spaces around '='" if rest and rest[0].startswith("=") else ""


def _not_understood(place: str, word: str, bare: str, see: str) -> Problem:
  if bare.endswith(":") and is_key(bare[:-1]):
    return Problem(f"{place}: not understood", fix=f"write {bare[:-1]}=VALUE")
  try:
    leaf_of(bare)
  except UnknownKeyError as error:
    if error.foreign is not None and (word.startswith("-") or bare in foreign_names.NAMES):
      return error.problem(place, "VALUE")
    reason = error.what if word.startswith("-") or "did you mean" in error.what else "not a key=value"
    return Problem(f"{place}: {reason}", fix=f"write KEY=VALUE, as in steps=20{see}")
  return Problem(f"{place}: not understood", fix="write KEY=VALUE, as in steps=20")
