"""Arrow files as documents, as `datasets` writes them (save_to_disk, its cache). Needs the extra `parquet` (pyarrow).

``Arrow`` reads a text column; ``ArrowRows`` reads complete rows, for conversations and images.

Arrow stores a string column in batches, each with all its text concatenated and the offsets of the values. Reading a document
takes two short reads. The files are memory-mapped only while their batches are located, which does not touch the text.
Afterwards they are read normally: a file that is cut off during the run then raises an error with its name, where a mapped file
would kill the process.
"""

import contextlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple, NoReturn

import numpy as np
import xxhash

from maxtext_like.data.chat.dataset import record_reader
from maxtext_like.data.documents import (
  MAX_RECORD_BYTES,
  BadRecordError,
  Documents,
  ReadRecord,
  Record,
  fix_of_missing_field,
  list_names,
)
from maxtext_like.data.image_text.captions import Captions
from maxtext_like.data.readers import input_files
from maxtext_like.data.readers.input_files import FileDocuments, Unchanged, no_records
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.extras import install

SUFFIXES = (".arrow",)
END = b"\xff\xff\xff\xff\0\0\0\0"  # end of a stream of batches
FILE_MAGIC = b"ARROW1\0\0"  # start of the other of Arrow's two formats
CACHED_BATCHES = 2  # ArrowRows: reading stays inside a batch (order.py), so a larger cache would have no more hits
READ_AT_ONCE = MAX_RECORD_BYTES  # largest text of a batch that a scan reads in one piece


class Batches(NamedTuple):
  """The record batches of one file that have rows, N of them.

  Attributes:
    stops: int64 [N], number of rows up to the end of each batch, from the beginning of the file.
    places: int64 [N, 4], positions in the file of the null bits (-1 if there are none), of the offsets and of the text, and the
      length of the text.
    width: bytes of an offset.
  """

  stops: np.ndarray
  places: np.ndarray
  width: int


class Arrow(FileDocuments):
  """The rows of a string column. A null or undecodable value is a bad record."""

  def __init__(self, files: Sequence[str], text_field: str, *, key: str = "dataset_path"):
    """Locates the batches of all files, which data.``key`` names.

    Raises:
      UserError: pyarrow is not installed; a file is not an Arrow file or is cut off; there is no such string column; there are
        no rows; the files belong to several splits.
    """
    self._files = saved_by_datasets(files, key)
    self._field = text_field
    self._state = [Unchanged(path, self._locate_batches, _digest) for path in self._files]
    self._batches = [state.found for state in self._state]
    self._stops = np.cumsum([int(batches.stops[-1]) if len(batches.stops) else 0 for batches in self._batches]).tolist()
    if not self._stops[-1]:
      raise no_records(key, self._files, "arrow file(s), 0 rows", "rows")

  def _locate_batches(self, path: str) -> Batches:
    """Locates the batches of a file, and checks that all of them exist."""
    pyarrow = _import_pyarrow()
    with _errors_of(path):
      input_files.require_regular(path, os.stat(path).st_mode)
      if not os.path.getsize(path):
        raise UserError(f"{path}: empty, not an arrow file{input_files.FIX_DAMAGED}")
      with pyarrow.memory_map(path) as file:
        contents = file.read_buffer()
        if not _is_complete(contents):
          raise UserError(
            f"{path}: cut off, or not an arrow file: it has no end mark among its {contents.size:,} bytes"
            f"{input_files.FIX_DAMAGED}"
          )
        return self._find(path, contents, pyarrow)

  def _find(self, path: str, contents: Any, pyarrow: Any) -> Batches:
    of_file = contents[: len(FILE_MAGIC)].to_pybytes() == FILE_MAGIC
    stream = contents[len(FILE_MAGIC) :] if of_file else contents  # a file is a stream followed by a table of contents
    with pyarrow.ipc.open_stream(stream) as reader:
      number, kind = self._column(path, reader.schema, pyarrow.types)
    width = 8 if pyarrow.types.is_large_string(kind) else 4
    rows, places = [], []
    with pyarrow.ipc.open_stream(stream, options=pyarrow.ipc.IpcReadOptions(included_fields=[number])) as reader:
      for count, batch in enumerate(reader):
        if not batch.num_rows:
          continue
        where = [-1 if buffer is None else buffer.address - contents.address for buffer in batch.column(0).buffers()]
        length = batch.column(0).buffers()[2].size if where[2] >= 0 else 0
        place = [where[0], where[1], max(where[2], 0), length]
        if not all(-1 <= at <= contents.size for at in place):
          raise UserError(
            f"{path}: batch {count} is compressed, which is not supported\n  fix: write it without compression, or as parquet"
          )
        rows.append(batch.num_rows)
        places.append(place)
    return Batches(np.cumsum(np.array(rows, np.int64)), np.array(places, np.int64).reshape(-1, 4), width)

  def _column(self, path: str, schema: Any, types: Any) -> tuple[int, Any]:
    """Returns number and type of the column with the text."""
    found = schema.get_all_field_indices(self._field)
    if len(found) != 1:
      what = "no column" if not found else f"{len(found)} columns"
      texts = [field.name for field in schema if types.is_string(field.type) or types.is_large_string(field.type)]
      fix = "a file whose columns have different names" if found else fix_of_missing_field(schema.names, texts)
      listed = list_names(schema.names)
      raise UserError(f"{path}: {what} '{self._field}' (data.text_field); columns: {listed}\n  fix: {fix}")
    kind = schema.field(found[0]).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
      raise UserError(
        f"{path}: column '{self._field}' (data.text_field) is {kind}, expected a string\n"
        "  fix: text_field=NAME of a string column"
      )
    return found[0], kind

  def _locate_row(self, index: int) -> tuple[int, int, int]:
    """Returns the file, the batch in the file and the row in the batch."""
    file, row = self._locate(index)
    stops = self._batches[file].stops
    batch = int(np.searchsorted(stops, row, side="right"))
    return file, batch, row - (int(stops[batch - 1]) if batch else 0)

  def place(self, index: int) -> str:
    file, row = self._locate(index)
    return f"{self._files[file]}, row {row}"

  def read(self, index: int) -> Record:
    file, batch, row = self._locate_row(index)
    of_nulls, _, text, length = self._batches[file].places[batch].tolist()
    if of_nulls >= 0 and not self._read(file, of_nulls + row // 8, 1)[0] >> row % 8 & 1:
      raise self._null(index)
    start, stop = self._offsets(file, batch, row, 2).tolist()
    self._require_inside(file, batch, start, stop, length)
    if stop - start > MAX_RECORD_BYTES:
      raise BadRecordError(self.place(index), f"the value has {stop - start} bytes, more than the limit of {MAX_RECORD_BYTES}")
    return self._record(index, self._read(file, text + start, stop - start))

  def scan(self) -> Iterator[Record | BadRecordError]:
    index = 0
    for file, batches in enumerate(self._batches):
      for batch, rows in enumerate(np.diff(batches.stops, prepend=0).tolist()):
        of_nulls, _, text, length = batches.places[batch].tolist()
        valid = np.ones(rows, bool)
        if of_nulls >= 0:
          bits = np.frombuffer(self._read(file, of_nulls, -(-rows // 8)), np.uint8)
          valid = np.unpackbits(bits, count=rows, bitorder="little").astype(bool)
        offsets = self._offsets(file, batch, 0, rows + 1).tolist()
        contents = self._read(file, text, length) if length <= READ_AT_ONCE else None
        for row in range(rows):
          start, stop = offsets[row : row + 2]
          self._require_inside(file, batch, start, stop, length)
          try:
            yield (
              self._null(index)
              if not valid[row]
              else (self.read(index) if contents is None else self._record(index, contents[start:stop]))
            )
          except BadRecordError as bad:
            yield bad
          index += 1

  def _null(self, index: int) -> BadRecordError:
    return BadRecordError(self.place(index), f"field '{self._field}' is null")

  def _record(self, index: int, data: bytes) -> Record:
    try:
      text = data.decode("utf-8")
    except UnicodeDecodeError as error:
      raise BadRecordError(self.place(index), f"not UTF-8 at byte {error.start} of the value") from None
    return Record(text)

  def _offsets(self, file: int, batch: int, row: int, count: int) -> np.ndarray:
    batches = self._batches[file]
    begin = int(batches.places[batch, 1]) + row * batches.width
    return np.frombuffer(self._read(file, begin, count * batches.width), f"<i{batches.width}")

  def _require_inside(self, file: int, batch: int, start: int, stop: int, length: int) -> None:
    if not 0 <= start <= stop <= length:
      self._damaged(file, f"batch {batch} has a text from byte {start} to {stop}, but its text has {length} bytes")

  def _read(self, file: int, start: int, length: int) -> bytes:
    path = self._files[file]
    data = input_files.read_bytes(path, start, length, check=self._state[file].check)
    if len(data) != length:
      self._damaged(file, f"it ends before byte {start + length}")
    return data

  def _damaged(self, file: int, what: str) -> NoReturn:
    raise UserError(f"{self._files[file]}: damaged arrow file: {what}{input_files.FIX_DAMAGED}")


class ArrowRows(FileDocuments):
  """The rows of arrow files, each as an object."""

  def __init__(self, files: Sequence[str], read: ReadRecord, *, key: str = "dataset_path"):
    """Locates the batches of all files, which data.``key`` names; ``read`` makes records from rows. Raises UserError as
    ``Arrow``."""
    self._arrow, self._make = _import_pyarrow(), read
    self._files = saved_by_datasets(files, key)
    self._schemas: dict[str, Any] = {}
    self._state = [Unchanged(path, self._locate_batches, repr) for path in self._files]
    self._batches = [(number, at, rows) for number, state in enumerate(self._state) for at, rows in state.found if rows]
    self._stops = list(accumulate(rows for _, _, rows in self._batches))
    if not self._stops:
      raise no_records(key, self._files, "arrow file(s), 0 rows", "rows")
    self.groups: Sequence[int] | None = [0, *self._stops[:-1]]
    self._cache: OrderedDict[int, Any] = OrderedDict()

  def _locate_batches(self, path: str) -> list[tuple[int, int]]:
    """Returns the position and the number of rows of each batch of a file. Raises UserError if it is damaged."""
    arrow, found = self._arrow, []
    with _errors_of(path):
      input_files.require_regular(path, os.stat(path).st_mode)
      with arrow.OSFile(path) as file:
        file.seek(len(FILE_MAGIC) if file.read(len(FILE_MAGIC)) == FILE_MAGIC else 0)
        reader = arrow.ipc.open_stream(file)
        self._schemas[path] = reader.schema
        if any(arrow.types.is_dictionary(field.type) for field in reader.schema):
          raise UserError(f"{path}: has dictionary columns, which are not supported\n  fix: write plain columns, or parquet")
        while True:
          at = file.tell()
          try:
            found.append((at, reader.read_next_batch().num_rows))
          except StopIteration:
            return found

  def place(self, index: int) -> str:
    batch, _ = self._locate(index)
    number = self._batches[batch][0]
    first = sum(rows for other, _, rows in self._batches if other < number)
    return f"{self._files[number]}, row {index - first}"

  def _batch(self, batch: int) -> Any:
    if batch not in self._cache:
      number, at, _ = self._batches[batch]
      path = self._files[number]
      try:
        self._state[number].check(os.stat(path))
        with self._arrow.OSFile(path) as file:
          file.seek(at)
          self._cache[batch] = self._arrow.ipc.read_record_batch(self._arrow.ipc.read_message(file), self._schemas[path])
      except self._arrow.ArrowException as error:
        raise UserError(f"{path}: damaged arrow file: {error}{input_files.FIX_DAMAGED}") from error
      except OSError as error:
        raise input_files.reading_failed(path, error) from error
      while len(self._cache) > CACHED_BATCHES:
        self._cache.popitem(last=False)
    self._cache.move_to_end(batch)
    return self._cache[batch]

  def read(self, index: int) -> Record:
    batch, row = self._locate(index)
    try:
      (values,) = self._batch(batch).slice(row, 1).to_pylist()
    except UnicodeDecodeError as error:
      raise BadRecordError(self.place(index), f"not UTF-8 at byte {error.start} of a value") from None
    folder = os.path.dirname(os.path.abspath(self._files[self._batches[batch][0]]))
    return self._make(row_object(values), self.place(index), folder)


def row_object(values: dict[str, Any]) -> dict[str, Any]:
  """Returns a row as the object from which it was made.

  A column of objects has the fields of all rows, and null in one of them is a field that this row does not have. In tools and
  their calls null would be a different argument.
  """
  return {name: _without_absent(value) for name, value in values.items()}


def _without_absent(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _without_absent(item) for key, item in value.items() if item is not None}
  return [_without_absent(item) for item in value] if isinstance(value, list) else value


def _import_pyarrow() -> Any:
  """Returns the package pyarrow. Raises UserError if it is not installed."""
  try:
    import pyarrow
    import pyarrow.ipc
  except ImportError as error:
    raise UserError(f"dataset=arrow needs pyarrow, which is not installed\n  fix: {install('parquet')}") from error
  return pyarrow


@contextlib.contextmanager
def _errors_of(path: str) -> Iterator[None]:
  """Turns errors of pyarrow and of the file system into UserError or RetryableError."""
  pyarrow = _import_pyarrow()
  try:
    yield
  except pyarrow.ArrowException as error:
    raise UserError(f"{path}: not a readable arrow file, or cut off: {error}{input_files.FIX_DAMAGED}") from error
  except (FileNotFoundError, PermissionError, input_files.NotRegularError) as error:
    raise UserError(f"{path}: {error.strerror}", fix="set dataset_path to a file that exists and can be read") from error
  except OSError as error:  # pyarrow raises it for damaged files and for real I/O errors
    if error.errno:
      raise RetryableError(f"{path}: reading failed: {error}") from error
    raise UserError(f"{path}: damaged arrow file, or cut off: {error}{input_files.FIX_DAMAGED}") from error


def _digest(batches: Batches) -> str:
  """Returns a digest of the rows and positions of every batch of a file."""
  return f"batches xxh3 {xxhash.xxh3_128_hexdigest(batches.stops.tobytes() + batches.places.tobytes())}"


def _is_complete(contents: Any) -> bool:
  """Returns True if the last bytes of a file are those of a complete file."""
  if contents[: len(FILE_MAGIC)].to_pybytes() == FILE_MAGIC:
    return contents[max(0, contents.size - 6) :].to_pybytes() == FILE_MAGIC[:6]
  return contents[max(0, contents.size - len(END)) :].to_pybytes() == END


def saved_by_datasets(files: Sequence[str], key: str) -> list[str]:
  """Returns the files that belong to the data set.

  In a folder that save_to_disk wrote, state.json names them; `map` leaves other files in the same folder.

  Raises:
    UserError: such a file is missing, or the data set has several splits and none is named.
  """
  kept: list[str] = []
  splits: dict[str, set[str]] = {}
  for folder, found in groupby(sorted(files), os.path.dirname):
    above = os.path.dirname(folder)
    if os.path.isfile(os.path.join(above, "dataset_dict.json")):
      splits.setdefault(above, set()).add(os.path.basename(folder))
    state, there = os.path.join(folder, "state.json"), list(found)
    if not os.path.isfile(state):
      kept += there
      continue
    try:
      named = [os.path.join(folder, entry["filename"]) for entry in json.loads(input_files.read_bytes(state))["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
      raise UserError(
        f"{state}: is not a state.json of datasets' save_to_disk: {error!r}\n  fix: save the data set again"
      ) from error
    if lost := [path for path in named if not os.path.isfile(path)]:
      raise UserError(
        f"{lost[0]}: missing, although {state} names it ({len(lost)} of {len(named)} files are missing)\n"
        "  fix: copy the data set again"
      )
    kept += [path for path in there if path in named]
  for above, names in splits.items():
    if len(names) > 1:
      raise UserError(
        f"data.{key}: {above} has the splits {', '.join(sorted(names))}\n"
        f"  fix: {key}={os.path.join(above, min(names, key=lambda name: (name != 'train', name)))} for one of them"
      )
  return kept


def open_documents(files: Sequence[str], data: Any, *, vision: Any, undivided: Iterable[str], key: str) -> Documents:
  """Opens the files of dataset=arrow."""
  del undivided  # records are never cut
  read = record_reader(data, vision)
  captions = Captions.of(data, vision)
  if read is None and captions is not None and (found := _with_images(saved_by_datasets(files, key), captions)):
    if captions.take:
      read = captions
    else:
      captions.warn_left_out(*found)
  return Arrow(files, data.text_field, key=key) if read is None else ArrowRows(files, read, key=key)


def _with_images(files: Sequence[str], captions: Captions) -> tuple[str, str] | None:
  """Returns the first column with images and its file; None if there is none, or if the files cannot be read, which is reported
  later."""
  try:
    import pyarrow
  except ImportError:
    return None
  try:
    for path in files:
      input_files.require_regular(path, os.stat(path).st_mode)
      with pyarrow.OSFile(path) as file:
        file.seek(len(FILE_MAGIC) if file.read(len(FILE_MAGIC)) == FILE_MAGIC else 0)
        schema = pyarrow.ipc.open_stream(file).schema
      if name := captions.column((field.name, str(field.type)) for field in schema):
        return name, path
  except (OSError, pyarrow.ArrowException):
    return None
  return None
