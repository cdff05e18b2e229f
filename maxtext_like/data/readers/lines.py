"""Files of lines, plain or compressed: an index of every line's place, so that any of them can be read by itself."""

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

CHUNK_BYTES = 2**22  # a chunk of newlines takes 40 times its size to look through
KEPT_BYTES = 2**28  # of what compressed files hold, kept in memory by one data set
HEAD_BYTES = 2**12
TRUST_SECONDS = 60.0  # a file that is written to all the time is compared no more often than that


class ChunkCache:
  """Chunks of unpacked files, the least recently used dropped beyond KEPT_BYTES."""

  def __init__(self) -> None:
    self._chunks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
    self._size = 0

  def get(self, key: tuple[str, int], unpack: Callable[[], bytes]) -> bytes:
    """The chunk, unpacked now if it is not there."""
    if key not in self._chunks:
      chunk = unpack()
      self._size += len(chunk)
      while self._chunks and self._size > KEPT_BYTES:
        self._size -= len(self._chunks.popitem(last=False)[1])
      self._chunks[key] = chunk
    self._chunks.move_to_end(key)
    return self._chunks[key]


class LineFile:
  """The lines of one file as it was when this was made.

  A compressed file is unpacked in chunks of about SPACING_BYTES that begin at a line; chunks[i] is the first line of chunk i.
  Lines of one chunk should be asked for together. A plain file is one chunk of which nothing is kept. `kind` is the
  program that unpacks it; None: it is plain.
  """

  def __init__(self, path: str, cache: ChunkCache):
    """Reads all of the file, unless its index is kept. UserError: as `Packed.pieces`; RetryableError: I/O errors."""
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
    """The file is compressed."""
    return self._packed is not None

  def size(self, row: int) -> int:
    """Bytes of a line."""
    return self.index.end(row) - self.index.start(row)

  def head(self) -> bytes:
    """The beginning of the first line that is not empty, and of what follows. Raises as ``read``."""
    if not len(self):
      return b""
    start = self.index.start(0)
    if self._packed is None:
      return input_files.read_bytes(self.path, start, HEAD_BYTES, check=self._check)
    return next(self._packed.pieces(start), b"")[:HEAD_BYTES]

  def read(self, row: int) -> bytes:
    """One line. UserError: the file has changed; else as `files.read_bytes`."""
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
      stop = self.index.start(last)  # nobody reads it
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
    """Every line in order, in one pass; None for those above MAX_RECORD_BYTES."""
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
        return  # what follows is the rest of a line above the limit, or nothing
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
    """UserError if the file is another one by now. What was appended to it does no harm."""
    if _stamp(now) == self._stamp or time.monotonic() < self._trusted_until:
      return
    import xxhash

    digest, left = xxhash.xxh3_128(), self.index.size
    for chunk in self._contents():
      digest.update(chunk[:left])
      left = max(0, left - len(chunk))
    if left or f"xxh3 {digest.hexdigest()}" != self.index.digest:
      raise self._changed()
    logger.warning("%s: written to under the run; its first %d bytes are the same, only they are used", self.path,
                   self.index.size)  # fmt: skip
    self._stamp, self._trusted_until = _stamp(now), time.monotonic() + TRUST_SECONDS

  def _changed(self) -> UserError:
    size = self.index.size
    return UserError(f"{self.path}: changed under the run: its first {size} bytes are not those that the run started with")


def _stamp(state: os.stat_result) -> tuple[int, int]:
  return state.st_size, state.st_mtime_ns
