"""Warnings, each given once and with counts, about usable records that may not mean what their author intended."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from maxtext_like.data.tokenization.special_tokens import listed
from maxtext_like.strict_json import printable

UNREAD_KEPT = 1000  # names of fields that nothing reads; more are not counted
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
    spelt: how often each special token is spelt out in the text.
    spelt_documents: how many documents have any.
    spelt_first: the first of them; None: there is none.
    unread: in how many records each field has a value that nothing reads.
    lost_early: answers before the last user's message that are learned without the thought that the record has.
    lost_late: answers after it, of a template that does not write the thought.
    lost_first: the first document with such an answer; None: there is none.
  """

  spelt: dict[str, int] = field(default_factory=dict)
  spelt_documents: int = 0
  spelt_first: int | None = None
  unread: dict[str, int] = field(default_factory=dict)
  lost_early: int = 0
  lost_late: int = 0
  lost_first: int | None = None

  def add(self, number: int, seen: Seen) -> None:
    """Counts the document of a number."""
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
    """A sentence for each kind of thing that was counted.

    Args:
      count: documents that were counted.
      place: where the document of a number is.
      asked: ``special_tokens_in_text`` is set, so that spellings need no sentence.
    """
    said = []
    if self.spelt_first is not None and not asked:
      most = dict(sorted(self.spelt.items(), key=lambda item: -item[1]))
      said.append(
        f"{self.spelt_documents} of {count} documents spell special tokens in their text ({listed(most)}; first in "
        f"{place(self.spelt_first)}). They become plain text; Hugging Face takes them for the tokens. "
        "special_tokens_in_text=parse does so too, =literal keeps them text without this warning, =error refuses such records"
      )
    if self.unread:
      most = dict(sorted(self.unread.items(), key=lambda item: -item[1]))
      names = [f"'{printable(name)}' in {found:,}" for name, found in most.items()]
      more = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
      said.append(f"fields of the records that are not used: {', '.join(names[:_SHOWN])}{more} of {count:,} records")
    if self.lost_first is not None:
      parts = []
      if self.lost_early:
        parts.append(f"{self.lost_early} before the last user's message, where the template drops thoughts")
      if self.lost_late:
        parts.append(f"{self.lost_late} after it, where the template does not write the thought that the record has")
      remedy = ". train_on=last learns the answers to the last user's message alone" if self.lost_early else ""
      said.append(f"answers learned without their thoughts: {', '.join(parts)} (first in {place(self.lost_first)}){remedy}")
    return said
