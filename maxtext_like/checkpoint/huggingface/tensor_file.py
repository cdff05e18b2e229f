"""Strict reader of one safetensors file: all bounds in the header are checked before a tensor is returned.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes of the tensors,
which the offsets must cover without gap or overlap (https://github.com/huggingface/safetensors, "Format").

The safetensors library is not used, because it silently keeps the last of two tensors with one name and cannot read float8
through numpy (safetensors 0.8.0).
"""

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from maxtext_like.errors import UserError
from maxtext_like.strict_json import parse, printable

DTYPES: dict[str, np.dtype] = {
  "F64": np.dtype("<f8"),
  "F32": np.dtype("<f4"),
  "F16": np.dtype("<f2"),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
  "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
  "I64": np.dtype("<i8"),
  "I32": np.dtype("<i4"),
  "I16": np.dtype("<i2"),
  "I8": np.dtype("i1"),
  "U64": np.dtype("<u8"),
  "U32": np.dtype("<u4"),
  "U16": np.dtype("<u2"),
  "U8": np.dtype("u1"),
  "BOOL": np.dtype("?"),
}
FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})

HEADER_LIMIT = 100_000_000  # bytes; the library's limit
_SIZE_LIMIT = 2**48  # bytes of one tensor; dimensions of size 0 count as 1
_RANK_LIMIT = 32
AGAIN = "copy or download the file again"
"""What to do about a damaged file."""
_PICKLE = (
  "pickle can run code when it is read, so it is refused\n  fix: if you trust the file, convert it with "
  "transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT, safe_serialization=True)"
)


@dataclass(frozen=True)
class Entry:
  """One tensor of a file: name, dtype as in the header, shape, and byte range from the start of the file."""

  name: str
  dtype: str
  shape: tuple[int, ...]
  start: int
  stop: int


class SafetensorsFile:
  """A safetensors file whose header has been checked. Tensors are views of the memory-mapped file, read on use."""

  def __init__(self, path: Path):
    """Reads and checks the header only.

    Raises:
      UserError: the file is not a readable safetensors file; the message gives the reason.
    """
    self.path = path
    self._where = printable(path)
    self._map: mmap.mmap | None = None
    try:
      status = os.stat(path)
      if not stat.S_ISREG(status.st_mode):  # checked before open(), which would block on a named pipe
        raise UserError(f"{self._where}: not a regular file", fix="name a regular file")
      self.size = status.st_size
      with open(path, "rb") as file:
        raw = self._read_header(file)
    except OSError as error:
      raise UserError(
        f"{self._where}: cannot be read: {error.strerror}", fix="name a file that exists and can be read"
      ) from None
    header = parse(raw, f"{self._where}: header")
    self._data_start = 8 + len(raw)
    del raw
    if not isinstance(header, dict):
      raise UserError(f"{self._where}: the header is not a JSON object", fix=AGAIN)
    self.metadata = self._check_metadata(header.pop("__metadata__", {}))
    self.entries = {name: self._check_entry(name, value) for name, value in header.items()}
    self._check_tiling()

  def _read_header(self, file: Any) -> bytes:
    start = file.read(12)
    length = int.from_bytes(start[:8], "little")
    if length <= self.size - 8 and length > HEADER_LIMIT:
      raise UserError(f"{self._where}: the header has {length} bytes, more than the limit of {HEADER_LIMIT}", fix=AGAIN)
    # A valid header length may start with the same bytes as a pickle or an archive, so check the length first.
    if (length > self.size - 8 or start[8:9] != b"{") and (start[:1] == b"\x80" or start[:4] == b"PK\x03\x04"):
      raise UserError(f"{self._where}: this is a pickle or a zip archive, not safetensors; {_PICKLE}")
    if len(start) < 8:
      raise UserError(
        f"{self._where}: {self.size} bytes are too short for a safetensors file; the copy may be incomplete", fix=AGAIN
      )
    if length > self.size - 8:
      raise UserError(
        f"{self._where}: the header claims {length} bytes, but the file has {self.size}; it is truncated or not safetensors",
        fix=AGAIN,
      )
    file.seek(8)
    raw = file.read(length)
    if len(raw) != length:
      raise UserError(
        f"{self._where}: the file shrank while its header was read",
        fix="run the command again when no other program writes the file",
      )
    if raw[:1] != b"{":
      raise UserError(f"{self._where}: the header does not begin with '{{'; not a safetensors file", fix=AGAIN)
    return raw

  def _check_metadata(self, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
      raise UserError(f"{self._where}: __metadata__ must map strings to strings", fix=AGAIN)
    return metadata

  def _check_entry(self, name: str, value: Any) -> Entry:
    where = f"{self._where}: tensor '{printable(name)}'"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
      raise UserError(f"{where}: must have exactly dtype, shape and data_offsets", fix=AGAIN)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
      raise UserError(
        f"{where}: unknown dtype '{printable(dtype)}'; known are {', '.join(DTYPES)}",
        fix="convert the file: store the tensors in one of these dtypes",
      )
    if not isinstance(shape, list) or len(shape) > _RANK_LIMIT or not all(_is_count(size) for size in shape):
      raise UserError(
        f"{where}: shape {printable(shape)} is not a list of at most {_RANK_LIMIT} non-negative integers", fix=AGAIN
      )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
      raise UserError(f"{where}: data_offsets {printable(offsets)} are not two non-negative integers", fix=AGAIN)
    itemsize = DTYPES[dtype].itemsize
    elements, extent = 1, itemsize
    for size in shape:
      elements *= size
      extent *= max(size, 1)
      if extent > _SIZE_LIMIT:
        raise UserError(f"{where}: shape {printable(shape)} of {dtype} exceeds the limit of 2^48 bytes", fix=AGAIN)
    start, stop = offsets
    if stop < start:
      raise UserError(f"{where}: data_offsets {offsets} are reversed", fix=AGAIN)
    if stop > self.size - self._data_start:
      raise UserError(
        f"{where}: data_offsets {printable(offsets)} reach beyond the end of the file, which has "
        f"{self.size - self._data_start} bytes of data; it may be truncated",
        fix=AGAIN,
      )
    if stop - start != elements * itemsize:
      raise UserError(
        f"{where}: shape {shape} of {dtype} needs {elements * itemsize} bytes, but data_offsets {offsets} give {stop - start}",
        fix=AGAIN,
      )
    return Entry(name, dtype, tuple(shape), self._data_start + start, self._data_start + stop)

  def _check_tiling(self) -> None:
    position, previous = self._data_start, None
    for entry in sorted(self.entries.values(), key=lambda entry: (entry.start, entry.stop)):
      if entry.start < position:
        raise UserError(
          f"{self._where}: tensors '{printable(previous)}' and '{printable(entry.name)}' overlap in the file", fix=AGAIN
        )
      if entry.start > position:
        raise UserError(
          f"{self._where}: {entry.start - position} bytes before tensor '{printable(entry.name)}' belong to no tensor",
          fix=AGAIN,
        )
      position, previous = entry.stop, entry.name
    if position != self.size:
      raise UserError(f"{self._where}: {self.size - position} bytes after the last tensor belong to no tensor", fix=AGAIN)

  def tensor(self, name: str) -> np.ndarray:
    """Returns a tensor as a read-only view of the mapped file; pages are read on use. KeyError if there is no such tensor.

    Raises:
      UserError: the size of the file has changed since its header was read.
    """
    entry = self.entries[name]
    if self._map is None:
      try:
        with open(self.path, "rb") as file:
          self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
      except (OSError, ValueError) as error:
        raise UserError(f"{self._where}: cannot be mapped: {error}", fix="copy the file to a local disk") from None
    # Reading a mapped page beyond the end of a shrunken file would kill the process with SIGBUS.
    if len(self._map) != self.size or os.stat(self.path).st_size != self.size:
      raise UserError(
        f"{self._where}: the file changed while it was being read",
        fix="run the command again when no other program writes the file",
      )
    dtype = DTYPES[entry.dtype]
    raw = np.frombuffer(self._map, np.uint8, entry.stop - entry.start, entry.start)
    if entry.start % dtype.itemsize:
      raw = raw.copy()  # misaligned views are slow, and some consumers refuse them
    return raw.view(dtype).reshape(entry.shape)

  def read_into(self, out: np.ndarray, start: int) -> None:
    """Fills an array with the bytes of the file from a position. Several threads may call it.

    Unlike a mapped page, it is read without holding Python's lock and without a fault for every 4 KiB.

    Args:
      out: contiguous array.
      start: position in the file, from its beginning.

    Raises:
      UserError: the file cannot be read, or has changed since its header was read.
    """
    flat: Any = out.reshape(-1).view(np.uint8)
    left = memoryview(flat)
    try:
      descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
      try:
        changed = os.fstat(descriptor).st_size != self.size
        while left and not changed:
          count = os.preadv(descriptor, [left], start)
          left, start, changed = left[count:], start + count, not count
      finally:
        os.close(descriptor)
    except OSError as error:
      raise UserError(
        f"{self._where}: cannot be read: {error.strerror}", fix="name a file that exists and can be read"
      ) from None
    if changed:
      raise UserError(
        f"{self._where}: the file changed while it was being read",
        fix="run the command again when no other program writes the file",
      )

  def release(self) -> None:
    """Returns the mapped pages to the operating system; they are read again on use."""
    if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
      self._map.madvise(mmap.MADV_DONTNEED)


def refuse_pickle(path: Path) -> UserError:
  """Returns the error for a checkpoint file of a kind that can run code when it is read."""
  return UserError(f"{printable(path)}: not safetensors; {_PICKLE}")


def _is_count(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
