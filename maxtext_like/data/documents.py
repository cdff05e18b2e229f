"""The interface of document sources: ``Documents``, ``Record``, ``BadRecordError``, and hints about missing fields."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from maxtext_like.data.chat.conversation import Conversation
from maxtext_like.strict_json import printable

MAX_RECORD_BYTES = 16 * 2**20  # a longer record (JSON line, parquet value) is bad: a newline is missing, it is not a text
NAMES_SHOWN = 8
_CHAT = "maxtext-like sft instead of train, or data_format=chat"
_CONVERSATIONS = ({"messages"}, {"conversations"}, {"conversation"}, {"prompt", "completion"}, {"instruction", "output"},
                  {"instruction", "response"})  # fmt: skip
_USUAL = ("content", "body", "document", "raw_content", "article", "story", "code", "sentence", "caption", "completion")
"""Names of the text field in published data sets, most common first."""


@dataclass(frozen=True)
class Record:
  """One document, or one piece of a long file.

  Attributes:
    text: the text; "" if the record is a conversation.
    begins: the start of the document is in this record, so bos belongs before it.
    ends: the end of the document is in this record, so eos belongs after it.
    images: paths of the image files that the placeholders in ``text`` stand for, in order. Without images, a placeholder is
      text.
    conversation: the conversation that the record holds; None for text.
  """

  text: str
  begins: bool = True
  ends: bool = True
  images: tuple[str, ...] = ()
  conversation: Conversation | None = None


ReadRecord = Callable[[object, str, str], Record]
"""Reads a record of a file whose records are objects: (object, place, folder of the file). Raises BadRecordError."""


class BadRecordError(Exception):
  """A record that cannot be used. ``on_bad_record`` decides whether it ends the run.

  Attributes:
    place: file and line.
    reason: what is wrong.
    fix: what to type if all records are like this one; "" if only the record itself can be repaired.
  """

  def __init__(self, place: str, reason: str, fix: str = ""):
    super().__init__(f"{place}: {reason}")
    self.place, self.reason, self.fix = place, reason, fix


class Documents(Protocol):
  """Random access to documents. Their order depends only on the files."""

  groups: Sequence[int] | None
  """First document of each group that is cheap to read together (parquet row groups); None if any order is cheap."""

  def __len__(self) -> int: ...

  def read(self, index: int) -> Record:
    """Reads document ``index``. Raises BadRecordError, UserError (file gone or damaged) or RetryableError (storage)."""
    ...

  def scan(self) -> Iterator[Record | BadRecordError]:
    """Reads all documents in order, in one pass. Raises UserError and RetryableError as ``read``."""
    ...

  def place(self, index: int) -> str:
    """Returns the place of document ``index`` for messages, as file:line."""
    ...

  def fingerprint(self) -> dict[str, str]:
    """Returns an identity of each file's contents. It differs if the data differ."""
    ...


def check_text(text: object, place: str, field: str) -> str:
  """Returns ``text`` if it is a string that UTF-8 can encode, else raises BadRecordError (JSON accepts lone surrogates)."""
  if not isinstance(text, str):
    raise BadRecordError(place, f"field '{field}' is {type(text).__name__}, expected a string")
  if not text.isascii():
    try:
      text.encode("utf-8")
    except UnicodeEncodeError as error:
      raise BadRecordError(
        place, f"field '{field}' has a lone surrogate (\\u{ord(text[error.start]):04x}) at character {error.start}"
      ) from None
  return text


def list_names(names: Sequence[str]) -> str:
  """Returns the first names, quoted, and the number of the remaining ones."""
  listed = ", ".join(f"'{printable(name)[:80]}'" for name in names[:NAMES_SHOWN]) or "none"
  return listed if len(names) <= NAMES_SHOWN else f"{listed} and {len(names) - NAMES_SHOWN:,} more"


def fix_of_missing_field(names: Sequence[str], texts: Sequence[str]) -> str:
  """Returns what to type if data.text_field names no existing field.

  Args:
    names: the existing fields.
    texts: fields that hold texts.
  """
  if any(fields <= set(names) for fields in _CONVERSATIONS):
    return _CHAT
  usual = next((name for name in _USUAL if name in texts), texts[0] if len(texts) == 1 else None)
  if usual is not None:
    return f"text_field={printable(usual)}"
  return f"text_field=NAME, one of {list_names(texts)}" if texts else "dataset_path=FILES with records that have a text"


def text_fields(record: Mapping[str, object]) -> list[str]:
  """Returns the fields of a record that hold texts."""
  return [name for name, value in record.items() if isinstance(value, str)]
