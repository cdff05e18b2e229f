"""JSON from files that nobody has vouched for: every surprise is an error that names the file."""

import json
from pathlib import Path
from typing import Any

from maxtext_like.errors import UserError

_LONGEST_NAME = 200


def printable(text: object) -> str:
  """Text from a file, safe to print: control and escape characters and lone surrogates are written as escapes."""
  shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))
  return shown if len(shown) <= _LONGEST_NAME else shown[:_LONGEST_NAME] + "..."


def parse(raw: bytes, where: str) -> Any:
  """Parses UTF-8 JSON in which no object names a key twice and every number is finite.

  Args:
    raw: the bytes.
    where: what they are, for messages: usually a path.

  Raises:
    UserError: invalid UTF-8 or JSON, a repeated key, nesting too deep, NaN or Infinity.
  """

  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
      seen = set()
      for key, _ in pairs:
        if key in seen:
          raise UserError(f"{where}: '{printable(key)}' is listed twice; which one is meant cannot be known")
        seen.add(key)
    return result

  def no_constant(name: str) -> Any:
    raise UserError(f"{where}: {name} is not valid JSON")

  try:
    return json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
  except UnicodeDecodeError as error:
    raise UserError(f"{where}: not valid UTF-8 at byte {error.start}") from None
  except RecursionError:
    raise UserError(f"{where}: JSON is nested too deeply") from None
  except ValueError as error:
    raise UserError(f"{where}: not valid JSON: {printable(error)}") from None


def parse_file(path: Path, *, limit: int) -> Any:
  """Parses a JSON file of at most ``limit`` bytes; the size is checked before anything is read."""
  shown = printable(path)
  try:
    size = path.stat().st_size
    if size > limit:
      raise UserError(f"{shown}: {size} bytes, more than the {limit} that such a file may have")
    raw = path.read_bytes()
  except OSError as error:
    raise UserError(f"{shown}: cannot be read: {error.strerror}") from None
  return parse(raw, shown)
