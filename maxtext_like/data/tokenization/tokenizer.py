"""Tokenizers: raw bytes, a Hugging Face tokenizer.json, or a sentencepiece model.

`encode` encodes plain text: the string "<eos>" in it is text, never the end-of-document token. (sentencepiece does this by
default; tokenizers needs `encode_special_tokens`.) `encode_special` encodes the string as the token, for prompts and, if
data.special_tokens_in_text says so, for documents. The pipeline adds bos and eos at the start and the end of each document if
the tokenizer has them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import xxhash

from maxtext_like import local_copies
from maxtext_like.config import hub
from maxtext_like.data.readers.input_files import open_regular
from maxtext_like.data.tokenization.special_tokens import SPELLINGS, Spellings
from maxtext_like.data.tokenization.tokenizer_libraries import TokenizersLibrary, is_bounded
from maxtext_like.data.worker_main import RefusedError
from maxtext_like.data.worker_process import MIB, Limits, Program
from maxtext_like.errors import UserError
from maxtext_like.storage import Place, is_remote
from maxtext_like.strict_json import printable

MORE_TEMPLATES = "additional_chat_templates"  # folder next to a tokenizer with chat templates by name (transformers)
MAX_TOKENIZER_BYTES = 256 * 2**20  # Gemma's tokenizer.json has 33 MB; the parser takes several times the size of the file
AUTO = "auto"
_FIX = "tokenizer=PATH of a tokenizer.json, a sentencepiece .model or a folder with one of them"
LIMITS = Limits(
  open_seconds=60.0, spare_seconds=10.0, call_seconds=0.02, call_seconds_per_character=2e-5, open_bytes=1024 * MIB,
  call_bytes=512 * MIB, call_bytes_per_character=400,
)  # fmt: skip
"""Tokenizers encode 500,000 characters per second or more and use 100 bytes for each. These limits are 10 and 4 times as
generous."""
OPENED_BYTES_PER_BYTE = 40  # bytes of memory for each byte of the file; Gemma's 33 MB become 500 MB


class Tokenizer(Protocol):
  """Converts between text and token ids in [0, vocab_size)."""

  vocab_size: int
  bos_id: int | None
  eos_id: int | None
  pad_id: int | None
  files: tuple[Path, ...]  # files that a checkpoint must include so that its tokens can be decoded
  fingerprint: str  # differs if the mapping differs

  @property
  def special(self) -> Mapping[str, int]: ...  # ids by spelling of special tokens, which plain text never encodes to

  def encode(self, text: str) -> list[int]: ...

  def encode_special(self, text: str) -> list[int]: ...  # a spelling in the text becomes the special token

  def decode(self, ids: Sequence[int]) -> str: ...

  def find(self, spelling: str) -> int | None: ...  # id of one token, special or not; None if there is no such token


class BytesTokenizer:
  """UTF-8 bytes: id = 3 + byte. Ids 0, 1 and 2 are padding, end and beginning of a document, as in Gemma. There are 259 ids."""

  vocab_size = 259
  pad_id: int | None = 0
  eos_id: int | None = 1
  bos_id: int | None = 2
  files: tuple[Path, ...] = ()
  fingerprint = "bytes, id = 3 + byte"
  special: Mapping[str, int] = {}

  def encode(self, text: str) -> list[int]:
    """Returns the ids of the text's bytes. Raises UnicodeEncodeError for lone surrogates, which the sources refuse earlier."""
    return [byte + 3 for byte in text.encode("utf-8")]

  def encode_special(self, text: str) -> list[int]:
    """Same as `encode`, because no special token has a spelling."""
    return self.encode(text)

  def decode(self, ids: Sequence[int]) -> str:
    """Decodes ids. Special ids are left out, bytes that are not UTF-8 become U+FFFD. Raises ValueError for an id outside the
    vocabulary."""
    for token in ids:
      if not 0 <= token < self.vocab_size:
        raise ValueError(f"token id {token} outside the byte vocabulary [0, {self.vocab_size})")
    return bytes(token - 3 for token in ids if token >= 3).decode("utf-8", errors="replace")

  def find(self, spelling: str) -> int | None:
    """Returns the id of a text of one byte."""
    data = spelling.encode("utf-8", errors="surrogateescape")
    return data[0] + 3 if len(data) == 1 else None


class _InThisProcess:
  """A tokenizer library in this process, with the interface of ``worker_process.Program``."""

  def __init__(self, library: TokenizersLibrary):
    self._library = library
    self.facts = library.facts()

  def call(self, method: str, *arguments: Any, size: int) -> Any:
    del size
    return getattr(self._library, method)(*arguments)


class _LibraryTokenizer:
  """A tokenizer of a library. It runs in the worker process unless all parts of its file are known to be harmless.

  Attributes:
    vocab_size: number of ids.
    files: files of the tokenizer.
  """

  def __init__(self, kind: str, path: Path):
    """Opens the file. Raises UserError if it is too large or damaged, or takes more time or memory than a tokenizer should."""
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
      raise UserError(f"{path}: {error}", fix=_FIX) from None
    self.vocab_size: int = self._program.facts["vocab_size"]
    self.files: tuple[Path, ...] = (path,)

  def _in_worker(self, kind: str, size: int) -> Program:
    path = self._path

    def load() -> tuple[bytes]:  # called again if the worker ended, or in a fork of this process
      data = _read(path)
      if _digest(data) != self._digest:
        raise UserError(f"{path}: the tokenizer changed while it was in use\n  fix: start the run again")
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
  """A tokenizer.json, read by the library tokenizers. tokenizer_config.json in the same folder names the special tokens."""

  def __init__(self, path: Path):
    """Opens a tokenizer.json. Raises UserError if it is too large, not UTF-8 or damaged, or names tokens that it lacks."""
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
    # The name of the file is not included, because the copy in a checkpoint may have another name.
    self.fingerprint = f"tokenizer.json, {self._digest}, bos {self.bos_id}, eos {self.eos_id}"

  def encode_special(self, text: str) -> list[int]:
    return self._encode("encode_special", text)


class SentencePieceTokenizer(_LibraryTokenizer):
  """A sentencepiece .model."""

  def __init__(self, path: Path):
    """Opens a .model file. Raises UserError if it is too large or damaged."""
    super().__init__("sentencepiece", path)
    facts = self._program.facts
    self.bos_id, self.eos_id, self.pad_id = (_none_if_negative(facts[name]) for name in ("bos", "eos", "pad"))
    self.fingerprint = f"tokenizer.model, {self._digest}"
    self._spellings: Spellings | None = None

  @property
  def special(self) -> Mapping[str, int]:
    """The control pieces. Pieces that the author of the model defined are also found in plain text."""
    return self._find_spellings().special

  def _find_spellings(self) -> Spellings:
    if self._spellings is None:
      self._spellings = Spellings(self._program.call("special", size=self.vocab_size))
    return self._spellings

  def encode_special(self, text: str) -> list[int]:
    return self._find_spellings().encode(text, self.encode)


def load_tokenizer(name: str, vocab_size: int | None = None) -> Tokenizer:
  """Returns the tokenizer that data.tokenizer names: "bytes", a tokenizer.json, a .model, or a folder with one of them.

  "auto" means bytes here. A run replaces it earlier, with the tokenizer of its checkpoints or of init_from.

  Args:
    name: value of data.tokenizer.
    vocab_size: vocabulary of the model. A tokenizer with larger ids is refused.

  Raises:
    UserError: the tokenizer cannot be used.
  """
  if name in ("bytes", AUTO):
    tokenizer: Tokenizer = BytesTokenizer()
  else:
    path = find_tokenizer(name)
    tokenizer = SentencePieceTokenizer(path) if path.suffix == ".model" else HuggingFaceTokenizer(path)
  if vocab_size is not None and tokenizer.vocab_size > vocab_size:
    # A checkpoint with fewer ids than bytes was trained with another tokenizer, so added rows would not help.
    size = f"vocab_size={tokenizer.vocab_size}"
    advice = f"the model's own tokenizer, or {size}, which adds rows to the embedding of the checkpoint"
    if isinstance(tokenizer, BytesTokenizer):
      advice = f"tokenizer=DIRECTORY with the model's own tokenizer; for a model without a checkpoint, {size}"
    raise UserError(
      f"data.tokenizer '{name}' has {tokenizer.vocab_size} token ids, more than model.vocab_size={vocab_size}", fix=advice
    )
  return tokenizer


def find_tokenizer(name: str) -> Path:
  """Returns the tokenizer file that data.tokenizer names, directly or in a folder. Raises UserError if there is none."""
  path = _copied(Place(name)) if is_remote(name) else Path(name).expanduser() if name else Path("")
  if not name or not path.exists():
    raise UserError(
      f"data.tokenizer '{name}': no such file or folder{hub.advice(name)}",
      fix=hub.fix(name, "set it to 'bytes', a tokenizer.json, a sentencepiece .model, or a folder with one of them"),
    )
  if path.is_dir():
    for candidate in ("tokenizer.json", "tokenizer.model"):
      if (path / candidate).is_file():
        return path / candidate
    models = sorted(path.glob("*.model"))
    if len(models) != 1:
      listed = f"{len(models)} .model files" if models else "no .model file"
      raise UserError(
        f"data.tokenizer '{name}': the folder has no tokenizer.json, no tokenizer.model and {listed}\n  fix: {_FIX}"
      )
    if not models[0].name.isprintable():  # a line break in the name could forge lines of logs and errors
      raise UserError(
        f"data.tokenizer '{name}': {printable(models[0].name)} has characters that cannot be printed in its name\n"
        "  fix: rename it"
      )
    return models[0]
  if not path.is_file():
    raise UserError(f"data.tokenizer '{name}' is not a regular file\n  fix: {_FIX}")
  if path.suffix not in (".json", ".model"):
    raise UserError(f"data.tokenizer '{name}': expected a .json (tokenizers) or .model (sentencepiece) file\n  fix: {_FIX}")
  return path


def token_id(tokenizer: Tokenizer, name: str) -> int | None:
  """Returns the id of a token from its meaning (a key of ``SPELLINGS``) or its spelling; None if the tokenizer has none."""
  if name in ("bos", "eos", "pad"):
    return {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}[name]
  found = (tokenizer.find(spelling) for spelling in SPELLINGS.get(name, (name,)))
  return next((i for i in found if i is not None), None)


def known_names(tokenizer: Tokenizer) -> list[str]:
  """Returns the meanings for which a tokenizer has a token."""
  return [name for name in SPELLINGS if token_id(tokenizer, name) is not None]


def _copied(place: Place) -> Path:
  """Copies a tokenizer from a store to this machine: a file, or the files of a folder."""
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
      raise UserError(f"{path}: {size} bytes, more than the limit of {MAX_TOKENIZER_BYTES} for a tokenizer file\n  fix: {_FIX}")
    return data
  except OSError as error:
    raise UserError(f"{path}: {error.strerror}", fix=_FIX) from error


def _read_config(path: Path) -> dict[str, Any]:
  try:
    config = json.loads(_read(path).decode("utf-8"))
  except (ValueError, RecursionError) as error:
    raise UserError(f"{path}: not JSON: {error}\n  fix: {_FIX}") from error
  if not isinstance(config, dict):
    raise UserError(f"{path}: expected a JSON object, found {type(config).__name__}\n  fix: {_FIX}")
  return config


def _special(
  config: dict[str, Any], path: Path, key: str, known: Sequence[str], find: Callable[[str], int | None]
) -> int | None:
  """Returns the id of one special token.

  The config names it (a string or {"content": ...}; null for none). If the config does not, one of the known spellings does.
  """
  if key not in config:
    return next((i for name in known if (i := find(name)) is not None), None)
  value = config[key]
  name = value.get("content") if isinstance(value, dict) else value
  if name is None:
    return None
  if not isinstance(name, str) or (found := find(name)) is None:
    raise UserError(f"{path}: {key} is {name!r}, but the tokenizer.json in the same folder lacks this token\n  fix: {_FIX}")
  return found


def _none_if_negative(token: int) -> int | None:
  return token if token >= 0 else None


def _digest(data: bytes) -> str:
  return f"xxh3 {xxhash.xxh3_128_hexdigest(data)}"
