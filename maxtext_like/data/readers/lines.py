"""Files of lines, plain or compressed, with an index of the lines, so that any line can be read alone."""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np

from maxtext_like.data.documents import MAX_RECORD_BYTES
from maxtext_like.data.readers import input_files
from maxtext_like.data.readers.compressed import SPACING_BYTES, Packed, kind_of
from maxtext_like.data.readers.line_index import kept_index
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**22  # finding the lines of a chunk takes up to 40 times its size in memory
KEPT_BYTES = 2**28  # decompressed contents that one data set keeps in memory
HEAD_BYTES = 2**12
TRUST_SECONDS = 60.0  # shortest time between comparisons of a file that is written to continuously


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
    import xxhash

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
