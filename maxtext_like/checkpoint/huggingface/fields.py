"""Typed access to a Hugging Face config.json. Every value has a default, a type and a range; every error names its key.

An absent key has the default of the transformers class. Most keys must not be null. For the others, the caller passes the
meaning of null as ``null`` (often false).
"""

from collections.abc import Callable, ItemsView, Iterator, Mapping
from typing import Any

from maxtext_like.errors import UserError
from maxtext_like.strict_json import printable

REFUSED: Any = object()
"""Value of ``null`` for keys that must not be null."""
_AGAIN = "correct the value, or download the file of the published model again"
_LARGEST = 2**31 - 1  # larger sizes do not occur, and could overflow later arithmetic


def rope_type(rope: "Fields", default: str) -> str:
  """Returns the type of the RoPE parameters, under the current key or the old one."""
  return rope.text("rope_type" if "rope_type" in rope.values else "type", default)


class _Noted(Mapping[str, Any]):
  """A mapping that records which of its keys were read. Iteration records none."""

  def __init__(self, values: Mapping[str, Any]):
    self._values = values
    self.read: set[str] = set()

  def __getitem__(self, key: str) -> Any:
    self.read.add(key)
    return self._values[key]

  def __contains__(self, key: object) -> bool:
    self.read.add(str(key))
    return key in self._values

  def __iter__(self) -> Iterator[str]:
    return iter(self._values)

  def __len__(self) -> int:
    return len(self._values)

  def items(self) -> ItemsView[str, Any]:
    return self._values.items()


class Fields:
  """The keys of one JSON object.

  Attributes:
    values: the object.
    where: name of the object in errors.
    sections: nested objects that were read, by key.
  """

  def __init__(self, values: Mapping[str, Any], where: str):
    self.values = _Noted(values)
    self.where = where
    self.sections: dict[str, Fields] = {}

  @property
  def read(self) -> set[str]:
    """The keys that were read."""
    return self.values.read

  def over(self, other: "Fields") -> "Fields":
    """Returns these keys laid over those of another object, and marks all keys of both as read."""
    self.read.update(self.values)
    other.read.update(other.values)
    return Fields({**dict(other.values.items()), **dict(self.values.items())}, self.where)

  def __contains__(self, key: str) -> bool:
    return self.values.get(key) is not None

  def error(self, key: str, message: str, *, fix: str = "use a model that has a supported value here") -> UserError:
    """Returns the error about the value of a key.

    Args:
      key: the key.
      message: what is wrong with the value.
      fix: what to do. A value decides what the weights compute, so another one is right only if the file is wrong.
    """
    return UserError(f"{self.where}: {printable(key)}: {message}", fix=fix)

  def _wrong(self, key: str, expected: str) -> UserError:
    return self.error(key, f"{printable(repr(self.values[key]))} is not {expected}", fix=_AGAIN)

  def _read(self, key: str, default: Any, null: Any, check: Callable[[Any], Any]) -> Any:
    """Returns the checked value of a key, ``default`` if it is absent, or ``null`` if it is null."""
    if key not in self.values:
      return default
    if self.values[key] is not None:
      return check(self.values[key])
    if null is REFUSED:
      raise self.error(key, "is null, which transformers does not replace by a default", fix="write a value or remove the key")
    return null

  def integer(self, key: str, default: int, *, least: int = 1, null: Any = REFUSED) -> int:
    """Returns an integer that is at least ``least``."""

    def check(value: Any) -> int:
      if isinstance(value, float) and value.is_integer():
        value = int(value)
      if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise self._wrong(key, f"an integer from {least} to {_LARGEST}")
      return value

    return self._read(key, default, null, check)

  def number(self, key: str, default: float, *, zero: bool = False, null: Any = REFUSED) -> float:
    """Returns a finite number above 0, or also 0 with ``zero``."""

    def check(value: Any) -> float:
      if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e38 or (value == 0 and not zero):
        raise self._wrong(key, "a number that is 0 or above" if zero else "a number above 0")
      return float(value)

    return self._read(key, default, null, check)

  def boolean(self, key: str, default: bool, *, null: Any = REFUSED) -> bool:
    """Returns true or false."""

    def check(value: Any) -> bool:
      if not isinstance(value, bool):
        raise self._wrong(key, "true or false")
      return value

    return self._read(key, default, null, check)

  def text(self, key: str, default: str, *, null: Any = REFUSED) -> str:
    """Returns a string."""

    def check(value: Any) -> str:
      if not isinstance(value, str):
        raise self._wrong(key, "text")
      return value

    return self._read(key, default, null, check)

  def texts(self, key: str, length: int) -> list[str] | None:
    """Returns a list of ``length`` strings, or None if the key is absent or null."""
    value = self.values.get(key)
    if value is None:
      return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
      raise self._wrong(key, "a list of texts")
    if len(value) != length:
      raise self.error(key, f"has {len(value)} entries, but the model has {length} layers", fix=_AGAIN)
    return value

  def section(self, key: str) -> "Fields":
    """Returns a nested object, empty if the key is absent or null."""
    value = self.values.get(key)
    if value is None:
      value = {}
    if not isinstance(value, dict):
      raise self._wrong(key, "an object")
    if key not in self.sections:
      self.sections[key] = Fields(value, f"{self.where}: {printable(key)}")
    return self.sections[key]

  def only(self, key: str, allowed: Any, reason: str, *, default: Any = None, nullable: bool = False) -> None:
    """Refuses every value except ``allowed``.

    Args:
      key: the key.
      allowed: the only supported value.
      reason: why no other value is supported.
      default: value of an absent key; None means ``allowed``.
      nullable: True if null also means ``allowed``.
    """
    value = self._read(key, allowed if default is None else default, allowed if nullable else REFUSED, lambda value: value)
    if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
      raise self.error(key, f"{printable(repr(value))} is not supported ({reason}); supported: {allowed!r}")

  def token(self, key: str, default: int | None, *, null: Any = None) -> int | None:
    """Returns a token id. null means that there is no such token, unless ``null`` says otherwise."""
    return self._read(key, default, null, lambda value: self.integer(key, 0, least=0))

  def tokens(self, key: str, default: int | None) -> int | tuple[int, ...] | None:
    """Returns a token id, or a tuple if the file lists several."""

    def check(value: Any) -> int | tuple[int, ...]:
      if not isinstance(value, list):
        return self.integer(key, 0, least=0)
      found = dict.fromkeys(Fields({key: item}, self.where).integer(key, 0, least=0) for item in value)
      if not found:
        raise self._wrong(key, "a token or a list of tokens")
      return tuple(found) if len(found) > 1 else next(iter(found))

    return self._read(key, default, None, check)
