"""``key=value`` words of the command line, and other ways people type them: understood or refused, never ignored."""

from pathlib import Path

from maxtext_like.config import maxtext
from maxtext_like.config.files import SUFFIXES
from maxtext_like.config.problems import did_you_mean
from maxtext_like.config.schema import LEAVES, SECTIONS
from maxtext_like.config.yaml_file import Entry, parse_value
from maxtext_like.errors import UserError


def leaf_of(key: str) -> str:
  """The leaf that a key on the command line or in a file names: ``steps``, ``training.steps`` or a MaxText name.

  Raises:
    KeyError: unknown; the argument is the reason with the nearest name.
  """
  if key in LEAVES or key in maxtext.KNOWN:
    return key
  section, _, leaf = key.rpartition(".")
  if section in SECTIONS:
    if leaf in LEAVES and LEAVES[leaf][0] == section:
      return leaf
    if leaf in LEAVES:
      raise KeyError(f"unknown key {key!r}, did you mean {LEAVES[leaf][0] + '.' + leaf!r}?")
    if leaf in maxtext.KNOWN:
      return leaf
  if "." in key:
    dotted = [f"{section}.{leaf}" for leaf, (section, _) in LEAVES.items()]
    near = did_you_mean(key, dotted) or did_you_mean(leaf, LEAVES)
  else:
    near = did_you_mean(key, [*LEAVES, *maxtext.KNOWN])
  raise KeyError(f"unknown key {key!r}{near or '; see maxtext-like train --help-keys'}")


def is_key(word: str) -> bool:
  """Whether a word is a key as it stands."""
  try:
    leaf_of(word)
  except KeyError:
    return False
  return True


def parse_overrides(words: list[str]) -> tuple[list[str], list[Entry]]:
  """Splits the words after the model into hardware files and values.

  Args:
    words: ``key=value``, ``section.key=value``, ``--key=value``, ``--key value``, ``key value``, ``file.yml``,
      ``hardware=file.yml``.

  Returns:
    Paths of hardware files and entries, each in the order of the command line.

  Raises:
    UserError: a word that is none of these, an empty key, an empty value, an unknown key.
  """
  hardware: list[str] = []
  entries: list[Entry] = []
  rest = list(words)
  while rest:
    word = rest.pop(0)
    key, equals, value = word.partition("=")
    key = key.strip()
    bare = key.lstrip("-") if key.startswith("-") else key
    if equals:
      shown = f"{key}={value}"
    else:
      if not key.startswith("-") and Path(word).suffix in SUFFIXES:
        hardware.append(word)
        continue
      if not is_key(bare) and bare != "hardware":
        raise _not_understood(word, bare)
      if not rest or "=" in rest[0] or rest[0].startswith("--") or is_key(rest[0]):
        raise UserError(f"command line {word!r}: no value\n  fix: write {bare}=VALUE{_spaces_hint(rest)}")
      value = rest.pop(0)
      shown = f"{word} {value}"
    if not bare:
      raise UserError(f"command line {word!r}: no key before '='\n  fix: write KEY{equals}{value}, without a space")
    value = value.strip()
    if not value:
      raise UserError(
        f"command line {shown!r}: no value after '='\n  fix: write {bare}=VALUE without spaces, null for no value"
      )
    if bare == "hardware":
      hardware.append(value)
      continue
    origin = f'command line "{shown}"'
    try:
      leaf = leaf_of(bare)
    except KeyError as error:
      raise UserError(f"{origin}: {error.args[0]}") from error
    entries.append(Entry(leaf, parse_value(value, origin), origin))
  return hardware, entries


def _spaces_hint(rest: list[str]) -> str:
  return " without spaces around '='" if rest and rest[0].startswith("=") else ""


def _not_understood(word: str, bare: str) -> UserError:
  if bare.endswith(":") and is_key(bare[:-1]):
    return UserError(f"command line {word!r}: not understood\n  fix: write {bare[:-1]}=VALUE")
  try:
    leaf_of(bare)
  except KeyError as error:
    reason = error.args[0] if word.startswith("-") or "did you mean" in error.args[0] else "not a key=value"
    return UserError(f"command line {word!r}: {reason}\n  fix: write KEY=VALUE, as in steps=20; see --help")
  return UserError(f"command line {word!r}: not understood\n  fix: write KEY=VALUE, as in steps=20")
