"""Files of lines, plain or compressed, with an index of the lines, so that any line can be read alone.

``LineFile`` reads the lines. ``LineIndex`` has their positions: they are found in one pass over the file and stored, so that
later starts need not read it. Indices are stored in ``input_files.cache_folder`` by the path of the file. An index is valid
while the size, times and inode of the file are unchanged. An index that is damaged, of another version or of another state of
the file is ignored.
"""

import json
import logging
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from maxtext_like.data.documents import MAX_RECORD_BYTES
from maxtext_like.data.readers import input_files
from maxtext_like.data.readers.compressed import SPACING_BYTES, Packed, kind_of
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**22  # finding the lines of a chunk takes up to 40 times its size in memory
KEPT_BYTES = 2**28  # decompressed contents that one data set keeps in memory
HEAD_BYTES = 2**12
TRUST_SECONDS = 60.0  # shortest time between comparisons of a file that is written to continuously
INDEX_FORMAT = 1  # version of a stored index
KEEP_FROM = 2**20  # bytes: a smaller file is read as fast as its index
SETTLED_SECONDS = 2.0  # a file that was just written may change again within the resolution of its timestamp
_HEAD = ("stop", "size", "digest", "terminated")
BOM = b"\xef\xbb\xbf"


class ChunkCache:
  """Chunks of decompressed files. The least recently used are dropped beyond KEPT_BYTES."""

  def __init__(self) -> None:
    self._chunks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
    self._size = 0

  def get(self, key: tuple[str, int], unpack: Callable[[], bytes]) -> bytes:
    """Returns a chunk, and decompresses it if it is not in the cache."""
    if key not in self._chunks:
      chunk = unpack()
      self._size += len(chunk)
      while self._chunks and self._size > KEPT_BYTES:
        self._size -= len(self._chunks.popitem(last=False)[1])
      self._chunks[key] = chunk
    self._chunks.move_to_end(key)
    return self._chunks[key]


class LineFile:
  """The lines of one file, in the state of the file when this object was made.

  A compressed file is decompressed in chunks of about SPACING_BYTES that begin at a line; chunks[i] is the first line of chunk
  i. Reading lines of the same chunk together is cheap. A plain file is one chunk that is not kept in memory. ``kind`` is the
  name of the program that decompresses the file; None if it is plain.
  """

  def __init__(self, path: str, cache: ChunkCache):
    """Reads the complete file, unless its index is stored. Raises UserError and RetryableError as `Packed.pieces`."""
    self.path, self._cache = path, cache
    kind = kind_of(path)
    self.kind = kind
    self._packed = None if kind is None else Packed(path, kind)
    state = os.stat(path)
    self._stamp = _stamp(state)
    self._trusted_until = 0.0
    self.index = kept_index(path, state, lambda: self._contents(note=True))
    self.chunks = [0]
    if self._packed is not None and self.index.size:
      nominal = np.searchsorted(self.index.starts, np.arange(0, self.index.size, SPACING_BYTES))
      self.chunks = np.unique(nominal[nominal < len(self)]).tolist() or [0]

  def __len__(self) -> int:
    return len(self.index)

  @property
  def packed(self) -> bool:
    """True if the file is compressed."""
    return self._packed is not None

  def size(self, row: int) -> int:
    """Returns the length of a line in bytes."""
    return self.index.end(row) - self.index.start(row)

  def head(self) -> bytes:
    """Returns the beginning of the contents from the first non-empty line. Raises as ``read``."""
    if not len(self):
      return b""
    start = self.index.start(0)
    if self._packed is None:
      return input_files.read_bytes(self.path, start, HEAD_BYTES, check=self._check)
    return next(self._packed.pieces(start), b"")[:HEAD_BYTES]

  def read(self, row: int) -> bytes:
    """Returns one line. Raises UserError if the file changed, otherwise as `input_files.read_bytes`."""
    start, length = self.index.start(row), self.size(row)
    if self._packed is None:
      return input_files.read_bytes(self.path, start, length, check=self._check)
    number = int(np.searchsorted(self.chunks, row, side="right")) - 1
    begin = self.index.start(self.chunks[number])
    chunk = self._cache.get((self.path, number), lambda: self._unpack(number))
    return chunk[start - begin : start - begin + length]

  def _unpack(self, number: int) -> bytes:
    assert self._packed is not None
    first = self.chunks[number]
    last = (self.chunks[number + 1] if number + 1 < len(self.chunks) else len(self)) - 1
    begin, stop = self.index.start(first), self.index.end(last)
    if self.size(last) > MAX_RECORD_BYTES:
      stop = self.index.start(last)  # a line above the limit is never read
    try:
      self._check(os.stat(self.path))
    except OSError as error:
      raise input_files.reading_failed(self.path, error) from error
    parts, wanted = [], stop - begin
    for piece in self._packed.pieces(begin, note=True):
      parts.append(piece[:wanted])
      wanted -= len(parts[-1])
      if not wanted:
        break
    return b"".join(parts)

  def lines(self) -> Iterator[bytes | None]:
    """Yields every line in order, in one pass; None for a line above MAX_RECORD_BYTES."""
    index = self.index
    row, base, held = 0, 0, b""
    for chunk in self._contents():
      held += chunk
      end = base + len(held)
      while row < len(index):
        start, stop = index.start(row), index.end(row)
        if stop - start > MAX_RECORD_BYTES:
          yield None
        elif stop <= end:
          yield held[start - base : stop - base]
        else:
          break
        row += 1
      if row == len(index):
        return  # the remaining bytes belong to a line above the limit
      keep = min(index.start(row), end)
      base, held = keep, held[keep - base :]
    if len(index):
      raise self._changed()

  def _contents(self, *, note: bool = False) -> Iterator[bytes]:
    if self._packed is not None:
      yield from self._packed.pieces(note=note)
      return
    try:
      with input_files.open_regular(self.path) as file:
        while chunk := file.read(CHUNK_BYTES):
          yield chunk
    except OSError as error:
      raise input_files.reading_failed(self.path, error) from error

  def _check(self, now: os.stat_result) -> None:
    """Raises UserError if the contents changed. Lines appended to the file are allowed."""
    if _stamp(now) == self._stamp or time.monotonic() < self._trusted_until:
      return
    digest, left = xxhash.xxh3_128(), self.index.size
    for chunk in self._contents():
      digest.update(chunk[:left])
      left = max(0, left - len(chunk))
    if left or f"xxh3 {digest.hexdigest()}" != self.index.digest:
      raise self._changed()
    logger.warning("%s: the file was written to during the run; its first %d bytes are unchanged, and only they are used",
                   self.path, self.index.size)  # fmt: skip
    self._stamp, self._trusted_until = _stamp(now), time.monotonic() + TRUST_SECONDS

  def _changed(self) -> UserError:
    size = self.index.size
    return UserError(
      f"{self.path}: the file changed during the run: its first {size} bytes differ from those at the start"
      "\n  fix: restore it and run the same command again"
    )


def _stamp(state: os.stat_result) -> tuple[int, int]:
  return state.st_size, state.st_mtime_ns


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
  entry = _entry_path(path)
  if (index := _read_index(entry, _identity(state))) is not None:
    return index
  index = index_lines(contents())
  try:
    now = os.stat(path)
    if _identity(now) == _identity(state) and time.time() - max(now.st_mtime, now.st_ctime) > SETTLED_SECONDS:
      _write_index(entry, index, _identity(state))
  except OSError as error:
    logger.warning("%s: cannot be written (%s), so every start searches for all lines again", entry.parent, error.strerror)
  return index


def _identity(state: os.stat_result) -> list[int]:
  return [INDEX_FORMAT, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def _entry_path(path: str) -> Path:
  name = xxhash.xxh3_128_hexdigest(os.path.abspath(path).encode("utf-8", "surrogateescape"))
  return input_files.cache_folder() / f"lines-{name}"


def _write_index(entry: Path, index: LineIndex, identity: list[int]) -> None:
  """Writes an entry atomically: a line of JSON and the three arrays."""
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


def _read_index(entry: Path, identity: list[int]) -> LineIndex | None:
  """Returns the index in an entry; None if it does not exist, is damaged or belongs to another state of the file."""
  try:
    with entry.open("rb") as file:
      head = json.loads(file.readline(2**12))
      if head["identity"] != identity:
        return None
      columns = file.read()
    checksum = head.pop("sum")
    if checksum != xxhash.xxh3_128_hexdigest(json.dumps(head).encode() + columns):
      return None
    gap_rows, gap_lines, starts = np.split(np.frombuffer(columns, "<i8"), [head["gaps"], 2 * head["gaps"]])
    return LineIndex(starts=starts, gap_rows=gap_rows, gap_lines=gap_lines, **{name: head[name] for name in _HEAD})
  except (OSError, ValueError, KeyError, TypeError):
    return None
