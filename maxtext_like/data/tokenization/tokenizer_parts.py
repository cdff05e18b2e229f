"""Checks that the parts of a tokenizer.json are known to need time and memory in proportion to the text.

Such a tokenizer runs in this process, which is fastest; all published tokenizers of the supported families do. Any other
tokenizer runs in the worker process, with limits.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MOST_GROWTH = 64
"""Largest factor by which all normalizers together, or all decoders together, may lengthen a text."""

_UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18}  # bounds of the Unicode standard; a second one expands nothing more
_GROWTH = {"Lowercase": 3, "ByteLevel": 2, "Strip": 1, "StripAccents": 1, "Nmt": 1, "BertNormalizer": 12}
_PRE_TOKENIZERS = frozenset({
  "ByteLevel", "Digits", "Whitespace", "WhitespaceSplit", "Punctuation", "BertPreTokenizer", "Metaspace", "CharDelimiterSplit",
  "UnicodeScripts",
})  # fmt: skip
_DECODERS = frozenset({"ByteLevel", "ByteFallback", "Fuse", "Strip", "Metaspace"})
_LONGEST_WORD = 1000  # WordPiece takes time in proportion to the square of this
_MOST_REPEATS = 3  # in an alternative of an expression: a search may take the length of the text to this power


def is_bounded(data: bytes) -> bool:
  """Returns True if a tokenizer.json has only parts whose time and memory are known; False if it is not a JSON object."""
  try:
    parts = json.loads(data)
    if not isinstance(parts, dict):
      return False
    growth = [_growth(part) for part in _flat(parts.get("normalizer"), "normalizers")]
    unicode = max((_UNICODE.get(part["type"], 1) for part in _flat(parts.get("normalizer"), "normalizers")), default=1)
    decoding = [_growth(part, _DECODERS) for part in _flat(parts.get("decoder"), "decoders")]
    model = parts.get("model") or {}
    return (
      _product(growth) * unicode <= MOST_GROWTH
      and _product(decoding) <= MOST_GROWTH
      and all(map(_is_bounded_split, _flat(parts.get("pre_tokenizer"), "pretokenizers")))
      and (model.get("type") != "WordPiece" or model.get("max_input_chars_per_word", 0) <= _LONGEST_WORD)
    )
  except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
    return False  # the library reads it in the worker and reports what is wrong


def _flat(part: Mapping[str, Any] | None, members: str) -> Iterator[Mapping[str, Any]]:
  """Yields a part, or the members of a sequence of parts."""
  if part is not None and part["type"] == "Sequence":
    for member in part[members]:
      yield from _flat(member, members)
  elif part is not None:
    yield part


def _product(factors: list[float]) -> float:
  found = 1.0
  for factor in factors:
    found *= factor
  return found


def _growth(part: Mapping[str, Any], plain: frozenset[str] = frozenset()) -> float:
  """Returns the factor by which a normalizer or decoder can lengthen a text; infinite if it is not known."""
  kind = part["type"]
  if kind in _UNICODE or kind in plain:
    return 1
  if kind == "Prepend":
    return 1 if len(part["prepend"]) <= MOST_GROWTH else float("inf")
  if kind == "Replace":
    pattern, content = part["pattern"], len(part["content"])
    if "String" in pattern:
      return max(1.0, content / len(pattern["String"])) if pattern["String"] else float("inf")
    return 1 + content if _is_bounded_expression(pattern["Regex"]) else float("inf")
  return _GROWTH.get(kind, float("inf"))


def _is_bounded_split(part: Mapping[str, Any]) -> bool:
  if part["type"] != "Split":
    return part["type"] in _PRE_TOKENIZERS
  return "String" in part["pattern"] or _is_bounded_expression(part["pattern"]["Regex"])


_ESCAPED = re.compile(r"\\[pP]\{[^}]*\}|\\.", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?[^\[\]]*\]")
_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}")
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{)")


def _is_bounded_expression(text: str) -> bool:
  """Returns True if a search for a regular expression ends soon: no repeated group, and few repeats in each alternative."""
  text = _CLASS.sub("c", _ESCAPED.sub("e", text))
  if "[" in text or _REPEATED_GROUP.search(text):
    return False
  return all(len(_UNBOUNDED.findall(alternative)) <= _MOST_REPEATS for alternative in text.split("|"))
