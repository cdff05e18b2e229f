"""Parquet files as documents: one string column, read by row groups. Needs the extra `parquet` (pyarrow)."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import xxhash

from maxtext_like.data.chat.dataset import record_reader
from maxtext_like.data.documents import (
  MAX_RECORD_BYTES,
  BadRecordError,
  ReadRecord,
  Record,
  check_text,
  fix_of_missing_field,
  list_names,
)
from maxtext_like.data.image_text.captions import Captions
from maxtext_like.data.readers import input_files
from maxtext_like.data.readers.arrow import row_object
from maxtext_like.data.readers.input_files import Unchanged, no_records
from maxtext_like.data.readers.record_files import RecordFiles
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.extras import install

SUFFIXES = (".parquet",)
CACHED_ROW_GROUPS = 2  # reading stays inside a row group (order.py), so a larger cache would have no more hits
# Equal texts that the file stores once stay one in memory, as an Arrow dictionary (which can hold 2 GiB).
DICTIONARY_UP_TO = 2**30
ROWS_UP_TO = 2**24  # rows that a file of any size may have; 8 more are allowed for each byte


class Parquet(RecordFiles):
  """The rows of a string column. Page checksums are verified if the writer stored them (write_page_checksum).

  A null or undecodable value is a bad record. A damaged page is an error, because it affects a complete row group.
  """

  def _find_records(self, key: str) -> None:
    try:
      import pyarrow
      import pyarrow.parquet
    except ImportError as error:
      raise UserError(f"dataset=parquet needs pyarrow, which is not installed\n  fix: {install('parquet')}") from error
    self._arrow = pyarrow
    self._makes: list[ReadRecord | None] = []  # for each file, how to make records; None reads the text column alone
    self._groups: list[tuple[int, int, int, bool]] = []  # file, row group in the file, rows, whether read as a dictionary
    self._state = []
    for number, path in enumerate(self._files):
      with self._open(path) as reader:
        if self._make is None:
          self._check_column(reader, path)
        self._makes.append(self._make or self._with_images(reader.schema_arrow, self._captions, path))
        self._groups += self._row_groups(number, reader.metadata)
      self._state.append(Unchanged(path, _footer, str))
    if not self._groups:
      raise no_records(key, self._files, "parquet file(s), 0 rows", "rows")
    self._stops = list(accumulate(rows for _, _, rows, _ in self._groups))
    self.groups: Sequence[int] | None = [0, *self._stops[:-1]]
    self._cache: OrderedDict[int, Any] = OrderedDict()

  def _row_groups(self, number: int, metadata: Any) -> Iterator[tuple[int, int, int, bool]]:
    """Yields the row groups of one file that have rows. Raises UserError for a decompression bomb."""
    path = self._files[number]
    size = os.path.getsize(path)
    if metadata.num_rows > ROWS_UP_TO + 8 * size:
      raise UserError(
        f"{path}: {metadata.num_rows:,} rows in {size:,} bytes: refused as a decompression bomb{input_files.FIX_DAMAGED}"
      )
    for group in range(metadata.num_row_groups):
      row_group = metadata.row_group(group)
      columns = (row_group.column(i) for i in range(row_group.num_columns))
      all_columns = self._makes[number] is not None
      unpacked = sum(
        column.total_uncompressed_size for column in columns if all_columns or column.path_in_schema == self._field
      )
      input_files.check_expansion(f"{path}, row group {group}", size, unpacked)
      if row_group.num_rows:
        yield number, group, row_group.num_rows, unpacked <= DICTIONARY_UP_TO and not all_columns

  def _open(self, path: str, *, dictionary: bool = False) -> Any:
    try:
      input_files.require_regular(path, os.stat(path).st_mode)
      return self._arrow.parquet.ParquetFile(
        path, page_checksum_verification=True, read_dictionary=[self._field] if dictionary else None
      )
    except self._arrow.ArrowInvalid as error:
      raise UserError(f"{path}: not a readable parquet file: {error}{input_files.FIX_DAMAGED}") from error
    except (FileNotFoundError, PermissionError, input_files.NotRegularError) as error:
      raise UserError(f"{path}: {error.strerror}", fix="set dataset_path to a file that exists and can be read") from error
    except OSError as error:  # pyarrow raises it for damaged metadata and for real I/O errors
      self._raise_oserror(path, error)

  def _raise_oserror(self, path: str, error: OSError) -> Any:
    if error.errno:
      raise RetryableError(f"{path}: reading failed: {error}") from error
    raise UserError(f"{path}: damaged parquet file: {error}{input_files.FIX_DAMAGED}") from error

  def _check_column(self, reader: Any, path: str) -> None:
    schema = reader.schema_arrow
    if self._field not in schema.names:
      texts = [name for name in schema.names if "string" in str(schema.field(schema.names.index(name)).type)]
      raise UserError(
        f"{path}: no column '{self._field}' (data.text_field); columns: {list_names(schema.names)}\n"
        f"  fix: {fix_of_missing_field(schema.names, texts)}"
      )
    kind = schema.field(self._field).type
    types = self._arrow.types
    plain = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain)):
      raise UserError(
        f"{path}: column '{self._field}' (data.text_field) is {kind}, expected a string\n"
        "  fix: text_field=NAME of a string column"
      )

  def _with_images(self, schema: Any, captions: Captions | None, path: str) -> Captions | None:
    """Returns what makes records from a file's rows if the file has images that the model takes; otherwise None."""
    found = captions and captions.column((name, str(schema.field(i).type)) for i, name in enumerate(schema.names))
    if not captions or not found or captions.take:
      return captions if found else None
    captions.warn_left_out(found, path)
    return None

  def place(self, index: int) -> str:
    group, row = self._locate(index)
    number, inner, _, _ = self._groups[group]
    return f"{self._files[number]}, row group {inner}, row {row}"

  def _column(self, group: int) -> Any:
    if group not in self._cache:
      number, inner, rows, dictionary = self._groups[group]
      path = self._files[number]
      try:
        self._state[number].check(os.stat(path))
      except OSError as error:
        raise input_files.reading_failed(path, error) from error
      with self._open(path, dictionary=dictionary) as reader:
        try:
          all_columns = self._makes[number] is not None
          table = reader.read_row_group(inner, columns=None if all_columns else [self._field], use_threads=False)
          column = table if all_columns else table.column(self._field)
        except self._arrow.ArrowException as error:
          raise UserError(f"{path}: damaged parquet file, row group {inner}: {error}{input_files.FIX_DAMAGED}") from error
        except OSError as error:
          self._raise_oserror(path, error)
      if len(column) != rows:
        raise UserError(
          f"{path}: damaged parquet file: row group {inner} has {len(column)} rows, but its metadata say {rows}"
          f"{input_files.FIX_DAMAGED}"
        )
      self._cache[group] = column
      while len(self._cache) > CACHED_ROW_GROUPS:
        self._cache.popitem(last=False)
    self._cache.move_to_end(group)
    return self._cache[group]

  def read(self, index: int) -> Record:
    group, row = self._locate(index)
    number, place = self._groups[group][0], self.place(index)
    try:
      if (make := self._makes[number]) is not None:
        (values,) = self._column(group).slice(row, 1).to_pylist()
        return make(row_object(values), place, os.path.dirname(os.path.abspath(self._files[number])))
      text = self._column(group)[row].as_py()
    except UnicodeDecodeError as error:
      raise BadRecordError(place, f"not UTF-8 at byte {error.start} of the value") from None
    if text is None:
      raise BadRecordError(place, f"field '{self._field}' is null")
    if len(text) > MAX_RECORD_BYTES:
      raise BadRecordError(place, f"the value has {len(text)} characters, more than the limit of {MAX_RECORD_BYTES}")
    return Record(check_text(text, place, self._field))


def _footer(path: str) -> str:
  """Returns a digest of the footer of a parquet file: schema, row groups, and offset, size and statistics of every page."""
  size = os.path.getsize(path)
  tail = input_files.read_bytes(path, max(0, size - 8), 8)
  length = int.from_bytes(tail[:4], "little") + 8
  return f"footer xxh3 {xxhash.xxh3_128_hexdigest(input_files.read_bytes(path, max(0, size - length)))}"


def open_documents(files: Sequence[str], data: Any, *, vision: Any, undivided: Iterable[str], key: str) -> Parquet:
  """Opens the files of dataset=parquet."""
  del undivided  # records are never cut
  return Parquet(files, data.text_field, Captions.of(data, vision), key=key, read=record_reader(data, vision))
