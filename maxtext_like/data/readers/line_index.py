"""The positions of the lines of a file: found in one pass over the file and stored, so that later starts need not read it.

Indices are stored in ``input_files.cache_folder`` by the path of the file. An index is valid while the size, times and inode of
the file are unchanged. An index that is damaged, of another version or of another state of the file is ignored.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxtext_like.data.readers import input_files

logger = logging.getLogger(__name__)

FORMAT = 1
KEEP_FROM = 2**20  # bytes: a smaller file is read as fast as its index
SETTLED_SECONDS = 2.0  # a file that was just written may change again within the resolution of its timestamp
_HEAD = ("stop", "size", "digest", "terminated")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LineIndex:
  """The lines of one file after decompression. Empty lines have no entry. N lines take 8 bytes each.

  Attributes:
    starts: int64 [N], first byte of each line.
    stop: end of the last line, without its newline.
    gap_rows: int64 [G], entries that follow empty lines.
    gap_lines: int64 [G], number of empty lines before each of these entries, counted from the beginning of the file.
    size: size in bytes.
    digest: digest of the contents.
    terminated: True if the file ends with a newline.
  """

  starts: np.ndarray
  stop: int
  gap_rows: np.ndarray
  gap_lines: np.ndarray
  size: int
  digest: str
  terminated: bool

  def __len__(self) -> int:
    return len(self.starts)

  def _empty_before(self, row: int) -> int:
    at = int(np.searchsorted(self.gap_rows, row, side="right"))
    return int(self.gap_lines[at - 1]) if at else 0

  def start(self, row: int) -> int:
    """Returns the first byte of a line."""
    return int(self.starts[row])

  def end(self, row: int) -> int:
    """Returns the end of a line without its newline: one byte before the next line and the empty lines between them."""
    if row + 1 == len(self):
      return self.stop
    between = self._empty_before(row + 1) - self._empty_before(row) if len(self.gap_rows) else 0
    return int(self.starts[row + 1]) - 1 - between

  def number(self, row: int) -> int:
    """Returns the number of a line in its file, starting at 1."""
    return 1 + row + self._empty_before(row)


def index_lines(chunks: Iterable[bytes]) -> LineIndex:
  """Finds the lines and hashes the contents in one pass. Only the byte 0x0a ends a line: U+2028 inside a string is text."""
  import xxhash

  digest = xxhash.xxh3_128()
  starts: list[np.ndarray] = [np.empty(0, np.int64)]
  gaps: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0, np.int64), np.empty(0, np.int64))]
  size, start, stop, last = 0, 0, 0, b""
  rows, empty, empty_before_last = 0, 0, 0  # entries, empty lines, and empty lines before the last entry

  def keep(begins: np.ndarray, ends: np.ndarray) -> None:
    nonlocal rows, empty, empty_before_last, stop
    full = ends > begins
    found = begins[full]
    before = np.cumsum(~full)[full] + empty
    if len(new := np.flatnonzero(np.diff(before, prepend=empty_before_last))):
      gaps.append((rows + new, before[new]))
    if len(found):
      empty_before_last, stop = int(before[-1]), int(ends[full][-1])
      starts.append(found)
    rows, empty = rows + len(found), empty + len(full) - len(found)

  for chunk in _with_whole_head(chunks):
    if not size and chunk.startswith(BOM):
      start = len(BOM)
    digest.update(chunk)
    breaks = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 0x0A) + size
    if len(breaks):
      keep(np.concatenate([[start], breaks[:-1] + 1]), breaks)
      start = int(breaks[-1]) + 1
    size, last = size + len(chunk), chunk[-1:]
  keep(np.array([start]), np.array([size]))
  gap_rows, gap_lines = (np.concatenate(parts) for parts in zip(*gaps, strict=True))
  return LineIndex(np.concatenate(starts), stop, gap_rows, gap_lines, size, f"xxh3 {digest.hexdigest()}", last == b"\n")


def _with_whole_head(chunks: Iterable[bytes]) -> Iterator[bytes]:
  """Yields the same bytes, with a first piece that is long enough to show a byte-order mark."""
  head = b""
  for chunk in chunks:
    head += chunk
    if len(head) >= len(BOM):
      yield head
      head = b""
  if head:
    yield head


def kept_index(path: str, state: os.stat_result, contents: Callable[[], Iterable[bytes]]) -> LineIndex:
  """Returns the stored index of a file, or makes and stores a new one.

  Args:
    path: path of the file.
    state: state of the file before it was read.
    contents: reads the decompressed contents.

  Raises:
    UserError, RetryableError: raised by ``contents``.
  """
  if state.st_size < KEEP_FROM:
    return index_lines(contents())
  entry = _entry(path)
  if (index := _read(entry, _identity(state))) is not None:
    return index
  index = index_lines(contents())
  try:
    now = os.stat(path)
    if _identity(now) == _identity(state) and time.time() - max(now.st_mtime, now.st_ctime) > SETTLED_SECONDS:
      _write(entry, index, _identity(state))
  except OSError as error:
    logger.warning("%s: cannot be written (%s), so every start searches for all lines again", entry.parent, error.strerror)
  return index


def _identity(state: os.stat_result) -> list[int]:
  return [FORMAT, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def _entry(path: str) -> Path:
  import xxhash

  name = xxhash.xxh3_128_hexdigest(os.path.abspath(path).encode("utf-8", "surrogateescape"))
  return input_files.cache_folder() / f"lines-{name}"


def _write(entry: Path, index: LineIndex, identity: list[int]) -> None:
  """Writes an entry atomically: a line of JSON and the three arrays."""
  import xxhash

  columns = b"".join(column.astype("<i8").tobytes() for column in (index.gap_rows, index.gap_lines, index.starts))
  head = {name: getattr(index, name) for name in _HEAD} | {"gaps": len(index.gap_rows), "identity": identity}
  head["sum"] = xxhash.xxh3_128_hexdigest(json.dumps(head).encode() + columns)
  entry.parent.mkdir(parents=True, exist_ok=True)
  handle, name = tempfile.mkstemp(dir=entry.parent, prefix=".new-")
  try:
    with open(handle, "wb") as file:
      file.write(json.dumps(head).encode() + b"\n" + columns)
    os.replace(name, entry)
  except BaseException:
    os.unlink(name)
    raise


def _read(entry: Path, identity: list[int]) -> LineIndex | None:
  """Returns the index in an entry; None if it does not exist, is damaged or belongs to another state of the file."""
  import xxhash

  try:
    with entry.open("rb") as file:
      head = json.loads(file.readline(2**12))
      if head["identity"] != identity:
        return None
      columns = file.read()
    whole = head.pop("sum")
    if whole != xxhash.xxh3_128_hexdigest(json.dumps(head).encode() + columns):
      return None
    gap_rows, gap_lines, starts = np.split(np.frombuffer(columns, "<i8"), [head["gaps"], 2 * head["gaps"]])
    return LineIndex(starts=starts, gap_rows=gap_rows, gap_lines=gap_lines, **{name: head[name] for name in _HEAD})
  except (OSError, ValueError, KeyError, TypeError):
    return None
