"""Marks in a record that say which answers are learned, under the names that other trainers use.

Open this file to add a name. A mark is applied if its meaning is clear (true, false, 1, 0) and refused otherwise, so that an
answer marked as bad is never learned as a good one.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from maxtext_like import strict_json

MARKS = (
  "weight", "loss_weight", "loss_mask", "loss_scale", "loss", "compute_loss", "train", "training", "trainable", "trained",
  "learn",
)  # fmt: skip
"""Marks of a message or a turn: 1 or true is learned, 0 or false is not."""
LABELS = ("label", "kto_tag", "desirable")
"""Marks of a record, as in KTO: true is a good answer, false a bad one."""
UNCLEAR = ("train_detail", "mask", "masked")
"""Names at a message that mark parts of an answer, or whose true means "learned" in one project and "left out" in another."""
_ALSO_MEASURED = frozenset({"loss", "training", "trained", "learn"})
"""Names that on a record are often a measurement or a comment. Only a clear value counts as a mark there."""
_OF_RECORD = frozenset({*MARKS, *LABELS})
_WORDS_OF_RECORD = re.compile(
  r"(?:^|_)(?:(?:train|loss|learn|mask|ignor|includ|exclud|supervis|reject|kto|chosen|accept|prefer|desirable|thumbs)|label$)"
)
_WORDS = re.compile(_WORDS_OF_RECORD.pattern + r"|(?:^|_)skip")
"""Words in the name of a field that suggest, if its value is true or false, that the field says what is learned."""
_FACTORS = re.compile(r"(?:^|_)(?:loss|train|training|sample|message|turn)_(?:weight|multiplier|factor|scale|coef)")
"""Names of fields whose number multiplies a loss. 1 changes nothing; another number would have to be applied."""
_JUDGEMENTS = re.compile(r"(?:^|_)(?:correct|good|approved)$")
"""Words in the name of a field that suggest, if its value is false, that the answer is bad."""


def shown(value: object) -> str:
  """Returns a value as JSON, so that a message shows the text "0" and the number 0 differently."""
  return strict_json.printable(json.dumps(value, ensure_ascii=False, default=str))


def of_message(message: Mapping[str, Any], where: str) -> bool | None:
  """Returns the mark that says if a message is learned.

  Args:
    message: an object of the record, without fields that are null.
    where: names it in errors.

  Returns:
    True, False, or None if it has no mark.

  Raises:
    ValueError: the meaning of a mark is not clear, or two marks contradict each other.
  """
  for name in UNCLEAR:
    if message.get(name) not in (None, "", [], {}, ()):
      raise ValueError(
        f"{where}.{name} is {shown(message[name]):.60}, which has no clear meaning here: an answer is learned completely or "
        f'not at all (instead of {name}, write "train": false on each answer that must not be learned)'
      )
  _refuse_unknown(message, MARKS, _WORDS, f"{where}.")
  return _agreed({name: _clear(message[name], f"{where}.{name}") for name in MARKS if name in message}, where)


def of_record(record: Mapping[str, Any]) -> tuple[bool | None, frozenset[str]]:
  """Returns the mark of a complete record (True: learned, False: not, None: no mark) and the names of the fields with marks.

  Raises:
    ValueError: as ``of_message``.
  """
  _refuse_unknown(record, _OF_RECORD, _WORDS_OF_RECORD, "")
  found: dict[str, bool] = {}
  for name, value in record.items():
    if name not in _OF_RECORD:
      continue
    if isinstance(value, bool):
      found[name] = value
    elif name in LABELS:
      # Any other label may be the class of a text, unless it looks like a truth value.
      if value in (-1, 0, 1) or (isinstance(value, str) and value.strip().lower() in ("true", "false")):
        raise ValueError(
          f"{name} is {shown(value)}: expected true for a good answer or false for a bad one (rename the field if it is not a "
          "mark for training)"
        )
    elif value in (0, 1) or name not in _ALSO_MEASURED:
      found[name] = _clear(value, name)
  return _agreed(found, "the record"), frozenset(found)


def _refuse_unknown(fields: Mapping[str, Any], known: Collection[str], words: re.Pattern[str], where: str) -> None:
  """Raises ValueError for a field that looks like a mark but has an unknown name, so that a mark is never ignored."""
  for name, value in fields.items():
    if name in known or not isinstance(name, str) or not isinstance(value, bool | int | float):
      continue
    plain = _snake_case(name)
    of_mark = value in (0, 1) and (plain in known or plain.removesuffix("s") in known)
    if of_mark or (isinstance(value, bool) and (words.search(plain) or (not value and _JUDGEMENTS.search(plain)))):
      raise ValueError(
        f"{where}{strict_json.printable(name)} is {shown(value)}: the name looks like a mark for training, but is not a known "
        f'one (write "train": false on an answer that must not be learned, or rename the field)'
      )
    if not isinstance(value, bool) and value != 1 and _FACTORS.search(plain):
      raise ValueError(
        f"{where}{strict_json.printable(name)} is {shown(value):.60}: the name looks like a factor of the loss, but an answer "
        f'is learned completely or not at all (write "train": false on one that must not be learned, or rename the field)'
      )


def _snake_case(name: str) -> str:
  """Returns a name such as lossMask or Loss-Mask as loss_mask."""
  return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def _clear(value: object, where: str) -> bool:
  if isinstance(value, bool | int | float) and value in (0, 1):
    return bool(value)
  raise ValueError(
    f"{where} is {shown(value):.60}, expected 0 or 1 (or false or true): an answer is learned completely or not at all"
  )


def _agreed(marks: Mapping[str, bool], where: str) -> bool | None:
  if len(set(marks.values())) > 1:
    listed = ", ".join(f"{name}={'true' if value else 'false'}" for name, value in marks.items())
    raise ValueError(f"{where} has marks that contradict each other: {listed}")
  return next(iter(marks.values()), None)
