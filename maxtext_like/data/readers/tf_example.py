"""Decodes `tf.train.Example` messages without TensorFlow.

A protocol buffer message is a sequence of fields: a number that encodes the field's number and kind, then the value. Example
has features = 1; Features has feature = 1, a map of entries key = 1, value = 2; Feature has one of bytes_list = 1, float_list =
2, int64_list = 3; BytesList has value = 1, repeated.
"""

from collections.abc import Iterator

_KINDS = {1: "bytes", 2: "floats", 3: "integers"}


class NotExampleError(ValueError):
  """Bytes that are not such a message."""


def features(data: bytes) -> dict[str, tuple[str, bytes]]:
  """Returns the kind ("bytes", "floats", "integers", "nothing") and the encoded list of every feature, by name.

  Raises:
    NotExampleError: the bytes are not an Example.
  """
  found = {}
  for message in _messages(data, 1):
    for entry in _messages(message, 1):
      fields = dict(_fields(entry))
      try:
        name = fields[1].decode("utf-8")
      except (KeyError, UnicodeDecodeError):
        raise NotExampleError("a feature without a name") from None
      lists = list(_fields(fields.get(2, b"")))
      found[name] = (_KINDS.get(lists[-1][0], "unknown"), lists[-1][1]) if lists else ("nothing", b"")
  return found


def values(encoded: bytes) -> list[bytes]:
  """Returns the values of an encoded list of bytes. Raises NotExampleError."""
  return list(_messages(encoded, 1))


def _messages(data: bytes, number: int) -> Iterator[bytes]:
  for field, value in _fields(data):
    if field != number:
      raise NotExampleError(f"field {field}, expected only {number}")
    yield value


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
  """Yields number and content of every field. All fields in these messages have a length."""
  at = 0
  while at < len(data):
    tag, at = _varint(data, at)
    if tag & 7 != 2:
      raise NotExampleError(f"a field of kind {tag & 7} at byte {at}")
    length, at = _varint(data, at)
    if length > len(data) - at:
      raise NotExampleError(f"a field of {length} bytes at byte {at} of {len(data)}")
    yield tag >> 3, data[at : at + length]
    at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
  """Returns a number stored as 7 bits in each byte, lowest first, and the position after it."""
  number = 0
  for shift in range(0, 64, 7):
    if at >= len(data):
      raise NotExampleError(f"it ends inside a number, at byte {at}")
    number, at = number | (data[at] & 0x7F) << shift, at + 1
    if data[at - 1] < 0x80:
      return number, at
  raise NotExampleError(f"a number of more than 64 bits at byte {at}")
