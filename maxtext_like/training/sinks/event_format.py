"""The file format of TensorBoard: events as protocol buffers, each in a TFRecord with checksums.

It is written here because importing tensorboardX also imports torch and cloud storage libraries if they are installed, which
delays a run by seconds. The fields are those of tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto.
"""

import math
import struct
from collections.abc import Iterable

_DOUBLE, _BYTES, _FLOAT = 1, 2, 5  # wire types, https://protobuf.dev/programming-guides/encoding
_CASTAGNOLI = 0x82F63B78  # CRC-32C's polynomial with its bits reversed, RFC 3720 appendix B.4


def file_version(wall_time: float) -> bytes:
  """Return the event that begins a file."""
  return _event(wall_time, 0, _field(3, b"brain.Event:2"))


def session_start(wall_time: float, step: int) -> bytes:
  """Return the event that makes TensorBoard discard its data of ``step`` and later steps."""
  return _event(wall_time, step, _field(7, _key(1, 0) + _varint(1)))


def scalars(wall_time: float, step: int, numbers: Iterable[tuple[str, float]]) -> bytes:
  """Return the event of a step with (tag, number) as float32. Numbers beyond float32 become infinite."""
  values = (_field(1, tag.encode()) + _key(2, _FLOAT) + _float32(number) for tag, number in numbers)
  return _event(wall_time, step, _field(5, b"".join(_field(1, value) for value in values)))


def record(event: bytes) -> bytes:
  """Return an event as a TFRecord: its length and its bytes, each with a checksum."""
  # The length has a checksum too, so that a reader can skip damaged events.
  length = struct.pack("<Q", len(event))
  return length + struct.pack("<I", masked_crc32c(length)) + event + struct.pack("<I", masked_crc32c(event))


def masked_crc32c(content: bytes) -> int:
  """Return CRC-32C, rotated by 15 bits and offset by a constant, as in tensorflow/core/lib/hash/crc32c.h."""
  crc = 0xFFFFFFFF
  for byte in content:
    crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
  crc ^= 0xFFFFFFFF
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _event(wall_time: float, step: int, what: bytes) -> bytes:
  """Encode an Event: wall_time in seconds since the epoch, step, and one of file_version, summary and session_log."""
  return _key(1, _DOUBLE) + struct.pack("<d", wall_time) + _key(2, 0) + _varint(step) + what


def _float32(number: float) -> bytes:
  try:
    return struct.pack("<f", number)
  except OverflowError:
    return struct.pack("<f", math.copysign(math.inf, number))


def _field(number: int, content: bytes) -> bytes:
  """Encode a field of bytes: a string or a message."""
  return _key(number, _BYTES) + _varint(len(content)) + content


def _key(number: int, wire_type: int) -> bytes:
  return _varint(number << 3 | wire_type)


def _varint(number: int) -> bytes:
  """Encode a non-negative number, seven bits per byte, lowest bits first."""
  encoded = bytearray()
  while number > 0x7F:
    encoded.append(number & 0x7F | 0x80)
    number >>= 7
  encoded.append(number)
  return bytes(encoded)


def _table_entry(byte: int) -> int:
  for _ in range(8):
    byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
  return byte


_TABLE = [_table_entry(byte) for byte in range(256)]
