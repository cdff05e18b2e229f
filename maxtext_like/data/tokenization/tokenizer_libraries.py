"""The libraries tokenizers and sentencepiece behind one interface, for this process and for the worker process.

``is_bounded`` checks that the parts of a tokenizer.json are known to need time and memory in proportion to the text. Such a
tokenizer runs in this process, which is fastest; all published tokenizers of the supported families do. Any other tokenizer
runs in the worker process, with limits.

``tokenizer.py`` decides where a tokenizer runs. Libraries are imported on first use, because the worker imports this file.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from maxtext_like.data.worker_main import RefusedError


class TokenizersLibrary:
  """A tokenizer.json."""

  def __init__(self, data: bytes):
    """Opens a tokenizer.json. Raises RefusedError if it is not UTF-8, damaged, or has no tokens."""
    from tokenizers import Tokenizer

    try:
      self._library = Tokenizer.from_str(data.decode("utf-8"))
    except UnicodeDecodeError as error:
      raise RefusedError(f"not UTF-8 at byte {error.start}: not a tokenizer.json, or damaged") from None
    except MemoryError:
      raise
    except Exception as error:  # the library raises bare Exception
      raise RefusedError(f"not a tokenizer.json that the library tokenizers can read: {error}") from None
    vocabulary = self._library.get_vocab(with_added_tokens=True)
    if not vocabulary:
      raise RefusedError("the tokenizer has no tokens")
    self._size = max(vocabulary.values()) + 1
    self._library.no_truncation()
    self._library.no_padding()
    self._library.encode_special_tokens = True
    self._lock = threading.Lock()  # guards encode_special_tokens, which is a setting of the library's object

  def facts(self) -> dict[str, Any]:
    """Returns the number of ids, and the special tokens by spelling."""
    added = self._library.get_added_tokens_decoder().items()
    return {"vocab_size": self._size, "special": {token.content: i for i, token in added if token.special}}

  def encode(self, text: str) -> list[int]:
    """Encodes a text in which no spelling is a special token. Raises RefusedError if the tokenizer has no token for a part."""
    with self._lock:
      return _ids(lambda: self._library.encode(text, add_special_tokens=False).ids)

  def encode_special(self, text: str) -> list[int]:
    """Encodes a text in which spellings of special tokens are those tokens. Raises as ``encode``."""
    with self._lock:
      self._library.encode_special_tokens = False
      try:
        return _ids(lambda: self._library.encode(text, add_special_tokens=False).ids)
      finally:
        self._library.encode_special_tokens = True

  def decode(self, ids: list[int]) -> str:
    return self._library.decode(ids, skip_special_tokens=True)

  def find(self, spelling: str) -> int | None:
    return self._library.token_to_id(spelling)


class SentencePieceLibrary:
  """A sentencepiece .model."""

  def __init__(self, data: bytes):
    """Opens a .model file. Raises RefusedError if it is damaged or has no pieces."""
    from sentencepiece import SentencePieceProcessor

    try:
      self._library = SentencePieceProcessor(model_proto=data)  # pyright: ignore[reportCallIssue]
    except (RuntimeError, OSError, ValueError) as error:
      raise RefusedError(f"not a sentencepiece model, or damaged: {error}") from None
    if not self._library.get_piece_size():
      raise RefusedError("the sentencepiece model has no pieces")

  def facts(self) -> dict[str, Any]:
    """Returns the number of ids, and the ids of bos, eos and pad; negative if the model has none."""
    library = self._library
    return {"vocab_size": library.get_piece_size(), "bos": library.bos_id(), "eos": library.eos_id(), "pad": library.pad_id()}

  def special(self) -> dict[str, int]:
    """Returns the control pieces by spelling. Gemma has 262,144 pieces to search, so this happens only on request."""
    library = self._library
    return {library.id_to_piece(i): i for i in range(library.get_piece_size()) if library.is_control(i)}

  def encode(self, text: str) -> list[int]:
    return _ids(lambda: self._library.encode(text))

  def decode(self, ids: list[int]) -> str:
    return self._library.decode(ids)

  def find(self, spelling: str) -> int | None:
    token = self._library.piece_to_id(spelling)
    return token if self._library.id_to_piece(token) == spelling else None  # an unknown piece gives the id of <unk>


def _ids(encode: Callable[[], list[int]]) -> list[int]:
  try:
    return encode()
  except (MemoryError, KeyboardInterrupt):
    raise
  except BaseException as error:
    # A Rust panic, for example if a regular expression backtracks for too long, raises a type that is not an Exception. No
    # module
    # exports that type, and a signal handler may raise an exit in the meantime.
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
      raise RefusedError(f"{type(error).__name__}: {error}") from None
    raise


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
