"""A preview of the data of a run: records with their tokens and the learned parts, and the counts of one pass."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from maxtext_like.config.vision import VisionConfig
from maxtext_like.data.documents import BadRecordError, Documents, Record
from maxtext_like.data.order import Order, Share
from maxtext_like.data.pack import LOSSES, Document, Packer, Row, first_part
from maxtext_like.data.sources import DataConfig, kind_of, open_documents
from maxtext_like.data.tokenization.tokenize import DocumentStream, Tokenize
from maxtext_like.data.tokenization.tokenizer import Tokenizer, load_tokenizer
from maxtext_like.data.validate import Notes, RecordChecks, fix_of_bad, make_checks, max_skipped
from maxtext_like.errors import UserError
from maxtext_like.layers.embedding import Lookup

BAD_SHOWN = 10


@dataclass(frozen=True)
class ShownRecord:
  """A record, or one of its samples, as a run uses it.

  Attributes:
    place: file and line, and the number of the sample.
    parts: its text in order up to the cut, each part with True if it is learned.
    tokens: number of its tokens.
    learned: number of tokens that would be learned without a cut.
    kept: number of learned tokens before the cut; None if the record is not cut.
    rest: the text after the cut, which is not trained on.
  """

  place: str
  parts: tuple[tuple[str, bool], ...]
  tokens: int
  learned: int
  kept: int | None
  rest: str = ""


@dataclass(frozen=True)
class SourceCounts:
  """Counts of one pass over the documents of a source.

  Attributes:
    documents: number of documents that were counted, from the first one.
    available: number of all documents.
    empty: documents without text.
    bad: documents that cannot be used.
    tokens: tokens of the other documents.
    learned: tokens that are targets of a row.
    truncated: conversations that are longer than a row and are cut.
    cut_at_image: conversations that have more images than a row can hold and are cut before the first such image.
    unlearned: conversations that are left out because the part that fits in a row has nothing to learn.
    excluded: conversations that are left out because their records mark them as not to be learned.
    rows: number of rows.
    filled: share of the positions in the rows that are not padding.
    reasons: reasons of the first bad records.
    notes: sentences, with counts, about usable records that may not mean what their author intended.
    fix: setting that handles the bad records; "" if there are none.
  """

  documents: int
  available: int
  empty: int
  bad: int
  tokens: int
  learned: int
  truncated: int
  cut_at_image: int
  unlearned: int
  excluded: int
  rows: int
  filled: float
  reasons: tuple[str, ...]
  notes: tuple[str, ...]
  fix: str = ""


@dataclass(frozen=True)
class DataPreview:
  """The preview of the data of a run.

  Attributes:
    records: first records of each source.
    counts: counts by source; the key is "" for a single source without a name.
    template: name of the chat template; None if the records are text.
    length: tokens in a row.
  """

  records: tuple[ShownRecord, ...]
  counts: dict[str, SourceCounts]
  template: str | None
  length: int


def preview(
  data: DataConfig, *, vocab_size: int, length: int, vision: VisionConfig, chat_template: str | None, show: int, most: int
) -> DataPreview:
  """Reads the training documents in the order of the files, without the shuffle and without a held-out share.

  Args:
    data: the ``data:`` section, with its tokenizer resolved.
    vocab_size: vocabulary of the model.
    length: tokens in a row.
    vision: the ``vision:`` section.
    chat_template: the template that is published for the model's family.
    show: number of records to show from each source.
    most: number of documents to count from each source.

  Raises:
    UserError: as ``make_data``, except for bad records, which are counted.
  """
  if not kind_of(data).text:
    raise UserError(f"dataset={data.dataset} has no text to preview", fix="use a data set with text, such as dataset=jsonl")
  tokenizer = load_tokenizer(data.tokenizer, vocab_size)
  checks = make_checks(data, tokenizer, vision, length, chat_template)
  undivided = tokenizer.special if data.special_tokens_in_text == "parse" else ()
  records: list[ShownRecord] = []
  counts = {}
  for name, documents in open_documents(data, vision, "train", None, undivided).items():
    tokenize = Tokenize(documents, tokenizer, Lookup(vocab_size=vocab_size), checks)
    places = checks.multimodal.vision.max_images_per_row if checks.multimodal else 0
    row = (length, places) if checks.chat or not data.packing else None
    records += _shown(documents, tokenize, tokenizer, checks, show, row)
    counts[name] = _count(documents, tokenize, data, checks, length, most)
  return DataPreview(tuple(records), counts, checks.chat.renderer.name if checks.chat else None, length)


def _shown(
  documents: Documents, tokenize: Tokenize, tokenizer: Tokenizer, checks: RecordChecks, show: int, row: tuple[int, int] | None
) -> list[ShownRecord]:
  """Returns the first records. ``row``: tokens and images that a row can hold; None if a record continues in the next row."""
  names = {i: spelling for spelling, i in tokenizer.special.items()}
  names |= checks.chat.encoder.spellings if checks.chat else {}
  for kind in ("pad", "eos", "bos"):
    token = getattr(tokenizer, f"{kind}_id")
    if token is not None:
      names.setdefault(token, f"<{kind}>")
  image = None
  if checks.multimodal:
    image = checks.multimodal.vision.image_token_id
    for kind in ("boi", "eoi"):
      names.setdefault(getattr(checks.multimodal.vision, f"{kind}_token_id"), f"<{kind}>")
  found = []
  for number in range(len(documents)):
    if len(found) >= show:
      break
    document = tokenize(number)
    if document.ids is None:
      continue
    samples = tuple(document.samples())
    for i, sample in enumerate(samples, 1):
      assert sample.ids is not None
      learned = _learned(sample)
      end = len(learned) if row is None else first_part(sample, *row)
      parts = _parts(sample.ids[:end].tolist(), learned[:end].tolist(), tokenizer, names, image)
      rest = _parts(sample.ids[end:].tolist(), [False] * (len(learned) - end), tokenizer, names, image)
      place = documents.place(number) + (f" (sample {i} of {len(samples)})" if len(samples) > 1 else "")
      kept = None if end == len(learned) else int(learned[:end].sum())
      text = "".join(part for part, _ in rest)
      found.append(ShownRecord(place, tuple(parts), len(learned), int(learned.sum()), kept, text))
  return found


def _learned(document: Document) -> np.ndarray:
  """Returns True for each id that is a target. The first id never is, because no token precedes it."""
  assert document.ids is not None
  learned = np.ones(len(document.ids), bool) if document.learned is None else document.learned.copy()
  learned[0] = False
  return learned


def _parts(
  ids: list[int], learned: list[bool], tokenizer: Tokenizer, names: dict[int, str], image: int | None
) -> list[tuple[str, bool]]:
  """Returns texts with True if they are learned. Special tokens are spelled out, tokens of an image are counted."""
  parts: list[tuple[str, bool]] = []
  kind = lambda pair: (pair[1], pair[0] if pair[0] in names or pair[0] == image else None)
  for (is_learned, token), group in groupby(zip(ids, learned, strict=True), kind):
    run = [i for i, _ in group]
    if token is None:
      text = tokenizer.decode(run)
    elif token == image:
      text = f"{names.get(token, '<image>')} x {len(run)}"
    else:
      text = names[token] * len(run)
    if parts and parts[-1][1] == is_learned:
      parts[-1] = (parts[-1][0] + text, is_learned)
    else:
      parts.append((text, is_learned))
  return parts


def _count(
  documents: Documents, tokenize: Tokenize, data: DataConfig, checks: RecordChecks, length: int, most: int
) -> SourceCounts:
  available = min(len(documents), data.dataset_documents_max or len(documents))
  reasons: list[str] = []
  fixes: Counter[str] = Counter()

  def note(bad: BadRecordError) -> None:
    fixes[bad.fix] += 1
    if len(reasons) < BAD_SHOWN:
      reasons.append(str(bad))

  counting = _NotingDocuments(documents, checks)
  order = Order(Share(min(available, most)), shuffle_seed=None, passes=1, groups=None)
  packer = Packer(
    DocumentStream(order, replace(tokenize, documents=counting)),
    length=length,
    pad_id=0,
    packing=data.packing,
    on_bad_record="skip",
    bad_max=len(documents),
    epoch_length=len(documents) + 1,
    max_images=checks.multimodal.vision.max_images_per_row if checks.multimodal else 0,
    keep_whole=checks.chat is not None,
  )
  packer.on_skip = note
  rows = filled = learned = 0
  for row in _rows(packer):
    if checks.multimodal:
      checks.multimodal.mask_targets(row)
    rows += 1
    filled += int((row.segments > 0).sum())
    learned += int((row.targets >= 0).sum())
  got: dict[str, Any] = packer.counts()
  return SourceCounts(
    documents=got["documents"],
    available=available,
    empty=got["empty"],
    bad=got["bad"],
    tokens=got["tokens"],
    learned=learned,
    **{name: got.get(name, 0) for name in LOSSES},
    rows=rows,
    filled=filled / max(1, rows * length),
    reasons=tuple(reasons),
    notes=tuple(counting.notes.sentences(got["documents"], documents.place, asked=data.special_tokens_in_text is not None)),
    fix=fix_of_bad(fixes, got["bad"], got["documents"] - got["empty"], _skip(got["bad"], available)) if got["bad"] else "",
  )


class _NotingDocuments:
  """Documents that collect notes about the records as they are read."""

  def __init__(self, documents: Documents, checks: RecordChecks):
    self._documents, self._checks = documents, checks
    self.notes = Notes()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._documents, name)

  def read(self, index: int) -> Record:
    """Reads document ``index``. A bad record is reported by the code that uses it."""
    record = self._documents.read(index)
    with contextlib.suppress(BadRecordError):
      self.notes.add(index, self._checks.check(record, self._documents.place(index)))
    return record


def _skip(bad: int, available: int) -> str:
  return "on_bad_record=skip to leave out and count them" if bad <= max_skipped(available) else ""


def _rows(packer: Packer) -> Iterator[Row]:
  while True:
    try:
      yield next(packer)
    except StopIteration:
      return
