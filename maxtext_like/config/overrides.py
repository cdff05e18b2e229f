"""Parses ``key=value`` words and other spellings of them. A word that is not understood is an error."""

from pathlib import Path

from maxtext_like.config import foreign_names, maxtext
from maxtext_like.config.files import SUFFIXES, recipe_name
from maxtext_like.config.problems import Problem, alternatives, candidates, misspelled, nearest
from maxtext_like.config.schema import LEAVES, SECTIONS
from maxtext_like.config.yaml_file import Entry, parse_value
from maxtext_like.errors import UserError

_SEARCH = "maxtext-like train --help-keys PATTERN (maxtext_like.list_keys in Python) searches names and descriptions"


class TypedWord(str):
  """A word of the command line. Errors and origins call it that, and call other overrides arguments."""

  __slots__ = ()


class UnknownKeyError(KeyError):
  """A key that neither this project nor its translation of MaxText's keys has.

  Attributes:
    what: one sentence, with a similar name or the meaning of the name in other trainers.
    foreign: the answer for a key of another trainer.
    near: the keys that may be meant.
  """

  def __init__(self, what: str, foreign: foreign_names.Foreign | None = None, near: tuple[str, ...] = ()):
    super().__init__(what)
    self.what, self.foreign, self.near = what, foreign, near

  def problem(self, place: str, value: str) -> Problem:
    """Return the problem for the place where the key was set to ``value``."""
    if self.foreign is not None:
      return Problem(f"{place}: {self.what}", fix=self.foreign.fix(value))
    write = [f"{key}={value or 'VALUE'}" for key in self.near]
    return Problem(f"{place}: {self.what}", fix=f"write {alternatives(write)}" if write else _SEARCH)


def leaf_of(key: str) -> str:
  """Return the key without its section, for ``steps``, ``training.steps`` or a name of MaxText.

  Raises:
    UnknownKeyError: the key does not exist; with a similar name, or its meaning in another trainer.
  """
  if key in LEAVES or key in maxtext.KNOWN:
    return key
  section, _, leaf = key.rpartition(".")
  if section in SECTIONS:
    if leaf in LEAVES and LEAVES[leaf][0] == section:
      return leaf
    if leaf in LEAVES:
      raise _misspelling(key, (f"{LEAVES[leaf][0]}.{leaf}",))
    if leaf in maxtext.KNOWN:
      return leaf
  raise _unknown(key, leaf)


def _unknown(key: str, leaf: str) -> UnknownKeyError:
  """Return the error for an unknown key: an exact name of another trainer, then a misspelling, then a group of names."""
  if key in SECTIONS and key not in foreign_names.NAMES:
    return UnknownKeyError(f"unknown key {key!r}: it is a section; write a key of it, as in steps=5")
  foreign = foreign_names.find_whole(key)
  if foreign is None and (near := _misspelled(key, leaf)):
    return _misspelling(key, near)
  if foreign is None and leaf == key and len(key) > 6 and (theirs := misspelled(key, foreign_names.NAMES)):
    foreign = foreign_names.NAMES[theirs]
    return UnknownKeyError(f"unknown key {key!r}, perhaps {theirs!r}: {foreign.says}", foreign)
  if foreign is None:
    foreign = foreign_names.find(key)
  if foreign is not None:
    return UnknownKeyError(f"unknown key {key!r}: {foreign.says}", foreign)
  ours = leaf == key or key.removesuffix(f".{leaf}") in foreign_names.NEUTRAL_SECTIONS
  if ours and (near := nearest(leaf, LEAVES, count=3)):
    return UnknownKeyError(f"unknown key {key!r}; keys with a similar name: {', '.join(near)}")
  return UnknownKeyError(f"unknown key {key!r}: no key has this or a similar name")


def _misspelling(key: str, near: tuple[str, ...]) -> UnknownKeyError:
  return UnknownKeyError(f"unknown key {key!r}, did you mean {alternatives(map(repr, near))}?", near=near)


def _misspelled(key: str, leaf: str) -> tuple[str, ...]:
  """Return the keys that ``key`` may misspell, in its section or in its name."""
  if leaf == key:
    return candidates(key, LEAVES) or candidates(key, maxtext.KNOWN)
  section = key.removesuffix(f".{leaf}")
  names = (leaf,) if leaf in LEAVES else candidates(leaf, LEAVES)
  if not (section in SECTIONS or misspelled(section, SECTIONS) or section in foreign_names.NEUTRAL_SECTIONS):
    return ()
  return tuple(f"{LEAVES[name][0]}.{name}" for name in names)


def is_key(word: str) -> bool:
  """Return True if a word is the name of a key."""
  try:
    leaf_of(word)
  except UnknownKeyError:
    return False
  return True


def parse_overrides(words: list[str]) -> tuple[list[str], list[Entry], list[Problem]]:
  """Split the words after the model into overlays and values.

  Args:
    words: ``key=value``, ``section.key=value``, ``--key=value``, ``--key value``, ``key value``, ``file.yml``,
      ``hardware=file.yml``.

  Returns:
    Paths of overlays, entries, and problems, each in the order of the words. There is a problem for every word of another
    form, empty key, empty value and unknown key.
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
          rest.pop(0)  # the value of an unknown option
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
        what, _, fix = str(error).partition("\n  fix: ")
        problems.append(Problem(what, fix=fix))
  return hardware, entries, problems


def _spaces_hint(rest: list[str]) -> str:
  return " without spaces around '='" if rest and rest[0].startswith("=") else ""


def _not_understood(place: str, word: str, bare: str, see: str) -> Problem:
  if "/" in word and (name := recipe_name(word)) is not None:
    return Problem(f"{place}: not a key=value, did you mean {name}?", fix=f"write {name}")
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
