"""ArrayRecord files as documents: each record is a tf.train.Example, a JSON object or plain text. Needs the extra
`arrayrecord`."""

import os
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import xxhash

from maxtext_like import strict_json
from maxtext_like.data.chat.dataset import record_reader
from maxtext_like.data.documents import (
  MAX_RECORD_BYTES,
  BadRecordError,
  Record,
  check_text,
  fix_of_missing_field,
  list_names,
  text_fields,
)
from maxtext_like.data.image_text.captions import Captions
from maxtext_like.data.readers import input_files
from maxtext_like.data.readers.input_files import Unchanged, no_records
from maxtext_like.data.readers.record_files import RecordFiles
from maxtext_like.errors import UserError
from maxtext_like.extras import install

SUFFIXES = (".array_record", ".arrayrecord")
OPEN_FILES = 128  # most files open at once; each has its index in memory
INSPECTED_RECORDS = 16  # records that decide the form of all records
CACHED_GROUPS = 2  # reading stays inside a group (order.py), so a larger cache would have no more hits
READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_END_BYTES = 2**17  # length of the end of a file, which has the positions of its chunks
_KINDS = {1: "bytes", 2: "floats", 3: "integers"}  # of a tf.train.Example's lists


class ArrayRecord(RecordFiles):
  """The records of the files. The first records decide the form of all; a later record in another form is bad."""

  def _find_records(self, key: str) -> None:
    self._state = [Unchanged(path, _end, str) for path in self._files]
    self._open: OrderedDict[int, Any] = OrderedDict()
    self._cache: OrderedDict[int, list[bytes]] = OrderedDict()
    counts, sizes = [], []
    for number in range(len(self._files)):
      reader = self._reader(number)
      counts.append(reader.num_records())
      sizes.append(_group_size(reader.writer_options_string()))
    self._stops = list(accumulate(counts))
    if not self._stops[-1]:
      raise no_records(key, self._files, "array_record file(s), 0 records", "records")
    begins = [0, *self._stops[:-1]]
    self._groups = [
      at for begin, count, size in zip(begins, counts, sizes, strict=True) for at in range(begin, begin + count, size)
    ]
    self.groups: Sequence[int] | None = self._groups if max(sizes) > 1 else None
    self.form = self._detect_form() if self._make is None else "JSON"

  def _reader(self, number: int) -> Any:
    """Returns the open file. Raises UserError if it cannot be read or has changed."""
    try:
      from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
      raise UserError(
        "dataset=arrayrecord needs array-record, which is not installed (it has no package for every system)\n"
        f"  fix: {install('arrayrecord')}, or write the records as jsonl or parquet"
      ) from error

    path = self._files[number]
    try:
      self._state[number].check(os.stat(path))
      if number not in self._open:
        input_files.require_regular(path, os.stat(path).st_mode)
        reader = self._open[number] = ArrayRecordReader(path, READER_OPTIONS)
        if not reader.ok():
          raise UserError(
            f"{path}: damaged, cut off or not an array_record file ({os.path.getsize(path):,} bytes){input_files.FIX_DAMAGED}"
          )
        while len(self._open) > OPEN_FILES:
          self._open.popitem(last=False)[1].close()
    except OSError as error:
      raise input_files.reading_failed(path, error) from error
    self._open.move_to_end(number)
    return self._open[number]

  def _detect_form(self) -> str:
    """Returns the form of the first records that are not empty. Raises UserError if all of them lack the field."""
    seen = [record for i in range(min(INSPECTED_RECORDS, len(self))) if (record := self._bytes(i)).strip()]
    for form, names_of in (("JSON", _names), ("tf.train.Example", lambda record: list(example_features(record)))):
      try:
        names = [names_of(record) for record in seen]
      except (strict_json.NotJsonError, NotExampleError):
        continue
      if seen and not any(self._field in found for found in names):
        listed = ", ".join(f"'{name}'" for name in names[0][:8]) or "none"
        raise UserError(
          f"{self._files[0]}: the records are {form} without '{self._field}' (data.text_field); fields: {listed}\n"
          "  fix: text_field=NAME of the field with the text"
        )
      if seen:
        return form
    return "text"

  def place(self, index: int) -> str:
    file, row = self._locate(index)
    return f"{self._files[file]}, record {row}"

  def read(self, index: int) -> Record:
    return self._record(self._bytes(index), index)

  def _bytes(self, index: int) -> bytes:
    if self.groups is None:
      file, row = self._locate(index)
      return self._read(file, row, row + 1)[0]
    group = bisect_right(self._groups, index) - 1
    begin = self._groups[group]
    if group not in self._cache:
      stop = self._groups[group + 1] if group + 1 < len(self._groups) else len(self)
      file, row = self._locate(begin)
      self._cache[group] = self._read(file, row, row + stop - begin)
      while len(self._cache) > CACHED_GROUPS:
        self._cache.popitem(last=False)
    self._cache.move_to_end(group)
    return self._cache[group][index - begin]

  def _read(self, file: int, start: int, stop: int) -> list[bytes]:
    reader = self._reader(file)
    try:
      records = reader.read(start, stop)
    except (RuntimeError, ValueError, IndexError) as error:
      raise UserError(
        f"{self._files[file]}: damaged array_record file, records {start} to {stop - 1}: {error}{input_files.FIX_DAMAGED}"
      ) from error
    if len(records) != stop - start or not reader.ok():
      raise UserError(
        f"{self._files[file]}: damaged array_record file: {len(records)} of {stop - start} records from {start}"
        f"{input_files.FIX_DAMAGED}"
      )
    return records

  def _record(self, data: bytes, index: int) -> Record:
    place = self.place(index)
    if len(data) > MAX_RECORD_BYTES:
      raise BadRecordError(place, f"the record has {len(data)} bytes, more than the limit of {MAX_RECORD_BYTES}")
    if not data.strip():
      return Record("")
    if self.form == "JSON":
      try:
        record = strict_json.loads(data)
      except strict_json.NotJsonError as error:
        raise BadRecordError(place, f"{error}, but {'conversations' if self._make else 'the first records'} are JSON") from None
      folder = os.path.dirname(os.path.abspath(self._files[self._locate(index)[0]]))
      if self._make is not None:
        return self._make(record, place, folder)
      if not isinstance(record, dict) or self._field not in record:
        names, texts = (list(record), text_fields(record)) if isinstance(record, dict) else ([], [])
        reason = f"not an object with the field '{self._field}' (data.text_field); fields: {list_names(names)}"
        raise BadRecordError(place, reason, fix_of_missing_field(names, texts))
      text = check_text(record[self._field], place, self._field)
      return Record(text, images=self._captions.images(record, text, place, folder) if self._captions else ())
    try:
      return Record((_feature(data, self._field) if self.form == "tf.train.Example" else data).decode("utf-8"))
    except NotExampleError as error:
      raise BadRecordError(place, f"not a tf.train.Example like the first records, or without a text: {error}") from None
    except UnicodeDecodeError as error:
      raise BadRecordError(place, f"not UTF-8 at byte {error.start} of the text") from None

  def fingerprint(self) -> dict[str, str]:
    return super().fingerprint() | {"records are": self.form}


def _feature(data: bytes, name: str) -> bytes:
  """Returns the single value of a feature of bytes."""
  found = example_features(data)
  if name not in found:
    raise NotExampleError(f"no feature '{name}'; features: {list_names(list(found))}")
  kind, encoded = found[name]
  texts = bytes_values(encoded) if kind == "bytes" else []
  if len(texts) != 1:
    raise NotExampleError(f"feature '{name}' has {len(texts) if kind == 'bytes' else kind}, expected one text")
  return texts[0]


def _names(data: bytes) -> list[str]:
  """Returns the fields of a JSON object. Raises NotJsonError for anything else."""
  if not isinstance(record := strict_json.loads(data), dict):
    raise strict_json.NotJsonError("not an object")
  return list(record)


def _group_size(options: str) -> int:
  """Returns the number of records in a group, from the writer's options that are stored in the file."""
  found = re.search(r"group_size:(\d+)", options)
  return max(1, int(found[1])) if found else 1


def _end(path: str) -> str:
  """Returns a digest of the end of a file, which has the positions of its chunks."""
  size = os.path.getsize(path)
  return f"end xxh3 {xxhash.xxh3_128_hexdigest(input_files.read_bytes(path, max(0, size - _END_BYTES)))}"


# A protocol buffer message is a sequence of fields: a number that encodes the field's number and kind, then the value. Example
# has features = 1; Features has feature = 1, a map of entries key = 1, value = 2; Feature has one of bytes_list = 1,
# float_list = 2, int64_list = 3; BytesList has value = 1, repeated. Decoding these few messages needs no TensorFlow.


class NotExampleError(ValueError):
  """Bytes that are not a tf.train.Example."""


def example_features(data: bytes) -> dict[str, tuple[str, bytes]]:
  """Returns the kind ("bytes", "floats", "integers", "nothing") and the encoded list of every feature, by name.

  Raises:
    NotExampleError: the bytes are not an Example.
  """
  found = {}
  for message in _messages(data, 1):
    for entry in _messages(message, 1):
      fields = dict(_fields(entry))
      try:
        name = fields[1].decode("utf-8")
      except (KeyError, UnicodeDecodeError):
        raise NotExampleError("a feature without a name") from None
      lists = list(_fields(fields.get(2, b"")))
      found[name] = (_KINDS.get(lists[-1][0], "unknown"), lists[-1][1]) if lists else ("nothing", b"")
  return found


def bytes_values(encoded: bytes) -> list[bytes]:
  """Returns the values of an encoded list of bytes. Raises NotExampleError."""
  return list(_messages(encoded, 1))


def _messages(data: bytes, number: int) -> Iterator[bytes]:
  for field, value in _fields(data):
    if field != number:
      raise NotExampleError(f"field {field}, expected only {number}")
    yield value


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
  """Yields number and content of every field. All fields in these messages have a length."""
  at = 0
  while at < len(data):
    tag, at = _varint(data, at)
    if tag & 7 != 2:
      raise NotExampleError(f"a field of kind {tag & 7} at byte {at}")
    length, at = _varint(data, at)
    if length > len(data) - at:
      raise NotExampleError(f"a field of {length} bytes at byte {at} of {len(data)}")
    yield tag >> 3, data[at : at + length]
    at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
  """Returns a number stored as 7 bits in each byte, lowest first, and the position after it."""
  number = 0
  for shift in range(0, 64, 7):
    if at >= len(data):
      raise NotExampleError(f"it ends inside a number, at byte {at}")
    number, at = number | (data[at] & 0x7F) << shift, at + 1
    if data[at - 1] < 0x80:
      return number, at
  raise NotExampleError(f"a number of more than 64 bits at byte {at}")


def open_documents(files: Sequence[str], data: Any, *, vision: Any, undivided: Iterable[str], key: str) -> ArrayRecord:
  """Opens the files of dataset=arrayrecord."""
  del undivided  # records are never cut
  return ArrayRecord(files, data.text_field, Captions.of(data, vision), key=key, read=record_reader(data, vision))
