"""Arrow files as `datasets` writes them, row by row with all their columns: conversations are lists of objects.

The batches are located in one pass at the start. Afterwards each batch is read separately, without mapping the file. Needs the
extra `parquet` (pyarrow).
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from maxtext_like.data.documents import BadRecordError, ReadRecord, Record, locate
from maxtext_like.data.readers import input_files
from maxtext_like.data.readers.arrow import FILE_MAGIC, saved_by_datasets
from maxtext_like.data.readers.input_files import Unchanged
from maxtext_like.errors import RetryableError, UserError

CACHED_BATCHES = 2  # reading stays inside a batch (order.py), so a larger cache would have no more hits

Batches = list[tuple[int, int]]  # position and number of rows of each batch of a file


class ArrowRows:
  """The rows of arrow files, each as an object."""

  def __init__(self, files: Sequence[str], read: ReadRecord, *, key: str = "dataset_path"):
    """Locates the batches of all files, which data.``key`` names; ``read`` makes records from rows. Raises UserError as
    ``Arrow``."""
    try:
      import pyarrow.ipc
    except ImportError as error:
      raise UserError("dataset=arrow needs pyarrow, which is not installed\n  fix: pip install -e '.[parquet]'") from error
    self._arrow, self._make = pyarrow, read
    self._files = saved_by_datasets(files, key)
    self._schemas: dict[str, Any] = {}
    self._state = [Unchanged(path, self._locate_batches, repr) for path in self._files]
    self._batches = [(number, at, rows) for number, state in enumerate(self._state) for at, rows in state.found if rows]
    self._stops = list(accumulate(rows for _, _, rows in self._batches))
    if not self._stops:
      raise UserError(
        f"data.{key}: no records: {len(self._files)} arrow file(s), 0 rows (first: {self._files[0]})\n"
        f"  fix: {key}=FILES with rows"
      )
    self.groups: Sequence[int] | None = [0, *self._stops[:-1]]
    self._cache: OrderedDict[int, Any] = OrderedDict()

  def _locate_batches(self, path: str) -> Batches:
    """Locates the batches of a file. Raises UserError if it cannot be read or is cut off."""
    arrow, found = self._arrow, []
    try:
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
    except arrow.ArrowException as error:
      raise UserError(f"{path}: not a readable arrow file, or cut off: {error}{input_files.FIX_DAMAGED}") from error
    except (FileNotFoundError, PermissionError, input_files.NotRegularError) as error:
      raise UserError(f"{path}: {error.strerror}") from error
    except OSError as error:  # pyarrow raises it for damaged files and for real I/O errors
      if error.errno:
        raise RetryableError(f"{path}: reading failed: {error}") from error
      raise UserError(f"{path}: damaged arrow file, or cut off: {error}{input_files.FIX_DAMAGED}") from error

  def __len__(self) -> int:
    return self._stops[-1]

  def _locate(self, index: int) -> tuple[int, int]:
    return locate(self._stops, index)

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

  def scan(self) -> Iterator[Record | BadRecordError]:
    for index in range(len(self)):
      try:
        yield self.read(index)
      except BadRecordError as bad:
        yield bad

  def fingerprint(self) -> dict[str, str]:
    return input_files.fingerprint(self._files, [state.digest for state in self._state])


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
