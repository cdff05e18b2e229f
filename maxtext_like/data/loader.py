"""Builds the input pipeline of a run from its configuration. ``make_data`` returns an iterator of batches with exact state.

  files -> documents (jsonl, parquet, ...), every record validated once                            [sources.py, validate.py]
        -> order (held-out split, shuffle) -> tokens, mixed from several sources      [order.py, tokenize.py, mixture.py]
        -> packed rows -> rows shuffled in buffers -> batches                                                     [pack.py]
        -> a thread that prepares two batches ahead                                                           [prefetch.py]

A batch is a dict of numpy int32 arrays [B, T]: tokens, targets, positions, segments; with images it also has the arrays of
multimodal.py. B is the global batch. Each of several processes reads and packs all data, so batch n is bitwise the same for any
number of processes, and a run can resume with another number. Each process puts the rows of its own devices on them. The stream
of rows depends on the data, the data keys, the tokenizer and T. It does not depend on the batch size or on the number of
devices, processes or threads.
"""

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext_like.config.problems import alternatives
from maxtext_like.config.vision import VisionConfig
from maxtext_like.data import resume
from maxtext_like.data.documents import BadRecordError, Documents
from maxtext_like.data.epochs import Outlines, RowCounter
from maxtext_like.data.image_text.multimodal import Multimodal
from maxtext_like.data.mixture import Mixture, Source
from maxtext_like.data.order import Order, Share, Split, seed_for
from maxtext_like.data.pack import KEYS, Packer, Row, Rows, ShuffleBuffer
from maxtext_like.data.prefetch import Prefetch
from maxtext_like.data.registry import load
from maxtext_like.data.sources import (
  DataConfig,
  dotted,
  held_out_fraction,
  kind_of,
  open_documents,
  path_key,
  refuse_path,
  source_names,
)
from maxtext_like.data.tokenization.tokenize import DocumentStream, Tokenize
from maxtext_like.data.tokenization.tokenizer import Tokenizer, load_tokenizer
from maxtext_like.data.validate import RecordChecks, make_checks, make_multimodal, max_skipped, validate_source
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.layers.embedding import Lookup

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]
FORMAT = 1  # version of the state; changes when the same settings give another stream of rows
BUFFER_ROWS, BUFFER_TOKENS = 128, 2**18  # ShuffleBuffer: rows in a buffer, and the most tokens in it
SKIPS_LOGGED = 10
STALL_WARN_SECONDS, STALL_LIMIT_SECONDS = 60.0, 600.0


def make_data(
  data: DataConfig,
  *,
  vocab_size: int,
  length: int,
  global_batch: int,
  split: Split = "train",
  source: str | None = None,
  vision: VisionConfig | None = None,
  stall_limit_seconds: float = STALL_LIMIT_SECONDS,
  lookup: Lookup | None = None,
  chat_template: str | None = None,
  own_rows: Container[int] | None = None,
  epochs: int | None = None,
  alive: Callable[[], None] = lambda: None,
  waiting: Callable[[], None] = lambda: None,
  smaller_batch: Callable[[int], tuple[str, str]] | None = None,
) -> "DataSource":
  """Builds the batches of one split: ``global_batch`` rows of ``length`` tokens.

  "train" has no end unless ``epochs`` is set. With ``epochs``, every document is read that many times, no row has documents of
  two passes, and ``DataSource.rows`` is the number of rows. "eval" is one pass over the held-out documents, in order. After the
  end of either come batches of padding without targets, which have no weight in the loss; ``DataSource.reset`` starts again.

  The first batch is made before this returns, so that errors in the data are found before anything is compiled.

  Args:
    data: the ``data:`` section.
    vocab_size: vocabulary of the model.
    length: tokens in a row.
    global_batch: rows in a batch, over all processes.
    split: "train" or "eval".
    source: name of the source to evaluate if dataset_path has several sources. "train" mixes all of them by dataset_weights.
    vision: the ``vision:`` section. With ``use_multimodal`` the batches have images; records without images and sources of text
      need no change for that.
    stall_limit_seconds: time without a batch after which the run stops.
    lookup: the decoder's embedding tables, in which every token must have a row; default: one table of ``vocab_size`` rows.
    chat_template: the template that is published for the model's family; it renders conversations.
    own_rows: rows of a batch that this process puts on its devices; None for all. Images of other rows are not decoded, unless
      on_bad_record=skip, because then all processes have to skip the same records.
    epochs: number of passes over the training documents; None for no end.
    alive: called regularly while records are validated, which may take long.
    waiting: called while ``DataSource`` waits for a batch. An exception that it raises ends the wait and leaves the position
      unchanged.
    smaller_batch: (rows) -> how the size of a batch is computed, and settings that reduce it to at most this many rows. The
      error about data that do not fill one batch prints both.

  Raises:
    UserError: the data do not exist, cannot be read, are empty or give less than one global batch; a record among the first
      ones is bad; the tokenizer does not fit the vocabulary.
  """
  if split not in ("train", "eval"):
    raise ValueError(f"split is {split!r}, expected 'train' or 'eval'")
  if split == "eval" and source is None and len(names := source_names(data, split)) > 1:
    raise ValueError(f"evaluation reads one source at a time: source must be one of {', '.join(names)}")
  lookup = lookup or Lookup(vocab_size=vocab_size)
  identity: dict[str, Any] = {"format": FORMAT, "dataset": data.dataset, "split": split, "max_target_length": length}
  kind = kind_of(data)
  # A data set without text (synthetic) makes rows itself: no tokenizer, no packing, no shuffle.
  if not kind.text:
    refuse_path(data)
    multimodal = make_multimodal(vision, None, length, None)
    identity |= {"vocab_size": vocab_size, "data_shuffle_seed": data.data_shuffle_seed}
    rows: Rows = load(kind, kind.opens)(
      length,
      lookup.rows,
      data.data_shuffle_seed,
      split=split,
      avoid=multimodal.vision.image_token_id if multimodal else None,
    )
    return DataSource(
      rows, batch=global_batch, length=length, pad_id=0, identity=identity, tokenizer=None, multimodal=multimodal,
      stall_limit_seconds=stall_limit_seconds, waiting=waiting,
    )  # fmt: skip

  # Open and validate the documents of every source, and divide them into training and evaluation.
  tokenizer = load_tokenizer(data.tokenizer, vocab_size)
  parse = data.special_tokens_in_text == "parse"
  checks = make_checks(data, tokenizer, vision, length, chat_template, own_rows)
  multimodal, chat = checks.multimodal, checks.chat
  shuffle = data.shuffle and split == "train"
  passes = 1 if split == "eval" else epochs
  by_epoch = split == "train" and epochs is not None
  parts = {
    name: _open_part(data, split, name, documents, checks, shuffle, passes, alive)
    for name, documents in open_documents(data, vision, split, source, tokenizer.special if parse else ()).items()
  }
  # Tokenize, and mix the sources by their share of the tokens.
  streams = {
    name: DocumentStream(part.order, Tokenize(part.documents, tokenizer, lookup, checks)) for name, part in parts.items()
  }
  weights = data.dataset_weights if split == "train" else None
  documents: DocumentStream | Mixture = next(iter(streams.values()))
  if weights is not None:
    most = None if data.packing and chat is None else length
    documents = Mixture({name: Source(s, parts[name].count, weights[name], most) for name, s in streams.items()})
  count = sum(part.count for part in parts.values())
  # Pack documents into rows, and shuffle the rows in buffers.
  pad_id = tokenizer.pad_id if tokenizer.pad_id is not None else 0
  packed: dict[str, Any] = {
    "length": length,
    "pad_id": pad_id,
    "packing": data.packing,
    "on_bad_record": data.on_bad_record,
    "bad_max": sum(part.bad_max for part in parts.values()),
    "epoch_length": count,
    "max_images": multimodal.vision.max_images_per_row if multimodal else 0,
    "keep_whole": chat is not None,
    "by_epoch": by_epoch,
  }
  packer = Packer(documents, **packed)
  packer.on_skip, packer.on_loss = _SkipLog(), _LossLog(split, length, packed["max_images"])
  rows = packer
  if shuffle and data.packing:
    size = max(1, min(BUFFER_ROWS, BUFFER_TOKENS // length))
    rows = ShuffleBuffer(packer, size=size, seed=seed_for(data.data_shuffle_seed, "rows"), by_epoch=by_epoch)
  # Everything that the stream of rows depends on, for the check when a run resumes.
  found = {name: {"files": part.documents.fingerprint(), "documents": part.used} for name, part in parts.items()}
  if weights is not None:
    identity |= {"sources": found, "weights": dict(weights)}
  else:
    identity |= next(iter(found.values())) | ({"source": source} if source else {})
  identity |= {
    "text_field": data.text_field if kind.fields else None,
    "tokenizer": tokenizer.fingerprint,
    "special_tokens_in_text": _stream_with(data),
    "packing": data.packing,
    "eval_fraction": held_out_fraction(data),
    "shuffle": data.shuffle,
    "data_shuffle_seed": data.data_shuffle_seed,
  }
  if chat:
    identity |= {"chat": chat.identity(), "text_field": None}
  if multimodal:
    identity["vision"] = multimodal.identity()
  # A run by epochs has to know its number of rows, which a second packer counts without pixels.
  row_counter = None
  if by_epoch:
    identity["by_epoch"] = True
    (part,) = parts.values()
    unread = make_checks(data, tokenizer, vision, length, chat_template, own_rows=())  # decodes no image
    outlines = Outlines(Tokenize(part.documents, tokenizer, lookup, unread), length, packed["max_images"], count, alive)
    outlined = Packer(DocumentStream(part.order, outlines), **packed)
    row_counter = RowCounter(outlined, identity | {"skip": data.on_bad_record, "naming": checks.naming}, epochs or 0)
  opened = DataSource(
    rows, batch=global_batch, length=length, pad_id=pad_id, identity=identity, tokenizer=tokenizer, multimodal=multimodal,
    stall_limit_seconds=stall_limit_seconds, waiting=waiting, documents={name: part.count for name, part in parts.items()},
    row_counter=row_counter,
  )  # fmt: skip
  if split == "train" and not by_epoch and (once := packer.first_epoch) is not None and once["rows"] < global_batch:
    opened.close()
    what = f"{once['tokens']} tokens fill {once['rows']} rows" if data.packing else f"they fill {once['rows']} rows"
    why, settings = smaller_batch(once["rows"]) if smaller_batch else ("", "")
    # Packed text is cut into rows, so shorter rows are more rows.
    if not settings and data.packing and not chat and (shorter := once["tokens"] // global_batch):
      settings = f"max_target_length={shorter}"
    raise UserError(
      f"the training split has less than one global batch: {once['documents']} documents ({once['empty']} empty, "
      f"{once['bad']} bad), {what} of max_target_length={length}, and a batch has {global_batch} rows{why}\n"
      f"  fix: {alternatives([*([settings] if settings else []), 'epochs=1 instead of steps', 'add data'])}"
    )
  return opened


_ROUND_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5)
"""Values of eval_fraction that an error suggests."""


@dataclass(frozen=True)
class _Part:
  """One source of a split.

  Attributes:
    documents: all of its documents.
    used: number of documents for training and evaluation together.
    count: number of documents in this split.
    order: order in which they are read.
    bad_max: number of bad records that on_bad_record=skip accepts.
  """

  documents: Documents
  used: int
  count: int
  order: Order
  bad_max: int


def _open_part(
  data: DataConfig,
  split: Split,
  name: str,
  documents: Documents,
  checks: RecordChecks,
  shuffle: bool,
  passes: int | None,
  alive: Callable[[], None],
) -> _Part:
  """Divides the documents of one source into splits, and validates every record.

  Raises:
    UserError: the split has no documents, or there are bad records.
  """
  available, fraction, key = len(documents), held_out_fraction(data), path_key(data, split)
  own_files = key == "eval_path"  # evaluation has separate files
  used = available if own_files else min(available, data.dataset_documents_max or available)
  indices = Share(used) if own_files else Share(used, fraction, split)
  if not len(indices):
    share = next((f for f in _ROUND_SHARES if fraction < f and len(Share(used, f, "eval")) and len(Share(used, f))), None)
    words = [f"eval_fraction={share}"] if share else []
    words += ["eval_interval=0 keep_best=false (no evaluation)"] if fraction else []
    raise UserError(
      f"the {split} split has none of the {used} documents{f' of {name}' * bool(name)} (eval_fraction={fraction})\n"
      f"  fix: {alternatives([*words, 'add documents'])}"
    )
  bad_max = max_skipped(used)
  if split == "train" or own_files:  # this validates both splits of one data set
    validate_source(data, documents, used, checks, bad_max, dotted(key, name), alive)
  seed = seed_for(data.data_shuffle_seed, name) if name else data.data_shuffle_seed
  order = Order(indices, shuffle_seed=seed if shuffle else None, passes=passes, groups=documents.groups)
  return _Part(documents, used, len(indices), order, bad_max)


def _stream_with(data: DataConfig) -> str:
  """Returns the part of special_tokens_in_text that the rows depend on.

  With "error" and without skipping, no record that is used spells a special token, so the rows equal those of "literal".
  """
  if data.special_tokens_in_text == "error" and data.on_bad_record == "skip":
    return "error, skipped"
  return "parse" if data.special_tokens_in_text == "parse" else "literal"


class _SkipLog:
  """Logs the first skipped records. ``DataSource.counts`` counts all of them."""

  def __init__(self) -> None:
    self._logged = 0

  def __call__(self, bad: BadRecordError) -> None:
    if self._logged < SKIPS_LOGGED:
      logger.warning("bad record skipped: %s", bad)
    elif self._logged == SKIPS_LOGGED:
      logger.warning("further bad records are skipped and counted, but not listed")
    self._logged += 1


class _LossLog:
  """Logs the first conversation of each kind that is cut or left out. ``DataSource.counts`` counts all of them."""

  def __init__(self, split: Split, length: int, max_images: int) -> None:
    # Only a training run prints its counts at the end.
    self._more = (
      "the total is printed at the end of the run and by maxtext-like data" if split == "train" else "in the evaluation set"
    )
    self._unlogged = {
      "truncated": f"a conversation is longer than max_target_length={length}: the part beyond it is not trained on",
      "cut_at_image": f"a conversation has more images than max_images_per_row={max_images}: it is cut before the next image",
      "unlearned": f"a conversation is left out: the part that fits in max_target_length={length} has no answer to learn",
      "excluded": "a conversation is left out because its record marks it as not to be learned",
    }

  def __call__(self, loss: str) -> None:
    if (text := self._unlogged.pop(loss, None)) is not None:
      logger.warning("%s; %s", text, self._more)


class DataSource:
  """An iterator of batches (dict of numpy int32 [B, T]) with exact, JSON-serializable state.

  ``get_state`` returns the state after the last batch that __next__ returned, however many batches were prepared ahead. Not
  safe for use from several threads at once.
  """

  def __init__(
    self,
    rows: Rows,
    *,
    batch: int,
    length: int,
    pad_id: int,
    identity: dict[str, Any],
    tokenizer: Tokenizer | None,
    multimodal: Multimodal | None = None,
    documents: dict[str, int] | None = None,
    row_counter: RowCounter | None = None,
    stall_warn_seconds: float | None = None,
    stall_limit_seconds: float = STALL_LIMIT_SECONDS,
    waiting: Callable[[], None] = lambda: None,
  ):
    """Starts the thread and makes the first batch.

    Args:
      rows: iterator of rows.
      batch: rows in a batch.
      length: tokens in a row.
      pad_id: token id of padding.
      identity: everything that must not change between saving and resuming.
      tokenizer: the tokenizer of the data; None if they have no text.
      multimodal: how images enter the rows; None for no images.
      documents: number of documents of each source.
      row_counter: the end of the data; None if they have no end.
      stall_warn_seconds: time without a batch after which a warning is logged.
      stall_limit_seconds: time without a batch after which RetryableError is raised.
      waiting: called while a batch is awaited.
    """
    self.tokenizer = tokenizer
    self._row_counter = row_counter
    self.documents = documents or {}
    self.identity = identity
    self._multimodal = multimodal
    self._rows, self._batch, self._length, self._pad_id = rows, batch, length, pad_id
    warn = min(STALL_WARN_SECONDS, stall_limit_seconds / 2) if stall_warn_seconds is None else stall_warn_seconds
    self._waiting = waiting
    self._stall: dict[str, Any] = {"warn_seconds": warn, "limit_seconds": stall_limit_seconds, "waiting": waiting}
    self._state = self._initial = {"rows": rows.get_state(), "ended": False}
    self._counts, self._returned = rows.counts(), rows.returned_counts()
    self._ended = False
    self._closed = False
    self._prefetch: Prefetch | None = Prefetch(self._produce, **self._stall)
    self._head: tuple[Any, Any] | None = None
    try:
      self._head = self._prefetch.get()
    except BaseException:
      self.close()
      raise

  def _produce(self) -> tuple[Any, Any]:
    rows: list[Row] = []
    while len(rows) < self._batch:
      if not self._ended:
        try:
          rows.append(next(self._rows))
          continue
        except StopIteration:
          self._ended = True
      rows.append(Row.empty(self._length, self._pad_id))
    if self._multimodal:
      for row in rows:
        self._multimodal.mask_targets(row)
    batch = {key: np.stack([getattr(row, key) for row in rows]) for key in KEYS}
    if self._multimodal:
      batch |= self._multimodal.batch(rows)
    return (batch, self._rows.counts(), self._rows.returned_counts()), {"rows": self._rows.get_state(), "ended": self._ended}

  def __iter__(self) -> "DataSource":
    return self

  def __next__(self) -> Batch:
    """Returns the next batch.

    Raises:
      UserError: a bad record, or a file that no longer exists.
      RetryableError: an error of the storage, or a stalled source.
      BaseException: whatever ``waiting`` raised.
    """
    if self._closed:
      raise ValueError("the data source is closed")
    if self._prefetch is None:
      self._prefetch = Prefetch(self._produce, **self._stall)
    (batch, counts, returned), state = self._head or self._prefetch.get()
    self._head = None
    self._state, self._counts, self._returned = state, counts, returned
    return batch

  def counts(self) -> dict[str, int]:
    """Returns documents, empty, bad, tokens, dropped_tokens and rows, read up to the last batch and its shuffle buffer."""
    return dict(self._counts)

  def progress(self) -> dict[str, float]:
    """Returns the passes over the documents up to the last batch, as "epoch"; empty for data without documents.

    A mixture has "epoch/web" and the tokens trained on, "tokens/web", for each source. If rows are shuffled, a share of the
    buffer of the last batch is counted: the share of its rows that were used.
    """
    if not self.documents:
      return {}
    if "" in self.documents:
      return {"epoch": self._returned["documents"] / self.documents[""]}
    epochs = {f"epoch/{name}": self._returned[f"documents/{name}"] / count for name, count in self.documents.items()}
    return epochs | {name: round(number) for name, number in self._returned.items() if name.startswith("tokens/")}

  @property
  def rows(self) -> int | None:
    """Number of rows from the beginning to the end; None if there is no end."""
    return None if self._row_counter is None else self._row_counter.rows

  def rows_left(self, state: dict[str, Any], *, accept_changes: bool = False) -> int | None:
    """Returns the number of rows from the position of ``state`` to the end; None without an end. Raises as ``set_state``."""
    if self._row_counter is None:
      return None
    position, changed = self._resume_position(state, accept_changes)
    with resume.report_damage():
      return self._row_counter.rows_left(position["rows"], counted=not changed)

  def get_state(self) -> dict[str, Any]:
    """Returns the position after the last batch, and the identity of the stream. JSON-serializable."""
    return {"identity": self.identity, "state": self._state}

  def set_state(self, state: dict[str, Any], *, accept_changes: bool = False) -> None:
    """Continues at the position of ``state``.

    The batch size and on_bad_record may differ: the stream of rows continues with the next row.

    Args:
      state: result of ``get_state``.
      accept_changes: accept other differences, with a warning. Reading continues at the start of the document with the same
        number, or with the first document if packing, shuffling or the kind of data set changed.

    Raises:
      UserError: the stream would be another one; the message lists every difference.
    """
    position, changed = self._resume_position(state, accept_changes)
    if changed:
      onward = "the document with the same number" if position is not self._initial else "the first document"
      logger.warning("resuming although the data differ from those of the checkpoint, starting at %s:\n  %s", onward, changed)
    self._restart(position)

  def _resume_position(self, state: dict[str, Any], accept_changes: bool) -> tuple[dict[str, Any], str]:
    return resume.position(state, self.identity, self._initial, accept_changes=accept_changes)

  def reset(self) -> None:
    """Starts again from the first batch."""
    self._restart(self._initial)

  def _restart(self, state: dict[str, Any]) -> None:
    if self._closed:
      raise ValueError("the data source is closed")
    if self._prefetch is not None and not self._prefetch.stop():
      self._waiting()
      raise RetryableError("the data source is stalled: its thread does not stop")
    self._prefetch = self._head = None
    with resume.report_damage():
      self._rows.set_state(state["rows"])
      self._ended = bool(state["ended"]) and self._row_counter is None  # with more epochs the data continue
    self._state, self._counts, self._returned = state, self._rows.counts(), self._rows.returned_counts()

  def close(self) -> None:
    """Ends the thread. May be called more than once."""
    self._closed = True
    self._head = None
    if self._prefetch is not None:
      self._prefetch.stop()
      self._prefetch = None
