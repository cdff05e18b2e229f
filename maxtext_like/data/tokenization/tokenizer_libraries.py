"""The libraries tokenizers and sentencepiece behind one interface, for this process and for the worker process.

``tokenizer.py`` decides where a tokenizer runs. Libraries are imported on first use, because the worker imports this file.
"""

import threading
from collections.abc import Callable
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
