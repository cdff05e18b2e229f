"""Every record of a data set looked at once before the first step, so that no bad one ends a run in its middle.

What is found is kept by the data's fingerprint in ~/.cache/maxtext-like/data (or below XDG_CACHE_HOME), where later starts
find it. An entry that is damaged or written by another version counts as none; whoever writes one puts a whole file in place.
"""

import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from maxtext_like.data.chat.conversation import Conversation
from maxtext_like.data.chat.dataset import Chat
from maxtext_like.data.documents import BadRecordError, Documents, Record
from maxtext_like.data.image_text.image_names import shown
from maxtext_like.data.image_text.images import BadImageError, check_header
from maxtext_like.data.image_text.multimodal import Multimodal
from maxtext_like.data.notes import Notes, Seen
from maxtext_like.data.readers.input_files import cache_folder
from maxtext_like.data.tokenization.special_tokens import Spellings, listed
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)

FORMAT = 5  # version of a stored entry and of the rules; results of an older version may no longer be valid
BAD_KEPT = 10_001  # more bad records than any number of documents may have
SHOWN = 10
FIXES_KEPT = 10
TELL_SECONDS, ALIVE_SECONDS = 30.0, 1.0


@dataclass(frozen=True)
class Findings:
  """What a look at every record found.

  Attributes:
    bad: document and reason of the first BAD_KEPT bad records.
    bad_count: of all of them.
    notes: remarks about the good records.
    fixes: words to type against bad records (``BadRecordError.fix``), each with the number of records.
  """

  bad: tuple[tuple[int, str], ...] = ()
  bad_count: int = 0
  notes: Notes = field(default_factory=Notes)
  fixes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Rules:
  """What a record must be, beyond what its source has seen to.

  Attributes:
    spellings: of the tokenizer's special tokens.
    special: data.special_tokens_in_text.
    multimodal: how images enter; None: not at all.
    chat: what makes tokens of conversations; None: records are text.
    naming: how conversations name images, which decides whether a record is bad whatever the model takes.
  """

  spellings: Spellings
  special: str | None
  multimodal: Multimodal | None
  chat: Chat | None = None
  naming: tuple[str, ...] = ()

  def check(self, record: Record, place: str) -> Seen:
    """Return the properties of a record that deserve a warning.

    Raises:
      BadRecordError: the record cannot be used: placeholders without images or the other way round; spellings of special tokens
        where they are an error; a conversation that the template does not have.
    """
    if record.conversation is not None:
      return self._check_conversation(record.conversation, place)
    parts = self.multimodal.parts(record, place) if self.multimodal else (record.text,)
    spelt = Counter(spelling for part in parts for spelling in self.spellings.find(part))
    if spelt and self.special == "error":
      raise BadRecordError(place, f"the text spells special tokens: {listed(spelt)} (special_tokens_in_text=error)")
    self._refuse_image_token(spelt, self.spellings.special, place)
    return Seen(spelt)

  def _check_conversation(self, conversation: Conversation, place: str) -> Seen:
    assert self.chat is not None
    if self.chat.excludes(conversation):
      return Seen(unread=conversation.unread)
    samples = self.chat.samples(conversation, place)
    spelt = self.chat.spelt(samples)
    self._refuse_image_token(spelt, self.chat.encoder.special, place)
    return Seen(spelt, conversation.unread, *self.chat.lost_thoughts(conversation, samples))

  def _refuse_image_token(self, spelt: Mapping[str, int], special: Mapping[str, int], place: str) -> None:
    """Raise BadRecordError if a spelling would become the placeholder token of an image."""
    if spelt and self.special == "parse" and self.multimodal:
      image = self.multimodal.vision.image_token_id
      if any(special[spelling] == image for spelling in spelt):
        raise self.multimodal.image_token_in_text(place)

  def check_images(self, record: Record, place: str) -> None:
    """BadRecordError when an image file is missing or none that can be used, as far as its first bytes show."""
    for path in record.images if self.multimodal else ():
      try:
        check_header(path)
      except BadImageError as error:
        raise BadRecordError(place, f"image {shown(path)}: {error}") from None


def inspect(
  documents: Documents, count: int, rules: Rules, settings: Any, alive: Callable[[], None] = lambda: None
) -> Findings:
  """Looks at the first `count` documents, or at what was found when the same ones were looked at before.

  `settings`: JSON of what beside the data and the rules decides whether a record is bad (the field's name).
  `alive` is called about every second while records are read: of terabytes that takes hours.
  Raises UserError and RetryableError as reading does.
  """
  special = None if rules.special == "literal" else rules.special  # which finds the same
  identity = [FORMAT, documents.fingerprint(), count, sorted(rules.spellings.special), special, settings, rules.naming]
  identity.append(rules.multimodal.identity() if rules.multimodal else None)
  identity.append(rules.chat.identity() if rules.chat else None)
  entry = _entry(identity)
  found = _kept(entry)
  if found is None:
    found, lasting = _look(documents, count, rules, alive)
    if lasting:
      _keep(entry, found)
  return found


def _look(documents: Documents, count: int, rules: Rules, alive: Callable[[], None]) -> tuple[Findings, bool]:
  """What is found, and whether it holds as long as the data are the same (a missing image file may come back)."""
  bad: list[tuple[int, str]] = []
  notes = Notes()
  fixes: Counter[str] = Counter()
  bad_count, lasting = 0, True
  told = lived = time.monotonic()
  for number, record in enumerate(islice(documents.scan(), count)):
    try:
      if isinstance(record, BadRecordError):
        raise record
      seen = rules.check(record, "")
      if record.images:
        try:
          rules.check_images(record, "")
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
    if now - lived >= ALIVE_SECONDS:
      lived = now
      alive()
    if now - told > TELL_SECONDS:
      told = now
      logger.warning("looking at every record, once for these data: %s of %s so far", f"{number + 1:,}", f"{count:,}")
  return Findings(tuple(bad), bad_count, notes, tuple(fixes.most_common(FIXES_KEPT))), lasting


def most_skipped(count: int) -> int:
  """Return how many bad records on_bad_record=skip accepts among ``count`` documents."""
  return max(10, min(10_000, count // 100))


def judge(found: Findings, documents: Documents, count: int, *, key: str, skip_bad: bool, bad_max: int, asked: bool) -> None:
  """Refuses or tells what was found.

  Args:
    found: in the first `count` of the documents.
    documents: of `key`.
    count: documents.
    key: where they are named.
    skip_bad: on_bad_record=skip, up to `bad_max` bad records.
    bad_max: see there.
    asked: special_tokens_in_text is set.

  Raises:
    UserError: bad records, with file, line and reason.
  """
  skipped = found.bad_count <= bad_max and found.bad_count < count  # on_bad_record=skip accepts this number
  if found.bad_count and not (skip_bad and skipped):
    fix = fix_of_bad(dict(found.fixes), found.bad_count, count, "on_bad_record=skip leaves them out and counts them" * skipped)
    if found.bad_count == 1:
      raise UserError(f"{next(_shown(found, documents))}\n  fix: {fix}")
    too_many = f", more than on_bad_record=skip accepts ({bad_max}: 1 % of the documents, at least 10)" * (
      skip_bad and found.bad_count > bad_max
    )
    lines = "".join(f"\n  {line}" for line in _shown(found, documents))
    raise UserError(f"{found.bad_count} bad records among the {count} of data.{key}{too_many}:{lines}\n  fix: {fix}")
  if found.bad_count:
    first = next(_shown(found, documents))
    logger.warning("data.%s: %d of %d records are bad and left out; the first: %s", key, found.bad_count, count, first)
  for sentence in found.notes.sentences(count, documents.place, asked=asked):
    logger.warning("data.%s: %s", key, sentence)


def fix_of_bad(fixes: Mapping[str, int], bad: int, count: int, skip: str) -> str:
  """Return the words to type against bad records.

  Args:
    fixes: ``BadRecordError.fix`` of each, and how many have it.
    bad: bad records,
    count: and all.
    skip: says how they can be skipped; "" if they cannot.
  """
  fix, most = max(fixes.items(), key=lambda item: item[1], default=("", 0))
  if fix and 2 * most > bad and (bad == count or not skip):
    return fix if most == bad else f"{fix} (for {most:,} of them)"
  if bad == count:
    return "repair the records, or dataset_path=FILES of others: none of these can be used"
  return f"repair the record{'s' * (bad > 1)}, or {skip}" if skip else "repair the records: they are too many to be skipped"


def _shown(found: Findings, documents: Documents) -> Iterator[str]:
  for number, reason in found.bad[:SHOWN]:
    yield f"{documents.place(number)}: {reason}"
  if found.bad_count > SHOWN:
    yield f"... and {found.bad_count - SHOWN} more"


def _entry(identity: list[Any]) -> Path:
  import xxhash

  return (
    cache_folder()
    / f"{xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode('utf-8', 'surrogateescape'))}.json"
  )


def _sum(findings: Any) -> str:
  import xxhash

  return xxhash.xxh3_128_hexdigest(json.dumps(findings, sort_keys=True).encode())


def _kept(entry: Path) -> Findings | None:
  """What an entry says; None when there is none, or it is not whole."""
  try:
    stored = json.loads(entry.read_bytes())
    if stored["sum"] != _sum(stored["findings"]):
      return None
    found = stored["findings"]
    pairs = {name: tuple((first, second) for first, second in found[name]) for name in ("bad", "fixes")}
    return Findings(**{**found, **pairs, "notes": Notes(**found["notes"])})
  except (OSError, ValueError, KeyError, TypeError):  # the data are looked at again, and the entry is written anew
    return None


def _keep(entry: Path, found: Findings) -> None:
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
    logger.warning("%s: cannot be written (%s), so the data are looked at again at every start", entry.parent, error.strerror)
