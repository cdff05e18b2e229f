"""From the configuration to an iterator of batches with exact, checkpointable state: make_data.

  files -> documents (text, jsonl, parquet) -> order (held-out split, shuffle, process share) -> tokens [grain]
        -> packed rows -> rows shuffled in blocks -> batches                                            [pack.py]
        -> a thread that works two batches ahead                                                        [prefetch.py]

A batch is a dict of numpy int32 arrays [B, T]: tokens, targets, positions, segments; with images also what multimodal.py
adds. B is this process's part of the global batch. The stream of rows depends on the data, the data keys, the tokenizer,
T and the number of processes; not on the batch size, the number of devices or threads.
"""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from maxtext_like.config.vision import VisionConfig
from maxtext_like.data import files as data_files
from maxtext_like.data.documents import BadRecordError, Documents
from maxtext_like.data.jsonl import JsonLines
from maxtext_like.data.multimodal import Multimodal
from maxtext_like.data.order import Order, Split, seed_for, split_indices
from maxtext_like.data.pack import KEYS, BlockShuffle, Document, ImageSpan, Packer, Row, Rows
from maxtext_like.data.parquet import Parquet
from maxtext_like.data.prefetch import Prefetch
from maxtext_like.data.synthetic import SyntheticRows
from maxtext_like.data.text import TextFiles, stdlib
from maxtext_like.data.tokenizer import Tokenizer, load_tokenizer
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.layers.embedding import Lookup

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]
FORMAT = 1  # of the state; changes when the same settings give another stream of rows
BLOCK_ROWS, BLOCK_TOKENS = 128, 2**18  # BlockShuffle: rows a block, within this many tokens
SKIPS_LOGGED = 10
STALL_WARN_SECONDS, STALL_LIMIT_SECONDS = 60.0, 600.0


class DataConfig(Protocol):
  """The `data:` section, as far as the pipeline reads it (maxtext_like/config/schema.py has the real one)."""

  @property
  def dataset(self) -> str: ...
  @property
  def dataset_path(self) -> str | Sequence[str] | None: ...
  @property
  def tokenizer(self) -> str: ...
  @property
  def text_field(self) -> str: ...
  @property
  def on_bad_record(self) -> str: ...
  @property
  def packing(self) -> bool: ...
  @property
  def eval_fraction(self) -> float: ...
  @property
  def shuffle(self) -> bool: ...
  @property
  def data_shuffle_seed(self) -> int: ...
  @property
  def dataset_documents_max(self) -> int | None: ...


def make_data(
  data: DataConfig,
  *,
  vocab_size: int,
  length: int,
  global_batch: int,
  process_index: int = 0,
  process_count: int = 1,
  split: Split = "train",
  vision: VisionConfig | None = None,
  stall_limit_seconds: float = STALL_LIMIT_SECONDS,
  lookup: Lookup | None = None,
) -> "DataSource":
  """The batches of one split, of `global_batch // process_count` rows of `length` tokens.

  Every token has a row in every table of `lookup`, the decoder's (default: one table of `vocab_size` rows).
  With `vision.use_multimodal` they carry images; records without any, and sources of text alone, need nothing for that.

  "train" does not end. "eval" is one pass over the held-out documents, in order; then come batches of padding only (no
  target: they weigh nothing), so that every process can take the same number; DataSource.reset starts again.

  The first batch is made before this returns, so that what is wrong with the data shows before anything is compiled.
  Raises UserError: no such data, no permission, empty, less than one global batch, a bad record among the first,
  a tokenizer that does not fit the vocabulary.
  """
  if split not in ("train", "eval"):
    raise ValueError(f"split is {split!r}, expected 'train' or 'eval'")
  if global_batch < 1 or global_batch % process_count:
    raise UserError(
      f"the global batch of {global_batch} rows cannot be divided over {process_count} processes "
      "(per_device_batch_size times the number of devices, times gradient_accumulation_steps)"
    )
  batch = global_batch // process_count
  lookup = lookup or Lookup(vocab_size=vocab_size)
  identity: dict[str, Any] = {"format": FORMAT, "dataset": data.dataset, "split": split, "max_target_length": length}
  identity["process"] = f"{process_index} of {process_count}"
  if data.dataset == "synthetic":
    _refuse_path(data)
    multimodal = _multimodal(vision, None, length)
    identity |= {"vocab_size": vocab_size, "data_shuffle_seed": data.data_shuffle_seed}
    rows: Rows = SyntheticRows(
      length,
      lookup.rows,
      data.data_shuffle_seed,
      split=split,
      process_index=process_index,
      process_count=process_count,
      avoid=multimodal.vision.image_token_id if multimodal else None,
    )
    return DataSource(
      rows, batch=batch, length=length, pad_id=0, identity=identity, tokenizer=None, multimodal=multimodal,
      stall_limit_seconds=stall_limit_seconds,
    )  # fmt: skip

  tokenizer = load_tokenizer(data.tokenizer, vocab_size)
  multimodal = _multimodal(vision, tokenizer, length)
  documents = open_documents(data, vision)
  available = len(documents)
  used = min(available, data.dataset_documents_max or available)
  indices = split_indices(used, data.eval_fraction, split)
  if len(indices) < process_count:
    raise UserError(
      f"the {split} split has {len(indices)} of {used} documents (eval_fraction={data.eval_fraction}), "
      f"expected at least {process_count}, one for each process; add documents"
      + (" or raise eval_fraction" if split == "eval" else "")
    )
  shuffle = data.shuffle and split == "train"
  order = Order(
    indices,
    shuffle_seed=data.data_shuffle_seed if shuffle else None,
    repeat=split == "train",
    process_index=process_index,
    process_count=process_count,
    groups=documents.groups,
  )
  pad_id = tokenizer.pad_id if tokenizer.pad_id is not None else 0
  packer = Packer(
    _token_iterator(order, documents, tokenizer, lookup, multimodal),
    length=length,
    pad_id=pad_id,
    packing=data.packing,
    on_bad_record=data.on_bad_record,
    bad_max=max(10, min(10_000, used // 100)),
    epoch_length=order.epoch_length,
    split_length=len(indices),
    max_images=multimodal.vision.max_images_per_row if multimodal else 0,
  )
  packer.on_skip = _SkipLog()
  rows = packer
  if shuffle and data.packing:
    block = max(1, min(BLOCK_ROWS, BLOCK_TOKENS // length))
    rows = BlockShuffle(packer, block=block, seed=seed_for(data.data_shuffle_seed, "rows"))
  identity |= {
    "files": documents.fingerprint(),
    "documents": used,
    "text_field": data.text_field if data.dataset in ("jsonl", "parquet") else None,
    "tokenizer": tokenizer.fingerprint,
    "packing": data.packing,
    "eval_fraction": data.eval_fraction,
    "shuffle": data.shuffle,
    "data_shuffle_seed": data.data_shuffle_seed,
  }
  if multimodal:
    identity["vision"] = multimodal.identity()
  source = DataSource(
    rows, batch=batch, length=length, pad_id=pad_id, identity=identity, tokenizer=tokenizer, multimodal=multimodal,
    stall_limit_seconds=stall_limit_seconds,
  )  # fmt: skip
  if split == "train" and (once := packer.first_epoch) is not None and once["rows"] < batch:
    source.close()
    what = f"{once['tokens']} tokens fill {once['rows']} rows" if data.packing else f"they fill {once['rows']} rows"
    raise UserError(
      f"the training split has less than one global batch: {once['documents']} documents ({once['empty']} empty, "
      f"{once['bad']} bad), {what} of max_target_length={length}, and a batch has {batch} rows on each of "
      f"{process_count} process(es); add data, or lower per_device_batch_size or max_target_length"
    )
  return source


def _multimodal(vision: VisionConfig | None, tokenizer: Tokenizer | None, length: int) -> Multimodal | None:
  if vision is None or not vision.use_multimodal:
    return None
  multimodal = Multimodal(vision, tokenizer)
  multimodal.check_length(length)
  return multimodal


def open_documents(data: DataConfig, vision: VisionConfig | None = None) -> Documents:
  """The documents that data.dataset and data.dataset_path name; images are jsonl's alone. Raises UserError."""
  if data.dataset == "python-stdlib":
    _refuse_path(data)
    return stdlib()
  if data.dataset == "text":
    return TextFiles(data_files.find(data.dataset_path, (), "text"))
  if data.dataset == "jsonl":
    files = data_files.find(data.dataset_path, (".jsonl", ".ndjson"), "jsonl")
    if vision is None:
      return JsonLines(files, data.text_field)
    return JsonLines(files, data.text_field, vision.images_field, take_images=vision.use_multimodal)
  if data.dataset == "parquet":
    return Parquet(data_files.find(data.dataset_path, (".parquet",), "parquet"), data.text_field)
  raise UserError(f"data.dataset is '{data.dataset}', expected python-stdlib, text, jsonl, parquet or synthetic")


def _refuse_path(data: DataConfig) -> None:
  if data.dataset_path:
    raise UserError(
      f"data.dataset_path is '{data.dataset_path}', but dataset={data.dataset} reads no path; "
      "set dataset to text, jsonl or parquet, or leave dataset_path empty"
    )


class _SkipLog:
  """Logs the first skipped records; all are counted in DataSource.counts."""

  def __init__(self) -> None:
    self._logged = 0

  def __call__(self, bad: BadRecordError) -> None:
    if self._logged < SKIPS_LOGGED:
      logger.warning("bad record skipped: %s", bad)
    elif self._logged == SKIPS_LOGGED:
      logger.warning("more bad records are skipped and counted, but not shown")
    self._logged += 1


def _token_iterator(
  order: Order, documents: Documents, tokenizer: Tokenizer, lookup: Lookup, multimodal: Multimodal | None = None
) -> Any:
  """A grain iterator of Document, in `order`. Read and tokenised when asked for, nothing ahead (Prefetch does that)."""
  import grain

  def tokenise(number: int) -> Document:
    try:
      record = documents.read(number)
      if not record.text.strip():
        return Document(number)
      ids, spans = multimodal.encode(record, documents.place(number)) if multimodal else (tokenizer.encode(record.text), ())
    except BadRecordError as bad:
      return Document(number, bad=bad)
    if record.begins and tokenizer.bos_id is not None:
      ids = [tokenizer.bos_id, *ids]
      spans = tuple(ImageSpan(span.start + 1, span.end + 1, span.image) for span in spans)
    if record.ends and tokenizer.eos_id is not None:
      ids = [*ids, tokenizer.eos_id]
    if len(ids) < 2:
      return Document(number)
    array = np.asarray(ids, np.int64)
    wrong = lookup.missing(array)
    if multimodal:
      wrong &= array != multimodal.vision.image_token_id  # never looked up, and beyond some tables
    if wrong.any():
      at = int(wrong.argmax())
      raise UserError(
        f"{documents.place(number)}: token {at} has id {array[at]}: {lookup.why_missing(int(array[at]))} "
        f"(tokenizer: {tokenizer.fingerprint})"
      )
    return Document(number, array.astype(np.int32), images=spans)

  options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
  return iter(grain.MapDataset.source(order).map(tokenise).to_iter_dataset(options))  # pyright: ignore[reportArgumentType]


class DataSource:
  """An iterator of batches (dict of numpy int32 [B, T]) whose state is JSON-serialisable and exact.

  `get_state` is the state after the last batch that __next__ gave, whatever has been prepared ahead. Not for use from
  several threads at once.
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
    stall_warn_seconds: float | None = None,
    stall_limit_seconds: float = STALL_LIMIT_SECONDS,
  ):
    """`rows`: where rows come from; `identity`: what must not change between save and resume."""
    self.tokenizer = tokenizer
    self.identity = identity
    self._multimodal = multimodal
    self._rows, self._batch, self._length, self._pad_id = rows, batch, length, pad_id
    warn = min(STALL_WARN_SECONDS, stall_limit_seconds / 2) if stall_warn_seconds is None else stall_warn_seconds
    self._stall = {"warn_seconds": warn, "limit_seconds": stall_limit_seconds}
    self._state = self._initial = {"rows": rows.get_state(), "ended": False}
    self._counts = rows.counts()
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
    return (batch, self._rows.counts()), {"rows": self._rows.get_state(), "ended": self._ended}

  def __iter__(self) -> "DataSource":
    return self

  def __next__(self) -> Batch:
    """The next batch. Raises UserError (bad record, file gone) or RetryableError (storage, stalled source)."""
    if self._closed:
      raise ValueError("the data source is closed")
    if self._prefetch is None:
      self._prefetch = Prefetch(self._produce, **self._stall)
    (batch, counts), state = self._head or self._prefetch.get()
    self._head = None
    self._state, self._counts = state, counts
    return batch

  def counts(self) -> dict[str, int]:
    """documents, empty, bad, tokens, dropped_tokens, rows: read up to the last batch (and the block it is from)."""
    return dict(self._counts)

  def get_state(self) -> dict[str, Any]:
    """Where the stream is, after the last batch given, and what it is a stream of. JSON-serialisable."""
    return {"identity": self.identity, "state": self._state}

  def set_state(self, state: dict[str, Any], *, accept_changes: bool = False) -> None:
    """Continues where `state` was taken. Raises UserError naming every difference when the stream would be another one.

    The batch size may differ: the stream of rows continues with the next row. So may on_bad_record. `accept_changes`
    takes other differences as well, with a warning: reading goes on at the start of the document where it was (by its
    position), or with the first document when packing, shuffling or the kind of data set changed.
    """
    if not isinstance(state, dict) or not isinstance(state.get("identity"), dict) or "state" not in state:
      raise UserError("the checkpoint's data state is damaged: it has no identity and state")
    position = state["state"]
    if changed := differences(state["identity"], self.identity):
      listed = "\n  ".join(changed)
      if not accept_changes:
        raise UserError(
          f"cannot resume: the data are not those of the checkpoint, the order would change:\n  {listed}\n"
          "Restore them, start a new run (init_from takes the weights without the data position), or allow_data_change=true"
        )
      logger.warning("resuming although the data are not those of the checkpoint:\n  %s", listed)
      position = _to_document_start(position, self._initial)
    self._restart(position)

  def reset(self) -> None:
    """Starts again from the first batch."""
    self._restart(self._initial)

  def _restart(self, state: dict[str, Any]) -> None:
    if self._closed:
      raise ValueError("the data source is closed")
    if self._prefetch is not None and not self._prefetch.stop():
      raise RetryableError("the data source stalls: its thread does not stop")
    self._prefetch = self._head = None
    try:
      self._rows.set_state(state["rows"])
      self._ended = bool(state["ended"])
    except (KeyError, TypeError, IndexError, StopIteration) as error:
      raise UserError(f"the checkpoint's data state is damaged: {error!r}") from error
    self._state, self._counts = state, self._rows.counts()

  def close(self) -> None:
    """Ends the thread. More than once is fine."""
    self._closed = True
    self._head = None
    if self._prefetch is not None:
      self._prefetch.stop()
      self._prefetch = None


def _to_document_start(position: dict[str, Any], initial: dict[str, Any]) -> dict[str, Any]:
  """`position` moved back to a document start if the rows of the present settings can go on there; else `initial`."""
  rows = position["rows"]
  if rows.keys() != initial["rows"].keys():
    return initial
  if "block" in rows:
    return {"rows": {**rows, "next": 0, "rows": {**rows["rows"], "used": 0}}, "ended": False}
  return {"rows": {**rows, "used": 0} if "used" in rows else rows, "ended": False}


def differences(saved: dict[str, Any], present: dict[str, Any], prefix: str = "") -> list[str]:
  """One line for each key whose value differs: what it was, what it is."""
  lines = []
  for key in sorted(saved.keys() | present.keys()):
    was, now = saved.get(key, "absent"), present.get(key, "absent")
    if isinstance(was, dict) and isinstance(now, dict):
      lines += differences(was, now, f"{prefix}{key} ")
    elif was != now:
      lines.append(f"{prefix}{key}: was {was}, is {now}")
  return lines
