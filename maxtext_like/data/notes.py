"""Warnings about usable records that may not mean what their author intended, each given once with counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from maxtext_like.data.tokenization.special_tokens import listed
from maxtext_like.strict_json import printable

UNREAD_KEPT = 1000  # most names of unread fields that are counted
_SHOWN = 10


@dataclass(frozen=True)
class Seen:
  """Properties of one good record; see ``Notes``."""

  spelt: Mapping[str, int] = field(default_factory=dict)
  unread: tuple[str, ...] = ()
  lost_early: int = 0
  lost_late: int = 0


@dataclass
class Notes:
  """Counts over records.

  Attributes:
    spelt: how often the text spells each special token.
    spelt_documents: number of documents that spell any.
    spelt_first: the first such document; None if there is none.
    unread: for each field that is not read, the number of records with a value in it.
    lost_early: answers before the last user message that are learned without the thought in the record.
    lost_late: answers after the last user message whose thought the template does not write.
    lost_first: the first document with such an answer; None if there is none.
  """

  spelt: dict[str, int] = field(default_factory=dict)
  spelt_documents: int = 0
  spelt_first: int | None = None
  unread: dict[str, int] = field(default_factory=dict)
  lost_early: int = 0
  lost_late: int = 0
  lost_first: int | None = None

  def add(self, number: int, seen: Seen) -> None:
    """Adds the properties of document ``number`` to the counts."""
    for spelling, count in seen.spelt.items():
      self.spelt[spelling] = self.spelt.get(spelling, 0) + count
    if seen.spelt:
      self.spelt_documents += 1
      self.spelt_first = number if self.spelt_first is None else self.spelt_first
    for name in seen.unread:
      if name in self.unread or len(self.unread) < UNREAD_KEPT:
        self.unread[name] = self.unread.get(name, 0) + 1
    if seen.lost_early or seen.lost_late:
      self.lost_early, self.lost_late = self.lost_early + seen.lost_early, self.lost_late + seen.lost_late
      self.lost_first = number if self.lost_first is None else self.lost_first

  def sentences(self, count: int, place: Callable[[int], str], *, asked: bool) -> list[str]:
    """Returns a sentence for each kind of remark.

    Args:
      count: number of documents that were counted.
      place: returns the place of a document.
      asked: ``special_tokens_in_text`` is set, so spellings need no remark.
    """
    remarks = []
    if self.spelt_first is not None and not asked:
      most = dict(sorted(self.spelt.items(), key=lambda item: -item[1]))
      remarks.append(
        f"{self.spelt_documents} of {count} documents spell special tokens in their text ({listed(most)}; first in "
        f"{place(self.spelt_first)}). They are read as plain text here, but as the tokens by Hugging Face. "
        "special_tokens_in_text=parse reads them as the tokens, =literal keeps them text without a warning, =error refuses them"
      )
    if self.unread:
      most = dict(sorted(self.unread.items(), key=lambda item: -item[1]))
      names = [f"'{printable(name)}' in {found:,}" for name, found in most.items()]
      more = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
      remarks.append(f"fields of the records that are not used: {', '.join(names[:_SHOWN])}{more} of {count:,} records")
    if self.lost_first is not None:
      parts = []
      if self.lost_early:
        parts.append(f"{self.lost_early} before the last user message, where the template drops thoughts")
      if self.lost_late:
        parts.append(f"{self.lost_late} after it, because the template does not write the thought in the record")
      remedy = ". train_on=last learns only the answers to the last user message" if self.lost_early else ""
      remarks.append(f"answers learned without their thoughts: {', '.join(parts)} (first in {place(self.lost_first)}){remedy}")
    return remarks
