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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from maxtext_like.data.chat.dataset import Chat
from maxtext_like.data.documents import BadRecordError, Documents, Record
from maxtext_like.data.image_names import shown
from maxtext_like.data.images import BadImageError, check_header
from maxtext_like.data.input_files import cache_folder
from maxtext_like.data.multimodal import Multimodal
from maxtext_like.data.special_tokens import Spellings
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)

FORMAT = 2  # of a kept entry, and of the rules: what an older one says may not hold any more
BAD_KEPT = 10_001  # more bad records than any number of documents may have
SHOWN = 10
TELL_SECONDS, ALIVE_SECONDS = 30.0, 1.0


@dataclass(frozen=True)
class Findings:
  """What a look at every record found.

  Attributes:
    bad: document and reason of the first BAD_KEPT bad records.
    bad_count: of all of them.
    spelt: how often each special token is spelt out in the text.
    spelt_documents: how many documents have any.
    spelt_first: the first of them; None: there is none.
  """

  bad: tuple[tuple[int, str], ...] = ()
  bad_count: int = 0
  spelt: tuple[tuple[str, int], ...] = ()
  spelt_documents: int = 0
  spelt_first: int | None = None


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

  def check(self, record: Record, place: str) -> list[str]:
    """The special tokens that a record spells out.

    Raises:
      BadRecordError: placeholders without images or the other way round; spellings where they are an error.
    """
    if record.conversation is not None:
      assert self.chat is not None
      self.chat.render(record.conversation, place)
      return []  # what a conversation spells is text
    parts = self.multimodal.parts(record, place) if self.multimodal else (record.text,)
    spelt = [spelling for part in parts for spelling in self.spellings.find(part)]
    if spelt and self.special == "error":
      raise BadRecordError(place, f"the text spells special tokens: {_listed(Counter(spelt))} (special_tokens_in_text=error)")
    if spelt and self.special == "parse" and self.multimodal:
      image = self.multimodal.vision.image_token_id
      if any(self.spellings.special[spelling] == image for spelling in spelt):
        raise self.multimodal.image_token_in_text(place)
    return spelt

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
  spelt: Counter[str] = Counter()
  bad_count, spelt_documents, first, lasting = 0, 0, None, True
  told = lived = time.monotonic()
  for number, record in enumerate(islice(documents.scan(), count)):
    try:
      if isinstance(record, BadRecordError):
        raise record
      if found := rules.check(record, ""):
        spelt.update(found)
        spelt_documents += 1
        first = number if first is None else first
      if record.images:
        try:
          rules.check_images(record, "")
        except BadRecordError:
          lasting = False
          raise
    except BadRecordError as error:
      bad_count += 1
      if len(bad) < BAD_KEPT:
        bad.append((number, error.reason))
    now = time.monotonic()
    if now - lived >= ALIVE_SECONDS:
      lived = now
      alive()
    if now - told > TELL_SECONDS:
      told = now
      logger.warning("looking at every record, once for these data: %s of %s so far", f"{number + 1:,}", f"{count:,}")
  return Findings(tuple(bad), bad_count, tuple(spelt.most_common()), spelt_documents, first), lasting


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
  if found.bad_count and not skip_bad:
    listed = "".join(f"\n  {line}" for line in _shown(found, documents))
    if found.bad_count == 1:
      remedy = "Repair the record, or on_bad_record=skip leaves such records out and counts them"
      raise UserError(f"{next(_shown(found, documents))}. {remedy}")
    raise UserError(
      f"{found.bad_count} bad records among the {count} of data.{key}:{listed}\n"
      "Repair them, or on_bad_record=skip leaves such records out and counts them"
    )
  if found.bad_count > bad_max:
    raise UserError(
      f"{found.bad_count} bad records, more than on_bad_record=skip accepts ({bad_max}: 1 % of the documents, at least 10); "
      f"the first one: {next(_shown(found, documents))}"
    )
  if found.bad_count:
    first = next(_shown(found, documents))
    logger.warning("data.%s: %d of %d records are bad and left out; the first: %s", key, found.bad_count, count, first)
  if found.spelt and not asked:
    assert found.spelt_first is not None
    logger.warning(
      "data.%s: %d of %d documents spell special tokens in their text (%s; first in %s). They become plain text; "
      "`generate` and Hugging Face take them for the tokens. special_tokens_in_text=parse does so too, =literal keeps them "
      "text without this warning, =error refuses such records",
      key, found.spelt_documents, count, _listed(dict(found.spelt)), documents.place(found.spelt_first),
    )  # fmt: skip


def _shown(found: Findings, documents: Documents) -> Iterator[str]:
  for number, reason in found.bad[:SHOWN]:
    yield f"{documents.place(number)}: {reason}"
  if found.bad_count > SHOWN:
    yield f"... and {found.bad_count - SHOWN} more"


def _listed(spelt: dict[str, int] | Counter[str]) -> str:
  names = [f"{spelling!r} {count} times" if count > 1 else f"{spelling!r} once" for spelling, count in spelt.items()]
  return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} others" if len(names) > SHOWN else "")


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
    pairs = {name: tuple((first, second) for first, second in found[name]) for name in ("bad", "spelt")}
    return Findings(**{**found, **pairs})
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
