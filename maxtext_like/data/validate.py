"""Validates every record of a data set before the first step, so that no bad record ends a run in the middle.

The findings are stored by the data's fingerprint in ~/.cache/maxtext-like/data (or below XDG_CACHE_HOME), where later starts
find them. An entry that is damaged or was written by another version is ignored. Entries are replaced atomically.
"""

import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from maxtext_like.config.vision import VisionConfig
from maxtext_like.data.chat.conversation import Conversation
from maxtext_like.data.chat.dataset import Chat
from maxtext_like.data.documents import BadRecordError, Documents, Record
from maxtext_like.data.image_text.image_names import shown
from maxtext_like.data.image_text.images import BadImageError, check_header
from maxtext_like.data.image_text.multimodal import Multimodal
from maxtext_like.data.readers.input_files import cache_folder
from maxtext_like.data.sources import DataConfig, kind_of
from maxtext_like.data.tokenization.special_tokens import Spellings, listed
from maxtext_like.data.tokenization.tokenizer import Tokenizer
from maxtext_like.errors import UserError
from maxtext_like.strict_json import printable

logger = logging.getLogger(__name__)

FORMAT = 5  # version of a stored entry and of the checks; results of an older version may no longer be valid
BAD_KEPT = 10_001  # more bad records than on_bad_record=skip accepts for any number of documents
SHOWN = 10
FIXES_KEPT = 10
LOG_SECONDS, ALIVE_SECONDS = 30.0, 1.0
UNREAD_KEPT = 1000  # most names of unread fields that are counted
FIELDS_SHOWN = 10


@dataclass(frozen=True)
class Seen:
  """Properties of one good record; see ``Notes``."""

  spelled: Mapping[str, int] = field(default_factory=dict)
  unread: tuple[str, ...] = ()
  lost_early: int = 0
  lost_late: int = 0


@dataclass
class Notes:
  """Counts over records.

  Attributes:
    spelled: how often the text spells each special token.
    spelled_documents: number of documents that spell any.
    spelled_first: the first such document; None if there is none.
    unread: for each field that is not read, the number of records with a value in it.
    lost_early: answers before the last user message that are learned without the thought in the record.
    lost_late: answers after the last user message whose thought the template does not write.
    lost_first: the first document with such an answer; None if there is none.
  """

  spelled: dict[str, int] = field(default_factory=dict)
  spelled_documents: int = 0
  spelled_first: int | None = None
  unread: dict[str, int] = field(default_factory=dict)
  lost_early: int = 0
  lost_late: int = 0
  lost_first: int | None = None

  def add(self, number: int, seen: Seen) -> None:
    """Adds the properties of document ``number`` to the counts."""
    for spelling, count in seen.spelled.items():
      self.spelled[spelling] = self.spelled.get(spelling, 0) + count
    if seen.spelled:
      self.spelled_documents += 1
      self.spelled_first = number if self.spelled_first is None else self.spelled_first
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
    if self.spelled_first is not None and not asked:
      most = dict(sorted(self.spelled.items(), key=lambda item: -item[1]))
      remarks.append(
        f"{self.spelled_documents} of {count} documents spell special tokens in their text ({listed(most)}; first in "
        f"{place(self.spelled_first)}). They are read as plain text here, but as the tokens by Hugging Face. "
        "special_tokens_in_text=parse reads them as the tokens, =literal keeps them text without a warning, =error refuses them"
      )
    if self.unread:
      most = dict(sorted(self.unread.items(), key=lambda item: -item[1]))
      names = [f"'{printable(name)}' in {found:,}" for name, found in most.items()]
      more = f" and {len(names) - FIELDS_SHOWN} others" if len(names) > FIELDS_SHOWN else ""
      remarks.append(f"fields of the records that are not used: {', '.join(names[:FIELDS_SHOWN])}{more} of {count:,} records")
    if self.lost_first is not None:
      parts = []
      if self.lost_early:
        parts.append(f"{self.lost_early} before the last user message, where the template drops thoughts")
      if self.lost_late:
        parts.append(f"{self.lost_late} after it, because the template does not write the thought in the record")
      remedy = ". train_on=last learns only the answers to the last user message" if self.lost_early else ""
      remarks.append(f"answers learned without their thoughts: {', '.join(parts)} (first in {place(self.lost_first)}){remedy}")
    return remarks


@dataclass(frozen=True)
class Findings:
  """The result of validating every record.

  Attributes:
    bad: document number and reason of the first BAD_KEPT bad records.
    bad_count: number of bad records.
    notes: remarks about the good records.
    fixes: settings that handle bad records (``BadRecordError.fix``), each with the number of records.
  """

  bad: tuple[tuple[int, str], ...] = ()
  bad_count: int = 0
  notes: Notes = field(default_factory=Notes)
  fixes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class RecordChecks:
  """The checks of a record that its source cannot make, and how records become tokens.

  Attributes:
    spellings: spellings of the tokenizer's special tokens.
    special: data.special_tokens_in_text.
    multimodal: how images enter the rows; None if they do not.
    chat: how conversations become tokens; None if records are text.
    naming: how conversations name images. It decides whether a record is bad, even if the model takes no images.
  """

  spellings: Spellings
  special: str | None
  multimodal: Multimodal | None
  chat: Chat | None = None
  naming: tuple[str, ...] = ()

  def check(self, record: Record, place: str) -> Seen:
    """Returns the properties of a record that deserve a warning.

    Raises:
      BadRecordError: the record cannot be used: placeholders without images or images without placeholders; spellings of
        special tokens where they are an error; a conversation that the template cannot render.
    """
    if record.conversation is not None:
      return self._check_conversation(record.conversation, place)
    parts = self.multimodal.parts(record, place) if self.multimodal else (record.text,)
    spelled = Counter(spelling for part in parts for spelling in self.spellings.find(part))
    if spelled and self.special == "error":
      raise BadRecordError(place, f"the text spells special tokens: {listed(spelled)} (special_tokens_in_text=error)")
    self._refuse_image_token(spelled, self.spellings.special, place)
    return Seen(spelled)

  def _check_conversation(self, conversation: Conversation, place: str) -> Seen:
    assert self.chat is not None
    if self.chat.excludes(conversation):
      return Seen(unread=conversation.unread)
    samples = self.chat.samples(conversation, place)
    spelled = self.chat.spelled(samples)
    self._refuse_image_token(spelled, self.chat.encoder.special, place)
    return Seen(spelled, conversation.unread, *self.chat.lost_thoughts(conversation, samples))

  def _refuse_image_token(self, spelled: Mapping[str, int], special: Mapping[str, int], place: str) -> None:
    """Raises BadRecordError if a spelling would become the placeholder token of an image."""
    if spelled and self.special == "parse" and self.multimodal:
      image = self.multimodal.vision.image_token_id
      if any(special[spelling] == image for spelling in spelled):
        raise self.multimodal.image_token_in_text(place)

  def check_images(self, record: Record, place: str) -> None:
    """Raises BadRecordError if an image file does not exist or its header shows that it is unusable."""
    for path in record.images if self.multimodal else ():
      try:
        check_header(path)
      except BadImageError as error:
        raise BadRecordError(place, f"image {shown(path)}: {error}") from None


def make_checks(
  data: DataConfig,
  tokenizer: Tokenizer,
  vision: VisionConfig | None,
  length: int,
  chat_template: str | None,
  own_rows: Container[int] | None = None,
) -> RecordChecks:
  """Returns the checks of records and what turns them into tokens. Arguments and errors are those of ``make_data``."""
  encode = tokenizer.encode_special if data.special_tokens_in_text == "parse" else tokenizer.encode
  multimodal = make_multimodal(vision, encode, length, own_rows if data.on_bad_record == "error" else None)
  chat = Chat.of(data, tokenizer, chat_template, multimodal) if data.data_format == "chat" else None
  naming = (vision.images_field, vision.image_placeholder) if chat and vision else ()
  return RecordChecks(Spellings(tokenizer.special), data.special_tokens_in_text, multimodal, chat, naming)


def make_multimodal(
  vision: VisionConfig | None, encode: Callable[[str], list[int]] | None, length: int, own_rows: Container[int] | None
) -> Multimodal | None:
  """Returns how images enter rows of ``length`` tokens; None if the model takes none. Raises UserError if no image fits."""
  if vision is None or not vision.use_multimodal:
    return None
  multimodal = Multimodal(vision, encode, own_rows)
  multimodal.check_length(length)
  return multimodal


def validate_source(
  data: DataConfig, documents: Documents, count: int, checks: RecordChecks, bad_max: int, key: str, alive: Callable[[], None]
) -> None:
  """Validates every record before the first step. Raises UserError if there are bad records."""
  silent = not checks.spellings.special or data.special_tokens_in_text in ("parse", "literal")
  if data.data_format == "text" and kind_of(data).sound and silent:
    return  # no record of this data set can be bad
  found = validate(documents, count, checks, [data.dataset, data.text_field], alive)
  report(
    found, documents, count, key=key, skip_bad=data.on_bad_record == "skip", bad_max=bad_max,
    asked=data.special_tokens_in_text is not None,
  )  # fmt: skip


def validate(
  documents: Documents, count: int, checks: RecordChecks, settings: Any, alive: Callable[[], None] = lambda: None
) -> Findings:
  """Validates the first ``count`` documents, or returns the stored findings if they were validated before.

  Args:
    documents: the documents.
    count: number of documents to validate.
    checks: checks of a record.
    settings: JSON of all other settings that decide whether a record is bad (the name of the field).
    alive: called about once a second, because validating terabytes takes hours.

  Raises:
    UserError, RetryableError: reading fails.
  """
  special = None if checks.special == "literal" else checks.special  # both have the same findings
  identity = [FORMAT, documents.fingerprint(), count, sorted(checks.spellings.special), special, settings, checks.naming]
  identity.append(checks.multimodal.identity() if checks.multimodal else None)
  identity.append(checks.chat.identity() if checks.chat else None)
  entry = _entry_path(identity)
  found = _load(entry)
  if found is None:
    found, lasting = _validate(documents, count, checks, alive)
    if lasting:
      _store(entry, found)
  return found


def _validate(documents: Documents, count: int, checks: RecordChecks, alive: Callable[[], None]) -> tuple[Findings, bool]:
  """Returns the findings, and True if they stay valid while the data are unchanged (a missing image file may appear later)."""
  bad: list[tuple[int, str]] = []
  notes = Notes()
  fixes: Counter[str] = Counter()
  bad_count, lasting = 0, True
  logged = called = time.monotonic()
  for number, record in enumerate(islice(documents.scan(), count)):
    try:
      if isinstance(record, BadRecordError):
        raise record
      seen = checks.check(record, "")
      if record.images:
        try:
          checks.check_images(record, "")
        except BadRecordError:
          lasting = False
          raise
      notes.add(number, seen)
    except BadRecordError as error:
      bad_count += 1
      fixes[error.fix] += 1
      if len(bad) < BAD_KEPT:
        bad.append((number, error.reason))
    now = time.monotonic()
    if now - called >= ALIVE_SECONDS:
      called = now
      alive()
    if now - logged > LOG_SECONDS:
      logged = now
      logger.warning("data: validating records (done once for these data): %s of %s", f"{number + 1:,}", f"{count:,}")
  return Findings(tuple(bad), bad_count, notes, tuple(fixes.most_common(FIXES_KEPT))), lasting


def max_skipped(count: int) -> int:
  """Returns how many bad records on_bad_record=skip accepts among ``count`` documents."""
  return max(10, min(10_000, count // 100))


def report(found: Findings, documents: Documents, count: int, *, key: str, skip_bad: bool, bad_max: int, asked: bool) -> None:
  """Raises or logs the findings.

  Args:
    found: findings in the first ``count`` documents.
    documents: the documents.
    count: number of documents.
    key: key of the ``data:`` section that names them.
    skip_bad: on_bad_record=skip.
    bad_max: number of bad records that it accepts.
    asked: special_tokens_in_text is set.

  Raises:
    UserError: there are bad records that are not skipped; the message has file, line and reason.
  """
  skipped = found.bad_count <= bad_max and found.bad_count < count  # on_bad_record=skip accepts this number
  if found.bad_count and not (skip_bad and skipped):
    fix = fix_of_bad(dict(found.fixes), found.bad_count, count, "on_bad_record=skip to leave out and count them" * skipped)
    if found.bad_count == 1:
      raise UserError(f"{next(_shown(found, documents))}\n  fix: {fix}")
    too_many = f", more than on_bad_record=skip accepts ({bad_max}: 1 % of the documents, from 10 to 10,000)" * (
      skip_bad and found.bad_count > bad_max
    )
    lines = "".join(f"\n  {line}" for line in _shown(found, documents))
    raise UserError(f"{found.bad_count} bad records among the {count} of data.{key}{too_many}:{lines}\n  fix: {fix}")
  if found.bad_count:
    first = next(_shown(found, documents))
    logger.warning("data.%s: %d of %d records are bad and are left out; the first: %s", key, found.bad_count, count, first)
  for sentence in found.notes.sentences(count, documents.place, asked=asked):
    logger.warning("data.%s: %s", key, sentence)


def fix_of_bad(fixes: Mapping[str, int], bad: int, count: int, skip: str) -> str:
  """Returns what to type against bad records.

  Args:
    fixes: ``BadRecordError.fix`` of the bad records, each with the number of records.
    bad: number of bad records.
    count: number of all records.
    skip: how to skip them; "" if that is not possible.
  """
  fix, most = max(fixes.items(), key=lambda item: item[1], default=("", 0))
  if fix and 2 * most > bad and (bad == count or not skip):
    return fix if most == bad else f"{fix} (for {most:,} of them)"
  if bad == count:
    return "repair the records, or dataset_path=FILES with other records: none of these can be used"
  return f"repair the record{'s' * (bad > 1)}, or {skip}" if skip else "repair the records: there are too many to skip them"


def _shown(found: Findings, documents: Documents) -> Iterator[str]:
  for number, reason in found.bad[:SHOWN]:
    yield f"{documents.place(number)}: {reason}"
  if found.bad_count > SHOWN:
    yield f"... and {found.bad_count - SHOWN} more"


def _entry_path(identity: list[Any]) -> Path:
  return (
    cache_folder()
    / f"{xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode('utf-8', 'surrogateescape'))}.json"
  )


def _sum(findings: Any) -> str:
  return xxhash.xxh3_128_hexdigest(json.dumps(findings, sort_keys=True).encode())


def _load(entry: Path) -> Findings | None:
  """Returns the findings of a stored entry; None if it does not exist or is damaged."""
  try:
    stored = json.loads(entry.read_bytes())
    if stored["sum"] != _sum(stored["findings"]):
      return None
    found = stored["findings"]
    pairs = {name: tuple((first, second) for first, second in found[name]) for name in ("bad", "fixes")}
    return Findings(**{**found, **pairs, "notes": Notes(**found["notes"])})
  except (OSError, ValueError, KeyError, TypeError):  # the data are validated again, and the entry is replaced
    return None


def _store(entry: Path, found: Findings) -> None:
  findings = json.loads(json.dumps(asdict(found)))
  try:
    entry.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=entry.parent, prefix=".new-")
    try:
      with open(handle, "w", encoding="utf-8") as file:
        json.dump({"sum": _sum(findings), "findings": findings}, file)
      os.replace(name, entry)
    except BaseException:
      os.unlink(name)
      raise
  except OSError as error:
    logger.warning("%s: cannot be written (%s), so every start validates the data again", entry.parent, error.strerror)
