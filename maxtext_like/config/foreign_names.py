"""Answers to key names of other trainers. Open this file to see how a name is looked up and what the answer promises.

There are three kinds of answers, and each kind has its own table:

- ``foreign_exact.py``: the key has another name here and the same meaning and unit. Only these answers print a value.
- ``foreign_similar.py``: a key here looks alike but has another meaning or unit, or depends on something that the name does
  not say. The answer explains the difference and leaves the value to the reader.
- ``foreign_absent.py``: this project has no such setting. The answer says what holds instead.

MaxText's names that have a meaning here are in ``maxtext.py``, which translates them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from maxtext_like.config.coerce import CoercionError, coerce, describe
from maxtext_like.config.foreign_absent import FAMILIES
from maxtext_like.config.foreign_absent import NAMES as ABSENT
from maxtext_like.config.foreign_exact import BY_VALUE, DEFINED, LIST_WORDS, LISTS, RENAMED, UNSET
from maxtext_like.config.foreign_similar import NAMES as SIMILAR
from maxtext_like.config.foreign_similar import OFF
from maxtext_like.config.schema import LEAVES, SECTIONS
from maxtext_like.config.yaml_file import parse_value
from maxtext_like.errors import UserError

LEAVE_OUT = "leave it out"


@dataclass(frozen=True)
class Foreign:
  """The answer to one name.

  Attributes:
    says: the rest of the sentence ``unknown key 'lr': ...``.
    write: the advice where it does not depend on the value.
    key: our key, for an exact translation.
    also: words to write in front of it, without which the key has another meaning.
    listed: the key takes a list. Other trainers write words between commas.
    values: the other trainer's values, in lower case, and the words to write for each. An empty text means that the key is
      to be left out.
  """

  says: str
  write: str = LEAVE_OUT
  key: str = ""
  also: str = ""
  listed: bool = False
  values: Mapping[str, str] | None = None

  def fix(self, value: str) -> str:
    """Return what to type for ``value``. The text contains the value only if the translation is exact."""
    known = self.values or {}
    if (words := known.get(value.lower())) is not None:
      return f"write {words}" if words else LEAVE_OUT
    if not self.key:
      return self.write
    if value.lower() in ("null", "none", "~"):
      return LEAVE_OUT
    if self.listed:
      return f"write {self.key}={value if value.startswith('[') else f'[{LIST_WORDS.get(value, value)}]'}"
    ours = _as_ours(self.key, value)
    return f"write {self.also}{self.key}={_placeholder(self.key) if ours is None else ours}"


def _as_ours(key: str, value: str) -> str | None:
  """Return the text of ``value`` as ``key`` takes it, or None if the key does not take such a value."""
  kind = LEAVES[key][1]
  texts = [value]
  if re.fullmatch(r"[0-9]+\.0*|[0-9.]+[eE][+-]?[0-9]+", value) and float(value).is_integer():
    texts.append(str(int(float(value))))  # other trainers write counts as floats: num_train_epochs=3.0
  for text in texts:
    try:
      coerce(parse_value(text, key), kind)
    except (CoercionError, UserError):
      continue
    return text
  return None


def _placeholder(key: str) -> str:
  kind = describe(LEAVES[key][1])
  return kind if "|" in kind else kind.removesuffix(" or null").upper()


def fold(name: str) -> str:
  """Return the form in which names are compared: lower case with underscores, without leading dashes."""
  return name.lower().lstrip("-").replace("-", "_")


def _table() -> dict[str, Foreign]:
  table: dict[str, Foreign] = {}

  def add(names: str, answer: Foreign) -> None:
    for name in names.split():
      assert name not in table, f"{name} has two answers"
      table[name] = answer

  for ours, names in RENAMED.items():
    for name in names.split():
      add(name, Foreign(f"it is called {ours} here", key=ours, listed=ours in LISTS, values=UNSET.get(name)))
  for name, (also, ours, unless) in DEFINED.items():
    add(name, Foreign(f"it is called {ours} here, with {also}{unless}", key=ours, also=f"{also} "))
  for row in BY_VALUE:
    add(row.names, Foreign(row.says, row.otherwise, values=row.values))
  for row in SIMILAR:
    off: dict[str, str] | None = None if row.off is None else dict.fromkeys(OFF, row.off)
    add(row.names, Foreign(f"similar to a key here, but not the same: {row.says}", row.write, values=off))
  for says, names in ABSENT:
    add(names, Foreign(says))
  return table


NAMES = _table()
"""Complete names, folded. A dotted name includes the section of the other trainer's file."""

NEUTRAL_SECTIONS = frozenset(SECTIONS) - {"vision"} | frozenset(
  "train training trainer training_args training_arguments args hparams config model_config text_config optim optimizer "
  "optimizer_config optim_config lr_scheduler scheduler sched data_config dataset datasets checkpointing metrics logger lora "
  "peft peft_config lora_config parallelism job actor_model policy strategy exp_manager finetuning".split()
)
"""Sections of other trainers' files that do not change the meaning of a key. ``critic.lr`` is not ``lr``."""


def find(name: str) -> Foreign | None:
  """Return the answer to a name of another trainer, or None if the name is not known."""
  return find_whole(name) or (family_of(leaf) if (leaf := _without_sections(fold(name))) and "." not in leaf else None)


def find_whole(name: str) -> Foreign | None:
  """Return the answer to a name that is in a table as a complete name, or None."""
  folded = fold(name)
  return NAMES.get(folded) or NAMES.get(_without_sections(folded))


def _without_sections(folded: str) -> str:
  """Return a name without its neutral sections. ``vision.`` is how our files call ``vision_config.``."""
  section, dot, rest = folded.partition(".")
  while dot and section in NEUTRAL_SECTIONS:
    folded = rest
    section, dot, rest = folded.partition(".")
  return f"vision_config.{rest}" if dot and section == "vision" else folded


def family_of(name: str) -> Foreign | None:
  """Return the answer to a group of names that this project lacks, such as all settings of pipeline parallelism."""
  for says, patterns in FAMILIES:
    if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
      return Foreign(says)
  return None
