"""Parquet files as documents: one string column, row group by row group. Needs the extra `parquet` (pyarrow)."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from maxtext_like.data import files as data_files
from maxtext_like.data.documents import MAX_RECORD_BYTES, BadRecordError, Record, check_text
from maxtext_like.errors import RetryableError, UserError

CACHED_ROW_GROUPS = 2  # the order of reading stays inside a row group (order.py), so more would not be hit


class Parquet:
  """The rows of a string column. Page checksums are verified where the writer stored them (write_page_checksum).

  A null or undecodable value is a bad record; a damaged page is an error, as it takes a whole row group with it.
  """

  def __init__(self, files: Sequence[str], text_field: str):
    """`files`: paths. Raises UserError: pyarrow missing, no parquet file, no such string column, no rows."""
    try:
      import pyarrow
      import pyarrow.parquet
    except ImportError as error:
      raise UserError("dataset=parquet needs pyarrow, which is not installed: pip install -e '.[parquet]'") from error
    self._arrow = pyarrow
    self._files = list(files)
    self._field = text_field
    self._groups: list[tuple[int, int, int]] = []  # file, row group in it, rows
    for number, path in enumerate(self._files):
      with self._open(path) as reader:
        self._check_column(reader, path)
        metadata = reader.metadata
        self._groups += [
          (number, group, metadata.row_group(group).num_rows)
          for group in range(metadata.num_row_groups)
          if metadata.row_group(group).num_rows
        ]
    if not self._groups:
      raise UserError(f"data.dataset_path: no records: {len(self._files)} parquet file(s), 0 rows (first: {self._files[0]})")
    self._stops = list(accumulate(rows for _, _, rows in self._groups))
    self.groups: Sequence[int] | None = [0, *self._stops[:-1]]
    self._cache: OrderedDict[int, Any] = OrderedDict()

  def _open(self, path: str) -> Any:
    try:
      return self._arrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except self._arrow.ArrowInvalid as error:
      raise UserError(f"{path}: not a readable parquet file: {error}") from error
    except (FileNotFoundError, PermissionError) as error:
      raise UserError(f"{path}: {error.strerror}") from error
    except OSError as error:  # pyarrow uses it for damaged metadata as well as for real I/O errors
      self._raise_oserror(path, error)

  def _raise_oserror(self, path: str, error: OSError) -> Any:
    if error.errno:
      raise RetryableError(f"{path}: reading failed: {error}") from error
    raise UserError(f"{path}: damaged parquet file: {error}") from error

  def _check_column(self, reader: Any, path: str) -> None:
    schema = reader.schema_arrow
    if self._field not in schema.names:
      raise UserError(f"{path}: no column '{self._field}' (data.text_field); columns: {', '.join(schema.names)}")
    kind = schema.field(self._field).type
    types = self._arrow.types
    plain = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain)):
      raise UserError(f"{path}: column '{self._field}' (data.text_field) is {kind}, expected a string")

  def __len__(self) -> int:
    return self._stops[-1]

  def _locate(self, index: int) -> tuple[int, int]:
    group = bisect_right(self._stops, index)
    return group, index - (self._stops[group - 1] if group else 0)

  def place(self, index: int) -> str:
    group, row = self._locate(index)
    number, inner, _ = self._groups[group]
    return f"{self._files[number]}, row group {inner}, row {row}"

  def _column(self, group: int) -> Any:
    if group not in self._cache:
      number, inner, rows = self._groups[group]
      path = self._files[number]
      with self._open(path) as reader:
        try:
          column = reader.read_row_group(inner, columns=[self._field], use_threads=False).column(self._field)
        except self._arrow.ArrowException as error:
          raise UserError(f"{path}: damaged parquet file, row group {inner}: {error}") from error
        except OSError as error:
          self._raise_oserror(path, error)
      if len(column) != rows:
        raise UserError(f"{path}: row group {inner} has {len(column)} rows, its metadata say {rows}: damaged")
      self._cache[group] = column
      while len(self._cache) > CACHED_ROW_GROUPS:
        self._cache.popitem(last=False)
    self._cache.move_to_end(group)
    return self._cache[group]

  def read(self, index: int) -> Record:
    group, row = self._locate(index)
    place = self.place(index)
    try:
      text = self._column(group)[row].as_py()
    except UnicodeDecodeError as error:
      raise BadRecordError(place, f"not UTF-8 at byte {error.start} of the value") from None
    if text is None:
      raise BadRecordError(place, f"field '{self._field}' is null")
    if len(text) > MAX_RECORD_BYTES:
      raise BadRecordError(place, f"the value has {len(text)} characters, more than the limit of {MAX_RECORD_BYTES}")
    return Record(check_text(text, place, self._field))

  def fingerprint(self) -> dict[str, str]:
    import xxhash

    digests = []
    for path, size in zip(self._files, data_files.sizes(self._files), strict=True):
      tail = data_files.read_bytes(path, max(0, size - 8), 8)
      footer = int.from_bytes(tail[:4], "little") + 8  # schema, row groups, offsets, sizes and statistics of every page
      digests.append(f"footer xxh3 {xxhash.xxh3_128_hexdigest(data_files.read_bytes(path, max(0, size - footer)))}")
    return data_files.fingerprint(self._files, digests)
