"""Compressed files (gzip, zstd) as streams of bytes that can be restarted near any position.

Files are decompressed piece by piece, so memory does not grow with the size of the contents, and a file that expands beyond any
text is refused. While a file is read, a restart point is stored every SPACING_BYTES of contents: the state of the decoder for
gzip (about 45 KB, possible at any position), the start of a frame for zstd. The zstd program writes one frame for a file, so
every read of its middle starts at its beginning; files of pzstd, and concatenated files, have many frames.
"""

import os
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from maxtext_like.data.readers import input_files
from maxtext_like.errors import UserError
from maxtext_like.extras import install

PIECE_BYTES = 2**20  # approximate size of a decompressed piece
SPACING_BYTES = 2**26
_GZIP_READ = 2**16
# A zstd block of 4 bytes can expand to 128 KiB, and the decoder returns everything that its input expands to: 64 MiB for this
# step.
_ZSTD_READ, _ZSTD_STEP = 2**18, 2**11
_ZSTD_WINDOW = 2**27  # the limit of the zstd program without --long

MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
MAGIC |= {bytes([n, 0x2A, 0x4D, 0x18]): "zstd" for n in range(0x50, 0x60)}  # a skippable frame, at the start of pzstd files
SUFFIXES = {".gz": "gzip", ".zst": "zstd"}


class Point(NamedTuple):
  """A position from which decompression can restart.

  Attributes:
    unpacked: number of decompressed bytes before it.
    packed: offset in the file.
    decoder: state of the gzip decoder; None for a new decoder at the start of a member or frame.
  """

  unpacked: int
  packed: int
  decoder: Any


def kind_of(path: str) -> str | None:
  """Returns "gzip" or "zstd" from the first bytes of a file; None if it is not compressed.

  Raises:
    UserError: the file is compressed in another way, or its name contradicts its contents.
  """
  head = input_files.read_bytes(path, 0, 8)
  found = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)
  if found not in (None, "gzip", "zstd"):
    raise UserError(f"{path} is {found} compressed, but only gzip and zstd are read\n  fix: decompress it")
  named = SUFFIXES.get(os.path.splitext(path)[1])
  if named is not None and found != named:
    is_ = "it is empty" if not head else f"it is {found} data" if found else f"it begins with {head!r}"
    raise UserError(f"{path}: not {named} data although its name says so: {is_}\n  fix: rename the file, or compress it again")
  return found


class Packed:
  """One compressed file."""

  def __init__(self, path: str, kind: str):
    """Prepares the file; ``kind`` as returned by `kind_of`. Raises UserError if the package for zstd is not installed."""
    self.path, self._kind = path, kind
    self._points = [Point(0, 0, None)]
    if kind == "zstd":
      require_zstandard(path)

  def pieces(self, start: int = 0, *, note: bool = False) -> Iterator[bytes]:
    """Yields the contents from byte ``start`` on, in pieces of about PIECE_BYTES.

    Args:
      start: first byte of the decompressed contents.
      note: store restart points on the way.

    Raises:
      UserError: the file is damaged, cut off, a decompression bomb, or no longer exists.
      RetryableError: I/O errors.
    """
    point = next(p for p in reversed(self._points) if p.unpacked <= start)
    position, held, size = point.unpacked, [], 0
    for piece in self._unpack(point, note):
      begin, position = position, position + len(piece)
      if position <= start:
        continue
      held.append(piece[start - begin :] if begin < start else piece)
      size += len(held[-1])
      if size >= PIECE_BYTES:
        yield from _divided(b"".join(held))
        held, size = [], 0
    if held:
      yield from _divided(b"".join(held))

  def _unpack(self, point: Point, note: bool) -> Iterator[bytes]:
    unpack = self._gunzip if self._kind == "gzip" else self._unzstd
    try:
      with input_files.open_regular(self.path) as file:
        size = os.fstat(file.fileno()).st_size
        position = point.unpacked
        for piece in unpack(file, point, note):
          position += len(piece)
          input_files.check_expansion(self.path, size, position)
          yield piece
    except OSError as error:
      raise input_files.reading_failed(self.path, error) from error

  def _gunzip(self, file: Any, point: Point, note: bool) -> Iterator[bytes]:
    file.seek(point.packed)
    decoder = None if point.decoder is None else point.decoder.copy()
    unpacked, position, data = point.unpacked, point.packed, b""
    while data or (data := file.read(_GZIP_READ)):
      if decoder is None:
        kept = data.lstrip(b"\0") if unpacked or position else data  # padding between gzip members is allowed
        position, data = position + len(data) - len(kept), kept
        if not data:
          continue
        decoder = zlib.decompressobj(wbits=31)
      before = Point(unpacked, position, decoder.copy()) if note else None
      boundary = (unpacked // SPACING_BYTES + 1) * SPACING_BYTES
      try:
        piece = decoder.decompress(data, PIECE_BYTES)
      except zlib.error as error:
        raise self._damaged(position, error) from None
      left = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
      position, data = position + len(data) - len(left), left
      unpacked += len(piece)
      if before is not None and unpacked >= boundary and before.unpacked > self._points[-1].unpacked:
        self._points.append(before)
      if decoder.eof:
        decoder = None
      if piece:
        yield piece
    if decoder is not None:
      raise self._cut_off(position)

  def _unzstd(self, file: Any, point: Point, note: bool) -> Iterator[bytes]:
    zstandard = require_zstandard(self.path)
    library = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    file.seek(point.packed)
    unpacked, position, decoder = point.unpacked, point.packed, None
    while chunk := file.read(_ZSTD_READ):
      at = 0
      while at < len(chunk):
        if decoder is None:
          decoder = library.decompressobj()
          if note and unpacked - self._points[-1].unpacked >= SPACING_BYTES // 16:
            self._points.append(Point(unpacked, position, None))
        step = chunk[at : at + _ZSTD_STEP]
        try:
          piece = decoder.decompress(step)
        except zstandard.ZstdError as error:
          raise self._damaged(position, str(error).removeprefix("zstd decompressor error: ")) from None
        used = len(step) - len(decoder.unused_data) if decoder.eof else len(step)
        at, position, unpacked = at + used, position + used, unpacked + len(piece)
        if decoder.eof:
          decoder = None
        if piece:
          yield piece
    if decoder is not None:
      raise self._cut_off(position)

  def _damaged(self, position: int, reason: object) -> UserError:
    return UserError(f"{self.path}: damaged {self._kind} data near byte {position}: {reason}{input_files.FIX_DAMAGED}")

  def _cut_off(self, position: int) -> UserError:
    return UserError(
      f"{self.path}: cut off: the file ends at byte {position} in the middle of its {self._kind} data{input_files.FIX_DAMAGED}"
    )


def _divided(piece: bytes) -> Iterator[bytes]:
  """Yields a piece in parts, in case a decompression bomb made it very large."""
  for at in range(0, len(piece), 4 * PIECE_BYTES):
    yield piece[at : at + 4 * PIECE_BYTES]


def require_zstandard(path: str) -> Any:
  """Returns the package zstandard. Raises UserError if it is not installed."""
  try:
    import zstandard
  except ImportError:
    raise UserError(
      f"{path}: reading zstd data needs the package zstandard, which is not installed\n  fix: {install('zstd')}"
    ) from None
  return zstandard
