"""``list_keys``: configuration keys with type, default and description, searched by a pattern."""

import re
from dataclasses import dataclass

from maxtext_like.config import foreign_names, former_names, maxtext
from maxtext_like.config.document import Key
from maxtext_like.config.document import keys as documented
from maxtext_like.config.problems import did_you_misspell
from maxtext_like.errors import UserError


@dataclass(frozen=True)
class Keys:
  """Configuration keys. As text: lines of the form ``section.key  (type; default ...)  description``.

  Attributes:
    keys: keys with section, name, kind (type), default and meaning, in the order of ``configs/base.yml``.
    elsewhere: a line for each matching name of another trainer.
  """

  keys: tuple[Key, ...]
  elsewhere: tuple[str, ...]

  def __str__(self) -> str:
    return "\n".join(
      [*(f"{k.section}.{k.name}  ({k.kind}; default {k.default})  {k.meaning}" for k in self.keys), *self.elsewhere]
    )


def list_keys(pattern: str = "") -> Keys:
  """Return the configuration keys that match a pattern.

  Args:
    pattern: a regular expression, searched in ``section.name`` and in the description without regard to case. In
      descriptions, an underscore also matches a space: ``learning_rate`` finds "learning rate".

  Raises:
    UserError: no key matches, or the pattern is not a regular expression.
  """
  try:
    matches = re.compile(pattern, re.IGNORECASE).search
    in_words = re.compile(pattern.replace("_", " "), re.IGNORECASE).search
  except re.error as error:
    raise UserError(
      f"{pattern!r}: not a regular expression: {error}", fix="write a part of a name, such as learning_rate"
    ) from error
  found = tuple(k for k in documented() if matches(f"{k.section}.{k.name}") or matches(k.meaning) or in_words(k.meaning))
  elsewhere = [f"{theirs}: MaxText's name of {ours}" for theirs, ours in maxtext.RENAMED.items() if pattern and matches(theirs)]
  elsewhere += [former_names.note(former) for former in former_names.RENAMED if pattern and matches(former)]
  foreign = {theirs: said for theirs, said in foreign_names.NAMES.items() if pattern and re.fullmatch(pattern, theirs, re.I)}
  if not found and not elsewhere and not foreign and (said := foreign_names.find(pattern)) is not None:
    foreign = {pattern: said}
  elsewhere += [f"{theirs}: no key here: {said.says}\n  fix: {said.fix('VALUE')}" for theirs, said in foreign.items()]
  if not found and not elsewhere:
    near = did_you_misspell(pattern, [k.name for k in documented()])
    raise UserError(
      f"{pattern!r}: no such key{near}",
      fix="search for a part of a name, such as learning_rate, or leave the pattern out for all keys",
    )
  return Keys(found, tuple(elsewhere))
