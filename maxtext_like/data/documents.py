"""What every source of text promises to the rest of the input pipeline (jsonl.py, parquet.py and others implement it)."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from maxtext_like.data.chat.conversation import Conversation

MAX_RECORD_BYTES = 16 * 2**20  # one record (a JSON line, a parquet value) above this is bad: a lost newline, not a text


@dataclass(frozen=True)
class Record:
  """One document, or one piece of a long file.

  `conversation`: what the record holds in place of `text`. `images`: paths of the image files that are in it, or that the
  placeholders in `text` stand for, in order; without any, a placeholder is text. `begins` and `ends` say whether the
  document's start and end are inside: only there do bos and eos belong.
  """

  text: str
  begins: bool = True
  ends: bool = True
  images: tuple[str, ...] = ()
  conversation: Conversation | None = None


ReadRecord = Callable[[object, str, str], Record]
"""A record of a file whose records are objects: (the object, its place, the file's folder). Raises BadRecordError."""


class BadRecordError(Exception):
  """One record cannot be used. The data.on_bad_record policy decides what follows.

  Attributes:
    place: file and line.
    reason: the problem.
    fix: words to type if all records are like this one; "" if only the record itself can be repaired.
  """

  def __init__(self, place: str, reason: str, fix: str = ""):
    super().__init__(f"{place}: {reason}")
    self.place, self.reason, self.fix = place, reason, fix


class Documents(Protocol):
  """Random access to documents in a fixed order that depends on the files alone."""

  groups: Sequence[int] | None
  """First document of each group that is cheap to read together (parquet row groups); None: any order is fine."""

  def __len__(self) -> int: ...

  def read(self, index: int) -> Record:
    """Document `index`. Raises BadRecordError, UserError (file gone, damaged) or RetryableError (storage)."""
    ...

  def scan(self) -> Iterator[Record | BadRecordError]:
    """All of them in order, in one pass. Raises UserError and RetryableError as `read`."""
    ...

  def place(self, index: int) -> str:
    """Where document `index` is, for messages: file:line."""
    ...

  def fingerprint(self) -> dict[str, str]:
    """What the documents were made of, file by file: differs when the data differ."""
    ...


def check_text(text: object, place: str, field: str) -> str:
  """`text` if it is a string that UTF-8 can carry; BadRecordError otherwise (json accepts lone surrogates)."""
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


def locate(stops: Sequence[int], index: int) -> tuple[int, int]:
  """The part that an index lies in, and its place there, of parts that end at ``stops``."""
  part = bisect_right(stops, index)
  return part, index - (stops[part - 1] if part else 0)
