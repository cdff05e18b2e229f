"""Packs documents of tokens into rows of fixed length, with segments, positions and targets."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from maxtext_like.data.documents import BadRecordError
from maxtext_like.data.image_text.images import MeasuredImage, TowerImage
from maxtext_like.errors import UserError
from maxtext_like.targets import IGNORED

KEYS = ("tokens", "targets", "positions", "segments")
LOSSES = ("truncated", "cut_at_image", "unlearned", "excluded")
"""Counts of conversations: cut at the end of a row; cut before an image that the row cannot hold; left out because nothing is
learned; left out because the record says so. If a conversation has several samples, the first three count samples.
"""


@dataclass
class Row:
  """One row: four int32 arrays [T] and the images in it.

  Attributes:
    tokens: token ids.
    targets: the next token of each position; -100 has no loss.
    positions: position in the segment, starting at 0.
    segments: number of the document in the row, starting at 1; 0 is padding.
    images: the images whose tokens are in the row, in order.
  """

  tokens: np.ndarray
  targets: np.ndarray
  positions: np.ndarray
  segments: np.ndarray
  images: list[TowerImage | MeasuredImage] = field(default_factory=list)

  @classmethod
  def empty(cls, length: int, pad_id: int) -> "Row":
    """Returns a row of padding."""
    return cls(
      np.full(length, pad_id, np.int32),
      np.full(length, IGNORED, np.int32),
      np.zeros(length, np.int32),
      np.zeros(length, np.int32),
    )

  def place(self, at: int, ids: np.ndarray, segment: int, learned: np.ndarray | None = None) -> None:
    """Writes a segment. The target of a token is the next token if that is learned; the last token has no target."""
    end = at + len(ids)
    self.tokens[at:end] = ids
    self.targets[at : end - 1] = ids[1:] if learned is None else np.where(learned[1:], ids[1:], IGNORED)
    self.positions[at:end] = np.arange(len(ids))
    self.segments[at:end] = segment


@dataclass(frozen=True)
class ImageSpan:
  """Tokens [start, end) of a document that one image takes, with its frame. They are never divided between rows."""

  start: int
  end: int
  image: TowerImage | MeasuredImage


@dataclass(frozen=True)
class Document:
  """A document as the tokenizing stage passes it to the packer.

  Attributes:
    number: number of the document.
    ids: int32 token ids; None if the document is empty (less than two tokens), bad or excluded.
    bad: why the document is bad; None if it is not.
    images: spans of the images.
    learned: True for each id that is a target; None if all are.
    ends: end of each sample in ``ids``, if there are several. Each sample becomes its own segment.
    excluded: the record marks the document as not to be learned.
  """

  number: int
  ids: np.ndarray | None = None
  bad: BadRecordError | None = None
  images: tuple[ImageSpan, ...] = ()
  learned: np.ndarray | None = None
  ends: tuple[int, ...] = ()
  excluded: bool = False

  def samples(self) -> "Iterator[Document]":
    """Yields its samples, each as a document of one sample."""
    if not self.ends:
      yield self
      return
    assert self.ids is not None
    for begin, end in zip((0, *self.ends), self.ends, strict=False):
      images = (ImageSpan(s.start - begin, s.end - begin, s.image) for s in self.images if begin <= s.start < end)
      learned = None if self.learned is None else self.learned[begin:end]
      yield Document(self.number, self.ids[begin:end], images=tuple(images), learned=learned)


class Rows(Protocol):
  """An iterator over rows with exact, JSON-serializable state."""

  def __next__(self) -> Row: ...

  def get_state(self) -> dict[str, Any]: ...

  def set_state(self, state: dict[str, Any]) -> None: ...

  def counts(self) -> dict[str, int]: ...

  def returned_counts(self) -> dict[str, float]: ...


def _part_end(length: int, images: tuple[ImageSpan, ...], begin: int, room: int, places: int) -> int:
  """Returns the end of the part from ``begin`` of a document with ``length`` tokens; see ``Packer._end``."""
  end = min(begin + room, length)
  ahead = [span for span in images if span.start >= begin]
  for i, span in enumerate(ahead):
    if span.start < end and (span.end > end or i >= places):
      return span.start
  return end


def first_part(document: Document, length: int, max_images: int) -> int:
  """Returns the number of tokens of a document that an empty row takes."""
  assert document.ids is not None
  return _part_end(len(document.ids), document.images, 0, length, max_images)


def is_learned(document: Document, length: int, max_images: int) -> bool:
  """Returns True if anything is learned from the part of a document that an empty row takes."""
  return document.learned is None or bool(document.learned[1 : first_part(document, length, max_images)].any())


class Packer:
  """Packs the documents of a DocumentStream or a Mixture into rows.

  With ``packing`` documents are concatenated and cut every ``length`` tokens. The rest of a document continues in the next row
  as a separate segment with positions from 0, because attention does not cross rows. Without ``packing`` each row has one
  document: a longer document is cut and the dropped tokens are counted, a shorter one is padded. An image is never cut. If a
  row ends inside an image, or cannot hold it, the image moves to the next row and the rest of the row is padding.

  With ``keep_whole`` documents are not divided between rows, because the learned part of a conversation depends on its
  beginning. A document that does not fit in the rest of a row starts the next row. A document that is longer than a row, or has
  more images than a row can hold, is cut; if the remaining part has nothing to learn, it is left out. ``LOSSES`` counts these
  cases. A conversation of several samples is treated as that many conversations.

  With ``by_epoch`` no row has documents of two passes.

  The state consists of the source's state before the document that is being cut, the sample of it and the number of used
  tokens. Resuming reads that one document again. ``on_bad_record`` is applied here, in order, so that the counts are as
  reproducible as the rows.
  """

  def __init__(
    self,
    documents: Any,
    *,
    length: int,
    pad_id: int,
    packing: bool,
    on_bad_record: str,
    bad_max: int,
    epoch_length: int,
    max_images: int = 0,
    keep_whole: bool = False,
    by_epoch: bool = False,
  ):
    """Sets up the packer.

    Args:
      documents: an iterator of Document with ``get_state``, ``set_state`` and ``counts``.
      length: tokens in a row.
      pad_id: token id of padding.
      packing: see the class.
      on_bad_record: "error" or "skip".
      bad_max: number of bad records that "skip" accepts.
      epoch_length: number of documents in a pass.
      max_images: number of images that a row can hold.
      keep_whole: see the class.
      by_epoch: see the class.
    """
    self._documents = documents
    self._length, self._pad_id, self._packing = length, pad_id, packing
    self._skip_bad = on_bad_record == "skip"
    self._epoch_length, self._bad_max = epoch_length, bad_max
    self._max_images = max_images
    self._keep_whole, self._by_epoch = keep_whole, by_epoch
    self._learned: np.ndarray | None = None
    self._ids, self._used = np.empty(0, np.int32), 0
    self._images: tuple[ImageSpan, ...] = ()
    self._sample, self._later = 0, deque[Document]()  # number of the sample being cut, and the samples after it
    self._before = documents.get_state()
    self._tally = {"documents": 0, "empty": 0, "tokens": 0, "dropped_tokens": 0, "rows": 0}
    if keep_whole:
      self._tally |= {"learned_tokens": 0, **dict.fromkeys(LOSSES, 0)}
    self._bad: list[int] = []
    self._bad_seen: set[int] = set()
    self._without_tokens = 0  # documents read since the last one with tokens
    self._too_long: tuple[int, int] | None = None  # shortest and longest conversation that lost all learned tokens
    self.epoch = 0  # epoch of the newest row
    self.first_epoch: dict[str, int] | None = None  # the counts at the end of the first epoch
    self.on_skip: Callable[[BadRecordError], None] = lambda bad: None  # called once for each skipped record
    self.on_loss: Callable[[str], None] = lambda loss: None  # called with the name of the count that increases

  def __next__(self) -> Row:
    row = Row.empty(self._length, self._pad_id)
    at, segment = 0, 0
    while at < self._length:
      # Take the next document, or end the row at the end of the source or of an epoch.
      if self._used == len(self._ids) and not self._pull(begun=at > 0):
        break
      if not at:
        self.epoch = (self._tally["documents"] - 1) // self._epoch_length
      # Find the part of the document that fits, and decide whether it belongs in this row or the next.
      end = self._end(self._length - at, self._max_images - len(row.images))
      if at and (end == self._used or (self._keep_whole and end < len(self._ids))):
        break  # the next image, or the complete document, goes into the next row
      # Write the part as one segment, and count what is learned and what is cut.
      count = end - self._used
      segment += 1
      row.images += [span.image for span in self._images if self._used <= span.start < end]
      learned = None if self._learned is None else self._learned[self._used : end]
      row.place(at, self._ids[self._used : end], segment, learned)
      if self._keep_whole:
        self._tally["learned_tokens"] += count - 1 if learned is None else int(learned[1:].sum())
        if end < len(self._ids):
          at_image = len(self._images) > self._max_images and end == self._images[self._max_images].start
          self._count("cut_at_image" if at_image else "truncated")
      self._used = end
      at += count
      if self._keep_whole or not self._packing:
        self._tally["dropped_tokens"] += len(self._ids) - self._used
        self._used = len(self._ids)
      if not self._packing:
        break
    if not at:
      raise StopIteration
    self._tally["rows"] += 1
    return row

  def _end(self, room: int, places: int) -> int:
    """Returns the end of the part of the document that fits into ``room`` tokens and ``places`` for images of a row."""
    return _part_end(len(self._ids), self._images, self._used, room, places)

  def _count(self, loss: str) -> None:
    """Counts a conversation that is cut or left out."""
    self._tally[loss] += 1
    self.on_loss(loss)

  def _pull(self, *, begun: bool) -> bool:
    """Takes the next document with tokens. Returns False at the end of the source. ``begun``: the row is not empty."""
    if self._next_sample():
      return True
    while True:
      if self._by_epoch and begun and self._tally["documents"] // self._epoch_length > self.epoch:
        return False
      before = self._documents.get_state()
      try:
        document = next(self._documents)
      except StopIteration:
        return False
      if self._tally["documents"] == self._epoch_length and self.first_epoch is None:
        self.first_epoch = self.counts()
        self.first_epoch["rows"] += begun and self._keep_whole  # the next epoch need not fill this row
      self._tally["documents"] += 1
      if document.bad is not None:
        self._count_bad(document.number, document.bad)
      elif document.excluded:
        self._count("excluded")
      elif document.ids is None:
        self._tally["empty"] += 1
      else:
        self._before, self._sample, self._later = before, -1, deque(document.samples())
        if self._next_sample():
          self._without_tokens = 0
          return True
      self._without_tokens += 1
      if self._without_tokens >= self._epoch_length:
        raise self._no_tokens()

  def _no_tokens(self) -> UserError:
    """Returns the error about documents without a token to learn, with the number of documents for each reason."""
    unlearned, excluded = self._tally.get("unlearned", 0), self._tally.get("excluded", 0)
    reasons = (
      (len(self._bad), "are bad"),
      (self._tally["empty"], "are empty or shorter than two tokens (data.dataset_path, data.text_field)"),
      (unlearned, f"have no learned token in their first {self._length} tokens (max_target_length)"),
      (excluded, "are marked as not to be learned"),
    )
    fixes = []
    if self._too_long:
      shortest, longest = self._too_long
      fits = f"set max_target_length={longest}, which fits the longest conversation"
      fixes.append((fits if shortest == longest else f"{fits} ({shortest} fits the shortest)") + "; or set train_on=all")
    elif unlearned:
      fixes.append("increase max_images_per_row, or set train_on=all")
    fixes += ["set dataset_path=FILES with records that no field excludes (label, weight, train, ...)"] if excluded else []
    counted = ", ".join(f"{number:,} {reason}" for number, reason in reasons if number)
    return UserError(f"no token to learn in any of the {self._epoch_length:,} documents: {counted}", fix="; or ".join(fixes))

  def _next_sample(self) -> bool:
    """Takes the next sample of the document. Returns False after the last. Samples with nothing to learn are counted and left
    out."""
    while self._later:
      sample = self._later.popleft()
      self._sample += 1
      assert sample.ids is not None
      if self._keep_whole and not is_learned(sample, self._length, self._max_images):
        self._count("unlearned")
        if (size := len(sample.ids)) > self._length:
          shortest, longest = self._too_long or (size, size)
          self._too_long = min(shortest, size), max(longest, size)
        continue
      self._ids, self._used, self._images, self._learned = sample.ids, 0, sample.images, sample.learned
      self._tally["tokens"] += len(sample.ids)
      return True
    return False

  def _count_bad(self, number: int, bad: BadRecordError) -> None:
    if not self._skip_bad:
      raise UserError(f"{bad}\n  fix: repair the record, or set on_bad_record=skip to leave out such records and count them")
    if number in self._bad_seen:
      return
    self._bad_seen.add(number)
    self._bad.append(number)
    self.on_skip(bad)
    if len(self._bad) > self._bad_max:
      raise UserError(
        f"{len(self._bad)} bad records, more than on_bad_record=skip accepts ({self._bad_max}: 1 % of the documents, "
        f"from 10 to 10,000); the last one: {bad}\n  fix: repair the records"
      )

  def returned_counts(self) -> dict[str, float]:
    """Returns the counts. They are exact, because every row that was made was also returned."""
    return {**self.counts()}

  def counts(self) -> dict[str, int]:
    return {**self._tally, "bad": len(self._bad), **self._documents.counts()}

  def get_state(self) -> dict[str, Any]:
    unfinished = self._used < len(self._ids) or bool(self._later)
    return {
      "documents": self._before if unfinished else self._documents.get_state(),
      "used": self._used if unfinished else 0,
      "begun": unfinished,  # the document is already counted, even if none of its tokens was used
      "sample": self._sample if unfinished else 0,
      "tally": dict(self._tally),
      "bad": list(self._bad),
      "fruitless": self._without_tokens,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    self._documents.set_state(state["documents"])
    self._ids, self._used, self._images, self._learned = np.empty(0, np.int32), 0, (), None
    self._sample, self._later = 0, deque[Document]()
    if state.get("begun", state["used"]):
      document = next(self._documents)
      samples, at = list(document.samples()), state.get("sample", 0)
      ids = samples[at].ids if 0 <= at < len(samples) else None
      if ids is None or len(ids) < state["used"]:
        raise UserError(
          f"document {document.number} differs from the one that the checkpoint was reading: the data changed\n"
          "  fix: restore the data, or start a new run (init_from loads the weights)"
        )
      self._sample, self._later = at, deque(samples[at + 1 :])
      self._before, self._ids, self._used = state["documents"], ids, state["used"]
      self._images, self._learned = samples[at].images, samples[at].learned
    self._tally = dict.fromkeys(self._tally, 0) | state["tally"]  # checkpoints of an earlier version have fewer counts
    self._bad = list(state["bad"])
    self._bad_seen = set(self._bad)
    self._without_tokens = state["fruitless"]


class ShuffleBuffer:
  """Shuffles rows inside consecutive buffers of ``size`` rows. With ``by_epoch`` a buffer ends at the end of an epoch.

  The rows of one long document follow each other; the shuffle spreads them over many batches. The state is the state of the
  packer at the start of the buffer and the position in the buffer. Resuming fills one buffer again.
  """

  def __init__(self, rows: Packer, *, size: int, seed: int, by_epoch: bool = False):
    self._rows, self._size, self._seed, self._by_epoch = rows, size, seed, by_epoch
    self._number, self._next = 0, 0
    self._start, self._begun = rows.get_state(), rows.counts()
    self._buffer: list[Row] = []

  def __next__(self) -> Row:
    if not self._buffer:
      self._start, self._begun = self._rows.get_state(), self._rows.counts()
      self._fill()
    row = self._buffer[self._next]
    self._next += 1
    if self._next == len(self._buffer):
      self._buffer, self._next, self._number = [], 0, self._number + 1
      self._start = self._rows.get_state()
    return row

  def _fill(self) -> None:
    rows: list[Row] = []
    epoch = 0
    while len(rows) < self._size:
      before = self._rows.get_state() if self._by_epoch else {}
      try:
        row = next(self._rows)
      except StopIteration:
        if not rows:
          raise
        break
      if self._by_epoch and rows and self._rows.epoch > epoch:  # this row begins the next buffer
        self._rows.set_state(before)
        break
      epoch = self._rows.epoch
      rows.append(row)
    order = np.random.default_rng((self._seed, self._number)).permutation(len(rows))
    self._buffer = [rows[index] for index in order]

  def counts(self) -> dict[str, int]:
    return self._rows.counts()

  def returned_counts(self) -> dict[str, float]:
    """Returns the counts before the buffer, plus the share of the buffer's counts that belongs to its returned rows.

    The share is an average: which documents the returned rows contain is not tracked.
    """
    counts = self._rows.counts()
    if not self._buffer:
      return {**counts}
    share = self._next / len(self._buffer)
    return {name: self._begun[name] + (number - self._begun[name]) * share for name, number in counts.items()}

  def get_state(self) -> dict[str, Any]:
    # Checkpoints store the number of the buffer as "block".
    return {"block": self._number, "next": self._next, "rows": self._start}

  def set_state(self, state: dict[str, Any]) -> None:
    self._rows.set_state(state["rows"])
    self._start, self._number, self._next = state["rows"], state["block"], state["next"]
    self._buffer, self._begun = [], self._rows.counts()
    if self._next:
      self._fill()
