"""Typed reading of a Hugging Face config.json: every value has a default, a type and a range, every error a place."""

from collections.abc import Mapping
from typing import Any

from maxtext_like.checkpoint.huggingface.strict_json import printable
from maxtext_like.errors import UserError

_LARGEST = 2**31 - 1  # no size or count of a model is larger, and a larger one would overflow arithmetic on it


class Fields:
  """The keys of one JSON object. A key that is absent takes the default of the transformers class it configures."""

  def __init__(self, values: Mapping[str, Any], where: str):
    self.values = values
    self.where = where

  def __contains__(self, key: str) -> bool:
    return self.values.get(key) is not None

  def error(self, key: str, message: str) -> UserError:
    return UserError(f"{self.where}: {printable(key)}: {message}")

  def _wrong(self, key: str, expected: str) -> UserError:
    return self.error(key, f"{printable(repr(self.values[key]))} is not {expected}")

  def integer(self, key: str, default: int, *, least: int = 1) -> int:
    """An integer from ``least`` up; null is the default."""
    value = self.values.get(key)
    if value is None:
      return default
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
      raise self._wrong(key, f"an integer from {least} to {_LARGEST}")
    return value

  def optional_integer(self, key: str, default: int | None, *, least: int = 1) -> int | None:
    """As ``integer``, but null where the key is present means None."""
    if key in self.values and self.values[key] is None:
      return None
    return default if key not in self.values else self.integer(key, 0, least=least)

  def optional_token(self, key: str, default: int) -> int | None:
    """As ``token``, but null where the key is present means None: no such token."""
    if key in self.values and self.values[key] is None:
      return None
    return self.token(key, default)

  def number(self, key: str, default: float, *, above: float = 0.0) -> float:
    """A finite number above ``above``; null is the default."""
    value = self.values.get(key)
    if value is None:
      return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < 1e38:
      raise self._wrong(key, f"a number above {above:g}")
    return float(value)

  def boolean(self, key: str, default: bool) -> bool:
    """true or false; null is the default."""
    value = self.values.get(key)
    if value is None:
      return default
    if not isinstance(value, bool):
      raise self._wrong(key, "true or false")
    return value

  def text(self, key: str, default: str) -> str:
    """Text; null is the default."""
    value = self.values.get(key)
    if value is None:
      return default
    if not isinstance(value, str):
      raise self._wrong(key, "text")
    return value

  def texts(self, key: str, length: int) -> list[str] | None:
    """A list of ``length`` texts, or None where absent or null."""
    value = self.values.get(key)
    if value is None:
      return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
      raise self._wrong(key, "a list of texts")
    if len(value) != length:
      raise self.error(key, f"has {len(value)} entries, the model {length} layers")
    return value

  def section(self, key: str) -> "Fields":
    """A nested object; empty where absent or null."""
    value = self.values.get(key)
    if value is None:
      value = {}
    if not isinstance(value, dict):
      raise self._wrong(key, "an object")
    return Fields(value, f"{self.where}: {printable(key)}")

  def only(self, key: str, allowed: Any, reason: str, default: Any = None) -> None:
    """Refuses every value but ``allowed`` (null and absence count as ``default``, or as allowed)."""
    value = self.values.get(key)
    if value is None:
      value = allowed if default is None else default
    if value != allowed:
      raise self.error(key, f"{printable(repr(value))} is not supported ({reason}); supported: {allowed!r}")

  def token(self, key: str, default: int) -> int:
    """A token id; of a list the first; null is the default."""
    value = self.values.get(key)
    if isinstance(value, list) and value:
      return Fields({key: value[0]}, self.where).integer(key, default, least=0)
    return self.integer(key, default, least=0)
