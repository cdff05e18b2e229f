"""JSON-lines files as documents, plain or compressed."""

import csv
import io
import logging
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

from maxtext_like import strict_json
from maxtext_like.config.vision import VisionConfig
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
from maxtext_like.data.readers.compressed import SUFFIXES as PACKED
from maxtext_like.data.readers.input_files import no_records
from maxtext_like.data.readers.lines import KEPT_BYTES, ChunkCache, LineFile
from maxtext_like.data.readers.record_files import RecordFiles
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)

SUFFIXES = tuple(f"{kind}{packed}" for kind in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst"))


class JsonLines(RecordFiles):
  """Files with one JSON object on each line. Lines may end in CRLF or be empty, and a file may begin with a byte-order mark.

  Bad records (BadRecordError with file:line): broken or truncated JSON, not UTF-8, a lone surrogate, a missing field, a field
  that is not a string, NaN or Infinity, a duplicate key in an object, a line above MAX_RECORD_BYTES.

  The contents of compressed files stay in memory up to KEPT_BYTES in total. If there is more, their chunks are the groups.
  """

  def _find_records(self, key: str) -> None:
    cache = ChunkCache()
    self._lines = [LineFile(file, cache) for file in self._files]
    self._stops = list(accumulate(map(len, self._lines)))
    if sum(lines.index.size for lines in self._lines if lines.packed) > KEPT_BYTES:
      begins = [0, *self._stops[:-1]]
      self.groups = [
        begin + row for begin, lines in zip(begins, self._lines, strict=True) if len(lines) for row in lines.chunks
      ]
    if not self._stops[-1]:
      size = sum(input_files.sizes(self._files))
      raise no_records(key, self._files, f"file(s), {size} bytes, 0 lines with text", "records")
    for lines in self._lines:
      _refuse_one_list(lines)
      _refuse_table(lines)

  def place(self, index: int) -> str:
    file, row = self._locate(index)
    return f"{self._files[file]}:{self._lines[file].index.number(row)}"

  def read(self, index: int) -> Record:
    file, row = self._locate(index)
    lines = self._lines[file]
    return self._record(lines.read(row) if lines.size(row) <= MAX_RECORD_BYTES else None, file, row)

  def scan(self) -> Iterator[Record | BadRecordError]:
    for file, lines in enumerate(self._lines):
      for row, line in enumerate(lines.lines()):
        try:
          yield self._record(line, file, row)
        except BadRecordError as bad:
          yield bad

  def _record(self, data: bytes | None, file: int, row: int) -> Record:
    """Returns the record of a line; ``data`` is None for a line above MAX_RECORD_BYTES."""
    lines = self._lines[file]
    place = f"{self._files[file]}:{lines.index.number(row)}"
    if data is None:
      raise BadRecordError(place, f"the line has {lines.size(row)} bytes, more than the limit of {MAX_RECORD_BYTES}")
    if not data.strip():
      return Record("")
    try:
      record = strict_json.loads(data)
    except strict_json.NotJsonError as error:
      reason = str(error)
      if row == len(lines) - 1 and not lines.index.terminated:
        reason += " (the last line, without a newline: is the file cut off?)"
      raise BadRecordError(place, reason, fix="dataset_path=FILES with one JSON object on each line") from None
    if self._make is not None:
      return self._make(record, place, os.path.dirname(os.path.abspath(self._files[file])))
    if not isinstance(record, dict):
      reason = f"the line is {type(record).__name__}, expected an object with the field '{self._field}'"
      raise BadRecordError(place, reason, fix="dataset_path=FILES with one JSON object on each line")
    if self._field not in record:
      fix = fix_of_missing_field(list(record), text_fields(record))
      reason = f"no field '{self._field}' (data.text_field); fields: {list_names(list(record))}"
      raise BadRecordError(place, reason, fix)
    text = check_text(record[self._field], place, self._field)
    if self._captions is None:
      return Record(text)
    folder = os.path.dirname(os.path.abspath(self._files[file]))
    return Record(text, images=self._captions.images(record, text, place, folder))

  def fingerprint(self) -> dict[str, str]:
    return input_files.fingerprint(self._files, [lines.index.digest for lines in self._lines])


def _refuse_one_list(lines: LineFile) -> None:
  """Raises UserError for a file that is one JSON list of records, whose lines are not objects."""
  if not lines.head().lstrip().startswith(b"["):
    return
  if len(lines) > 1:
    try:
      strict_json.loads(lines.read(0))
      return  # this line alone is a list: every such line is a bad record
    except strict_json.NotJsonError:
      pass
  program = 'python -c "import json,sys; [print(json.dumps(r)) for r in json.load(sys.stdin.buffer)]"'
  folder, name = os.path.split(lines.path)
  source, made = shlex.quote(lines.path), shlex.quote(os.path.join(folder, f"{name.split('.json')[0]}.lines.jsonl"))
  command = f"{lines.kind} -dc {source} | {program}" if lines.packed else f"{program} < {source}"
  raise UserError(
    f"{lines.path}: begins with '[' like a single JSON list, but dataset=jsonl reads one object on each line\n"
    f"  fix: {command} > {made}; then dataset_path={made}"
  )


def _refuse_table(lines: LineFile) -> None:
  """Raises UserError for a table: its first two lines are not JSON and have the same number of separated values."""
  head = lines.head().removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
  if head.lstrip()[:1] in ("", "{", "["):
    return
  delimiter = max((",", "\t", ";"), key=head.partition("\n")[0].count)
  try:
    first = list(islice(csv.reader(io.StringIO(head), delimiter=delimiter), 2))
  except csv.Error:
    return
  if not first or len(first[0]) < 2 or len(first[-1]) != len(first[0]):
    return
  folder, name = os.path.split(lines.path)
  source, made = shlex.quote(lines.path), shlex.quote(os.path.join(folder, f"{name.split('.')[0]}.converted.jsonl"))
  kind = f", delimiter={delimiter!r}".replace('"', "'") if delimiter != "," else ""
  read = "import csv,json,sys; sys.stdin.reconfigure(encoding='utf-8-sig', newline='')"
  program = f'python -c "{read}; [print(json.dumps(r)) for r in csv.DictReader(sys.stdin{kind})]"'
  command = f"{lines.kind} -dc {source} | {program}" if lines.packed else f"{program} < {source}"
  raise UserError(
    f"{lines.path}: looks like a table (CSV) with the columns {list_names(first[0])}, but dataset=jsonl reads one "
    f"JSON object on each line\n  fix: {command} > {made}; then dataset_path={made}"
  )


def open_documents(
  files: Sequence[str], data: Any, *, vision: VisionConfig | None, undivided: Iterable[str], key: str
) -> JsonLines:
  """Opens the files of dataset=jsonl, with images if the model has a `vision:` section."""
  del undivided  # records are never cut
  if twice := sorted(set(files) & {f"{file}{suffix}" for file in files for suffix in PACKED}):
    logger.warning(
      "data.%s: both %s and %s are read: name one of them, unless they hold different records (%d such pairs)",
      key, twice[0], os.path.splitext(twice[0])[0], len(twice),
    )  # fmt: skip
  return JsonLines(files, data.text_field, Captions.of(data, vision), key=key, read=record_reader(data, vision))
