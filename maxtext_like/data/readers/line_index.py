"""Where the lines of a file are: found in one pass over it, and kept, so that later starts need not read the file.

An index is kept in the folder of ``input_files.cache_folder``, under the file's path, and counts as long as the file's size,
times and inode are those that it was made of; one that is damaged, of another version or of another file counts as none.
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
KEEP_FROM = 2**20  # bytes of a file: a smaller one is read as fast as its index
SETTLED_SECONDS = 2.0  # a file that was written to just now may change again within the same tick of its clock
_HEAD = ("stop", "size", "digest", "terminated")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LineIndex:
  """The lines of one file in what it unpacks to. Empty lines have no entry: N lines, 8 bytes each.

  Attributes:
    starts: int64 [N], bytes.
    stop: where the last line ends, without its newline.
    gap_rows: int64 [G], the entries that empty lines stand before.
    gap_lines: int64 [G], how many empty lines there are before each of them, from the beginning of the file.
    size: bytes in all.
    digest: of the contents.
    terminated: the file ends with a newline.
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
    """Where a line begins."""
    return int(self.starts[row])

  def end(self, row: int) -> int:
    """Where a line ends, without its newline: a byte before the next one, and before the empty lines between them."""
    if row + 1 == len(self):
      return self.stop
    between = self._empty_before(row + 1) - self._empty_before(row) if len(self.gap_rows) else 0
    return int(self.starts[row + 1]) - 1 - between

  def number(self, row: int) -> int:
    """The number of a line in its file, from 1."""
    return 1 + row + self._empty_before(row)


def index_lines(chunks: Iterable[bytes]) -> LineIndex:
  """One pass over a file: newlines (the byte 0x0a alone: U+2028 inside a string is text) and a hash of everything."""
  import xxhash

  digest = xxhash.xxh3_128()
  starts: list[np.ndarray] = [np.empty(0, np.int64)]
  gaps: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0, np.int64), np.empty(0, np.int64))]
  size, start, stop, last = 0, 0, 0, b""
  rows, empty, told = 0, 0, 0  # entries, empty lines, and empty lines before the last entry so far

  def keep(begins: np.ndarray, ends: np.ndarray) -> None:
    nonlocal rows, empty, told, stop
    full = ends > begins
    found = begins[full]
    before = np.cumsum(~full)[full] + empty
    if len(new := np.flatnonzero(np.diff(before, prepend=told))):
      gaps.append((rows + new, before[new]))
    if len(found):
      told, stop = int(before[-1]), int(ends[full][-1])
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
  """The same bytes, the first piece long enough to show a byte-order mark."""
  head = b""
  for chunk in chunks:
    head += chunk
    if len(head) >= len(BOM):
      yield head
      head = b""
  if head:
    yield head


def kept_index(path: str, state: os.stat_result, contents: Callable[[], Iterable[bytes]]) -> LineIndex:
  """The index of a file as it was in ``state``: the kept one, else a new one, which is kept.

  Args:
    path: of the file.
    state: of the file before it was read.
    contents: reads what the file holds, unpacked.

  Raises:
    UserError, RetryableError: as ``contents`` does.
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
    logger.warning("%s: cannot be written (%s), so every start looks for all lines anew", entry.parent, error.strerror)
  return index


def _identity(state: os.stat_result) -> list[int]:
  return [FORMAT, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def _entry(path: str) -> Path:
  import xxhash

  name = xxhash.xxh3_128_hexdigest(os.path.abspath(path).encode("utf-8", "surrogateescape"))
  return input_files.cache_folder() / f"lines-{name}"


def _write(entry: Path, index: LineIndex, identity: list[int]) -> None:
  """An entry is a line of JSON and the three arrays. Whoever writes one puts a whole file in place."""
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
  """What an entry says; None when there is none, it is of another state of the file, or it is not whole."""
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
