"""Strict parsing of JSON from untrusted files: anything malformed or ambiguous is an error."""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from maxtext_like.errors import UserError

_LONGEST_NAME = 200


def printable(text: object) -> str:
  """Text from a file, safe to print: control and escape characters and lone surrogates are written as escapes."""
  shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))
  return shown if len(shown) <= _LONGEST_NAME else shown[:_LONGEST_NAME] + "..."


class NotJsonError(ValueError):
  """The bytes are not valid JSON. The message says why and is safe to print."""


def loads(raw: bytes) -> Any:
  """Parses UTF-8 JSON in which no object names a key twice and every number is finite.

  Raises:
    NotJsonError: invalid UTF-8 or JSON, a repeated key, nesting too deep, NaN or Infinity.
  """
  try:
    return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
  except NotJsonError:
    raise
  except UnicodeDecodeError as error:
    raise NotJsonError(f"not UTF-8 at byte {error.start} (0x{raw[error.start]:02x})") from None
  except RecursionError:
    raise NotJsonError("JSON is nested too deeply") from None
  except json.JSONDecodeError as error:
    raise NotJsonError(f"not valid JSON: {printable(error.msg)} (character {error.pos})") from None
  except ValueError as error:  # an integer with more digits than Python converts
    raise NotJsonError(f"not valid JSON: {printable(error)}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) != len(pairs):
    seen: set[str] = set()
    twice = next(key for key, _ in pairs if key in seen or seen.add(key))
    raise NotJsonError(f"'{printable(twice)}' is listed twice in one object, so its value is ambiguous")
  return found


def _finite(text: str) -> float:
  if math.isinf(number := float(text)):
    raise NotJsonError(f"{printable(text)} is outside the range of a 64-bit float")
  return number


def _refuse_constant(name: str) -> NoReturn:
  raise NotJsonError(f"{name} is not valid JSON")


def parse(raw: bytes, where: str) -> Any:
  """Parses JSON as ``loads`` does and names the source in the error.

  Args:
    raw: the bytes.
    where: name of the source for messages, usually a path.

  Raises:
    UserError: ``loads`` rejects the bytes.
  """
  try:
    return loads(raw)
  except NotJsonError as error:
    raise UserError(f"{where}: {error}", fix="correct the file, or write it again") from None


def parse_file(path: Path, *, limit: int) -> Any:
  """Parses a JSON file of at most ``limit`` bytes; the size is checked before anything is read."""
  shown = printable(path)
  try:
    size = path.stat().st_size
    if size > limit:
      raise UserError(
        f"{shown}: the file has {size} bytes, more than the limit of {limit}",
        fix="name the right file; a file of this kind is small",
      )
    raw = path.read_bytes()
  except OSError as error:
    raise UserError(f"{shown}: cannot be read: {error.strerror}", fix="name a file that exists and can be read") from None
  return parse(raw, shown)
