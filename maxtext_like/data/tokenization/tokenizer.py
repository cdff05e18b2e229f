"""Text to token ids: raw bytes, a Hugging Face tokenizer.json, a sentencepiece model.

`encode` maps plain text: the string "<eos>" inside it is text, never the end-of-document token (sentencepiece does so by
itself; `encode_special_tokens` for tokenizers). `encode_special` takes it for the token, as prompts and, by
data.special_tokens_in_text, documents want it. bos and eos are added by the pipeline, at the start and the end of each
document, wherever the tokenizer has them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from maxtext_like import local_copies
from maxtext_like.config import hub
from maxtext_like.data.readers.input_files import open_regular
from maxtext_like.data.tokenization.special_tokens import SPELLINGS, Spellings
from maxtext_like.data.tokenization.tokenizer_libraries import TokenizersLibrary
from maxtext_like.data.tokenization.tokenizer_parts import is_bounded
from maxtext_like.data.worker_main import RefusedError
from maxtext_like.data.worker_process import MIB, Limits, Program
from maxtext_like.errors import UserError
from maxtext_like.storage import Place, is_remote
from maxtext_like.strict_json import printable

MORE_TEMPLATES = "additional_chat_templates"  # a folder beside a tokenizer, with chat templates by name (transformers)
MAX_TOKENIZER_BYTES = 256 * 2**20  # Gemma's tokenizer.json has 33 MB; the parser takes several times the file's size
AUTO = "auto"
LIMITS = Limits(
  open_seconds=60.0, spare_seconds=10.0, call_seconds=0.02, call_seconds_per_character=2e-5, open_bytes=1024 * MIB,
  call_bytes=512 * MIB, call_bytes_per_character=400,
)  # fmt: skip
"""Tokenizers encode 500,000 characters a second and more, in 100 bytes for each, so these are 10 and 4 times what they need."""
OPENED_BYTES_PER_BYTE = 40  # bytes of memory for each byte of the file; Gemma's 33 MB become 500 MB


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


class _InThisProcess:
  """A library with the interface of ``worker_process.Program``."""

  def __init__(self, library: TokenizersLibrary):
    self._library = library
    self.facts = library.facts()

  def call(self, method: str, *arguments: Any, size: int) -> Any:
    del size
    return getattr(self._library, method)(*arguments)


class _LibraryTokenizer:
  """A tokenizer of a library. It runs in the worker process unless all parts of its file are known to be harmless.

  Attributes:
    vocab_size: the number of ids.
    files: the tokenizer's files.
  """

  def __init__(self, kind: str, path: Path):
    """Raises UserError: too large, damaged, or more time or memory than a tokenizer should take."""
    self._path = path
    data = _read(path)
    self._digest = _digest(data)
    self._program: Program | _InThisProcess
    try:
      if kind == "tokenizer.json" and is_bounded(data):
        self._program = _InThisProcess(TokenizersLibrary(data))
      else:
        self._program = self._in_worker(kind, len(data))
    except RefusedError as error:
      raise UserError(f"{path}: {error}") from None
    self.vocab_size: int = self._program.facts["vocab_size"]
    self.files: tuple[Path, ...] = (path,)

  def _in_worker(self, kind: str, size: int) -> Program:
    path = self._path

    def load() -> tuple[bytes]:  # also when the worker that had it is gone, or this process is a fork
      data = _read(path)
      if _digest(data) != self._digest:
        raise UserError(f"{path}: the tokenizer changed while it was in use\n  fix: start again")
      return (data,)

    limits = replace(LIMITS, open_bytes=LIMITS.open_bytes + OPENED_BYTES_PER_BYTE * size)
    fix = "tokenizer=PATH of the tokenizer that was published with the model"
    return Program(kind, f"{path}: the tokenizer", load, limits, fix)

  def _encode(self, method: str, text: str) -> list[int]:
    text.encode("utf-8")  # raises UnicodeEncodeError for lone surrogates, which the libraries treat differently
    try:
      return self._program.call(method, text, size=len(text))
    except RefusedError as error:
      raise UserError(
        f"{self._path}: the tokenizer cannot encode the text {text[:60]!r}{'...' * (len(text) > 60)}: {error}\n"
        "  fix: tokenizer=PATH of a tokenizer that has tokens for every text"
      ) from None

  def encode(self, text: str) -> list[int]:
    return self._encode("encode", text)

  def decode(self, ids: Sequence[int]) -> str:
    return self._program.call("decode", list(ids), size=len(ids))

  def find(self, spelling: str) -> int | None:
    return self._program.call("find", spelling, size=len(spelling))


class HuggingFaceTokenizer(_LibraryTokenizer):
  """A tokenizer.json, read by the library tokenizers; tokenizer_config.json in the same folder names the special tokens."""

  def __init__(self, path: Path):
    """`path`: the tokenizer.json. Raises UserError: too large, not UTF-8, damaged, names tokens it does not have."""
    super().__init__("tokenizer.json", path)
    config_path = path.with_name("tokenizer_config.json")
    config: dict[str, Any] = {}
    if config_path.exists():
      self.files = (path, config_path)
      config = _read_config(config_path)
    self.bos_id = _special(config, config_path, "bos_token", SPELLINGS["bos"], self.find)
    self.eos_id = _special(config, config_path, "eos_token", SPELLINGS["eos"], self.find)
    self.pad_id = _special(config, config_path, "pad_token", SPELLINGS["pad"], self.find)
    self.special: Mapping[str, int] = self._program.facts["special"]
    # Without the file's name, which a copy beside a checkpoint need not share.
    self.fingerprint = f"tokenizer.json, {self._digest}, bos {self.bos_id}, eos {self.eos_id}"

  def encode_special(self, text: str) -> list[int]:
    return self._encode("encode_special", text)


class SentencePieceTokenizer(_LibraryTokenizer):
  """A sentencepiece .model."""

  def __init__(self, path: Path):
    """Raises UserError: too large or damaged."""
    super().__init__("sentencepiece", path)
    facts = self._program.facts
    self.bos_id, self.eos_id, self.pad_id = (_none_if_negative(facts[name]) for name in ("bos", "eos", "pad"))
    self.fingerprint = f"tokenizer.model, {self._digest}"
    self._spellings: Spellings | None = None

  @property
  def special(self) -> Mapping[str, int]:
    """Control pieces; pieces that the model's maker defined are found in plain text anyway."""
    return self._find_spellings().special

  def _find_spellings(self) -> Spellings:
    if self._spellings is None:
      self._spellings = Spellings(self._program.call("special", size=self.vocab_size))
    return self._spellings

  def encode_special(self, text: str) -> list[int]:
    return self._find_spellings().encode(text, self.encode)


def load_tokenizer(name: str, vocab_size: int | None = None) -> Tokenizer:
  """The tokenizer that data.tokenizer names: "bytes", a tokenizer.json, a .model, or a folder that holds one of them.

  "auto" means bytes here: training/run/resolve_tokenizer.py has already replaced it by the tokenizer of a
  checkpoint or of init_from, if there is one.
  `vocab_size`: the model's; a tokenizer that can give larger ids is refused. Raises UserError.
  """
  if name in ("bytes", AUTO):
    tokenizer: Tokenizer = BytesTokenizer()
  else:
    path = find_tokenizer(name)
    tokenizer = SentencePieceTokenizer(path) if path.suffix == ".model" else HuggingFaceTokenizer(path)
  if vocab_size is not None and tokenizer.vocab_size > vocab_size:
    raise UserError(
      f"data.tokenizer '{name}' has {tokenizer.vocab_size} token ids, more than model.vocab_size={vocab_size}\n"
      f"  fix: the model's own tokenizer, or vocab_size={tokenizer.vocab_size}, which adds rows to the embedding of init_from"
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
    if not models[0].name.isprintable():  # a line break in it would forge lines of logs and errors
      raise UserError(f"data.tokenizer '{name}': {printable(models[0].name)} has characters that cannot be printed in its name")
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


def _special(
  config: dict[str, Any], path: Path, key: str, known: Sequence[str], find: Callable[[str], int | None]
) -> int | None:
  """The id of one special token: named by the config (a string or {"content": ...}; null: none), else by habit."""
  if key not in config:
    return next((i for name in known if (i := find(name)) is not None), None)
  value = config[key]
  name = value.get("content") if isinstance(value, dict) else value
  if name is None:
    return None
  if not isinstance(name, str) or (found := find(name)) is None:
    raise UserError(f"{path}: {key} is {name!r}, which the tokenizer.json beside it does not have")
  return found


def _none_if_negative(token: int) -> int | None:
  return token if token >= 0 else None


def _digest(data: bytes) -> str:
  import xxhash

  return f"xxh3 {xxhash.xxh3_128_hexdigest(data)}"
