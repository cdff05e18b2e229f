"""Text to token ids: raw bytes, a Hugging Face tokenizer.json, a sentencepiece model.

`encode` maps plain text: the string "<eos>" inside it is text, never the end-of-document token (sentencepiece does so by
itself; `encode_special_tokens` for tokenizers). `encode_special` takes it for the token, as prompts and, by
data.special_tokens_in_text, documents want it. bos and eos are added by the pipeline, at the start and the end of each
document, wherever the tokenizer has them.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from maxtext_like import local_copies
from maxtext_like.config import hub
from maxtext_like.data.input_files import open_regular
from maxtext_like.data.special_tokens import SPELLINGS, Spellings
from maxtext_like.errors import UserError
from maxtext_like.storage import Place, is_remote

MORE_TEMPLATES = "additional_chat_templates"  # a folder beside a tokenizer, with chat templates by name (transformers)
MAX_TOKENIZER_BYTES = 256 * 2**20  # Gemma's tokenizer.json has 33 MB; the parser takes several times the file's size
AUTO = "auto"


class Tokenizer(Protocol):
  """Text <-> token ids in [0, vocab_size)."""

  vocab_size: int
  bos_id: int | None
  eos_id: int | None
  pad_id: int | None
  files: tuple[Path, ...]  # what a checkpoint must carry along to decode its tokens
  fingerprint: str  # differs when the mapping differs

  @property
  def special(self) -> Mapping[str, int]: ...  # special tokens that plain text never gives, by spelling

  def encode(self, text: str) -> list[int]: ...

  def encode_special(self, text: str) -> list[int]: ...  # a special token where the text has its spelling

  def decode(self, ids: Sequence[int]) -> str: ...

  def find(self, spelling: str) -> int | None: ...  # the id of one token, special or not; None: there is none


class BytesTokenizer:
  """UTF-8 bytes: id = 3 + byte. 0 is padding, 1 end and 2 beginning of a document (Gemma's ids); 259 ids in all."""

  vocab_size = 259
  pad_id: int | None = 0
  eos_id: int | None = 1
  bos_id: int | None = 2
  files: tuple[Path, ...] = ()
  fingerprint = "bytes, id = 3 + byte"
  special: Mapping[str, int] = {}

  def encode(self, text: str) -> list[int]:
    """Ids of the text's bytes. UnicodeEncodeError for lone surrogates (the sources refuse them before)."""
    return [byte + 3 for byte in text.encode("utf-8")]

  def encode_special(self, text: str) -> list[int]:
    """As `encode`: no special token has a spelling."""
    return self.encode(text)

  def decode(self, ids: Sequence[int]) -> str:
    """Special ids are left out; bytes that are not UTF-8 become U+FFFD. ValueError for an id outside the vocabulary."""
    for token in ids:
      if not 0 <= token < self.vocab_size:
        raise ValueError(f"token id {token} outside the byte vocabulary [0, {self.vocab_size})")
    return bytes(token - 3 for token in ids if token >= 3).decode("utf-8", errors="replace")

  def find(self, spelling: str) -> int | None:
    """The id of a text of one byte."""
    data = spelling.encode("utf-8", errors="surrogateescape")
    return data[0] + 3 if len(data) == 1 else None


class HuggingFaceTokenizer:
  """A tokenizer.json, read by the library tokenizers; tokenizer_config.json beside it names the special tokens."""

  def __init__(self, path: Path):
    """`path`: the tokenizer.json. Raises UserError: too large, not UTF-8, damaged, names tokens it does not have."""
    from tokenizers import Tokenizer as Library

    data = _read(path)
    try:
      self._library = Library.from_str(data.decode("utf-8"))
    except UnicodeDecodeError as error:
      raise UserError(f"{path}: not UTF-8 at byte {error.start}: not a tokenizer.json, or damaged") from None
    except Exception as error:  # the library raises bare Exception
      raise UserError(f"{path}: not a tokenizer.json that the library tokenizers can read: {error}") from error
    vocabulary = self._library.get_vocab(with_added_tokens=True)
    if not vocabulary:
      raise UserError(f"{path}: the tokenizer has no tokens")
    self._library.no_truncation()
    self._library.no_padding()
    self._lock = threading.Lock()  # over the library's one switch for special tokens
    self._library.encode_special_tokens = True
    self.vocab_size = max(vocabulary.values()) + 1
    self.files = (path,)
    config_path = path.with_name("tokenizer_config.json")
    config: dict[str, Any] = {}
    if config_path.exists():
      self.files = (path, config_path)
      config = _read_config(config_path)
    self.bos_id = _special(config, config_path, "bos_token", SPELLINGS["bos"], vocabulary)
    self.eos_id = _special(config, config_path, "eos_token", SPELLINGS["eos"], vocabulary)
    self.pad_id = _special(config, config_path, "pad_token", SPELLINGS["pad"], vocabulary)
    self.special = {token.content: i for i, token in self._library.get_added_tokens_decoder().items() if token.special}
    # Without the file's name, which a copy beside a checkpoint need not share.
    self.fingerprint = f"tokenizer.json, {_digest(data)}, bos {self.bos_id}, eos {self.eos_id}"

  def encode(self, text: str) -> list[int]:
    with self._lock:
      return self._library.encode(text, add_special_tokens=False).ids

  def encode_special(self, text: str) -> list[int]:
    with self._lock:
      self._library.encode_special_tokens = False
      try:
        return self._library.encode(text, add_special_tokens=False).ids
      finally:
        self._library.encode_special_tokens = True

  def decode(self, ids: Sequence[int]) -> str:
    return self._library.decode(list(ids), skip_special_tokens=True)

  def find(self, spelling: str) -> int | None:
    return self._library.token_to_id(spelling)


class SentencePieceTokenizer:
  """A sentencepiece .model."""

  def __init__(self, path: Path):
    """Raises UserError: too large or damaged."""
    from sentencepiece import SentencePieceProcessor

    data = _read(path)
    try:
      self._library = SentencePieceProcessor(model_proto=data)  # pyright: ignore[reportCallIssue]
    except (RuntimeError, OSError, ValueError) as error:
      raise UserError(f"{path}: not a sentencepiece model, or damaged: {error}") from error
    self.vocab_size = self._library.get_piece_size()
    if not self.vocab_size:
      raise UserError(f"{path}: the sentencepiece model has no pieces")
    self.bos_id = _none_if_negative(self._library.bos_id())
    self.eos_id = _none_if_negative(self._library.eos_id())
    self.pad_id = _none_if_negative(self._library.pad_id())
    self.files = (path,)
    self.fingerprint = f"tokenizer.model, {_digest(data)}"
    self._spellings: Spellings | None = None

  @property
  def special(self) -> Mapping[str, int]:
    """Control pieces; pieces that the model's maker defined are found in plain text anyway."""
    return self._find_spellings().special

  def _find_spellings(self) -> Spellings:
    if self._spellings is None:  # not everybody needs it, and Gemma has 262144 pieces to look through
      library = self._library
      self._spellings = Spellings({library.id_to_piece(i): i for i in range(self.vocab_size) if library.is_control(i)})
    return self._spellings

  def encode_special(self, text: str) -> list[int]:
    return self._find_spellings().encode(text, self.encode)

  def encode(self, text: str) -> list[int]:
    return self._library.encode(text)

  def decode(self, ids: Sequence[int]) -> str:
    return self._library.decode(list(ids))

  def find(self, spelling: str) -> int | None:
    token = self._library.piece_to_id(spelling)
    return token if self._library.id_to_piece(token) == spelling else None  # an unknown piece gives the id of <unk>


def load_tokenizer(name: str, vocab_size: int | None = None) -> Tokenizer:
  """The tokenizer that data.tokenizer names: "bytes", a tokenizer.json, a .model, or a folder that holds one of them.

  "auto" is bytes here: what a run's checkpoints or init_from bring along, training/chosen_tokenizer.py has put in its place.
  `vocab_size`: the model's; a tokenizer that can give larger ids is refused. Raises UserError.
  """
  if name in ("bytes", AUTO):
    tokenizer: Tokenizer = BytesTokenizer()
  else:
    path = find_tokenizer(name)
    tokenizer = SentencePieceTokenizer(path) if path.suffix == ".model" else HuggingFaceTokenizer(path)
  if vocab_size is not None and tokenizer.vocab_size > vocab_size:
    raise UserError(
      f"data.tokenizer '{name}' has {tokenizer.vocab_size} token ids, more than model.vocab_size={vocab_size}; "
      f"choose the model's own tokenizer, or vocab_size={tokenizer.vocab_size} or more"
    )
  return tokenizer


def find_tokenizer(name: str) -> Path:
  """The file that data.tokenizer names: itself, or the one in its folder. Raises UserError where there is none."""
  path = _copied(Place(name)) if is_remote(name) else Path(name).expanduser() if name else Path("")
  if not name or not path.exists():
    raise UserError(
      f"data.tokenizer '{name}': no such file or folder{hub.advice(name)}; give 'bytes', a tokenizer.json, "
      "a sentencepiece .model, or a folder that holds one of them"
    )
  if path.is_dir():
    for candidate in ("tokenizer.json", "tokenizer.model"):
      if (path / candidate).is_file():
        return path / candidate
    models = sorted(path.glob("*.model"))
    if len(models) != 1:
      listed = f"{len(models)} .model files" if models else "no .model file"
      raise UserError(f"data.tokenizer '{name}': the folder has no tokenizer.json, no tokenizer.model and {listed}")
    return models[0]
  if not path.is_file():
    raise UserError(f"data.tokenizer '{name}' is not a regular file")
  if path.suffix not in (".json", ".model"):
    raise UserError(f"data.tokenizer '{name}': expected a .json (tokenizers) or .model (sentencepiece) file")
  return path


def _copied(place: Place) -> Path:
  """A tokenizer of a store on this machine: a file, or those of a folder."""
  if place.name.endswith((".json", ".model")):
    return local_copies.copy_file(str(place))
  kinds = (".json", ".model", ".txt", ".jinja")
  wanted = lambda e: e.place.name.endswith(kinds) and e.size <= MAX_TOKENIZER_BYTES
  return local_copies.copy_folder(place, wanted, below=(MORE_TEMPLATES,))


def _read(path: Path) -> bytes:
  try:
    with open_regular(path) as file:
      data = file.read(MAX_TOKENIZER_BYTES + 1)
    if len(data) > MAX_TOKENIZER_BYTES:
      size = path.stat().st_size
      raise UserError(f"{path}: {size} bytes, more than the limit of {MAX_TOKENIZER_BYTES} for a tokenizer file")
    return data
  except OSError as error:
    raise UserError(f"{path}: {error.strerror}") from error


def _read_config(path: Path) -> dict[str, Any]:
  try:
    config = json.loads(_read(path).decode("utf-8"))
  except (ValueError, RecursionError) as error:
    raise UserError(f"{path}: not JSON: {error}") from error
  if not isinstance(config, dict):
    raise UserError(f"{path}: expected a JSON object, found {type(config).__name__}")
  return config


def _special(config: dict[str, Any], path: Path, key: str, known: Sequence[str], vocabulary: dict[str, int]) -> int | None:
  """The id of one special token: named by the config (a string or {"content": ...}; null: none), else by habit."""
  if key not in config:
    return next((vocabulary[name] for name in known if name in vocabulary), None)
  value = config[key]
  name = value.get("content") if isinstance(value, dict) else value
  if name is None:
    return None
  if name not in vocabulary:
    raise UserError(f"{path}: {key} is {name!r}, which the tokenizer.json beside it does not have")
  return vocabulary[name]


def _none_if_negative(token: int) -> int | None:
  return token if token >= 0 else None


def _digest(data: bytes) -> str:
  import xxhash

  return f"xxh3 {xxhash.xxh3_128_hexdigest(data)}"
