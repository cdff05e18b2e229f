"""``perplexity``: perplexity of a text file by windows that overlap, as in the documentation of transformers."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved
from maxtext_like.api.loaded import as_loaded, require_counts
from maxtext_like.api.pretrained import Pretrained
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.evaluation.perplexity import Perplexity

LENGTH = 2048  # default of max_length


def perplexity(
  model: str | Path | Saved | Pretrained,
  file: str | Path,
  *overrides: str,
  stride: int = 512,
  max_length: int | None = None,
  batch_size: int | None = None,
  adapters: str | Path | Saved | Sequence[str | Path | Saved] = (),
  on_batch: Callable[[int, int], None] | None = None,
  on_note: Callable[[str], None] | None = None,
  **keys: Any,
) -> "Perplexity":
  """Compute the perplexity of a text file.

  The text is encoded as one document, with the beginning-of-text token if the tokenizer has one. Windows of ``max_length``
  tokens begin every ``stride`` tokens. The first window counts all its tokens except the first one, later windows only tokens
  that are new. Their mean losses are averaged as in the documentation of transformers, weighted by the number of new tokens
  minus one.

  Args:
    model: the result of ``load``, or an argument for it.
    file: a UTF-8 text file.
    overrides: words that override the configuration of a model to load, such as ``"dtype=bfloat16"``.
    stride: tokens between the beginnings of two windows. A smaller one gives more context and takes longer.
    max_length: tokens of a window; None: 2048, or the longest sequence of the model if that is less.
    batch_size: windows that are computed together; None: as many as have 8192 tokens together.
    adapters: as for ``load``.
    on_batch: called before every batch with the numbers of finished windows and of all windows.
    on_note: called with every remark about the loaded model, such as the storage of its weights.
    keys: the same as ``overrides``, as Python values.

  Raises:
    UserError: the file cannot be read, is not UTF-8 or too short, or an argument is invalid.
    NonFiniteError: the logits are not finite.
    DoesNotFitError: the weights do not fit the memory of the device.
  """
  require_counts(perplexity, stride=stride, max_length=max_length, batch_size=batch_size)
  text = _read(Path(file).expanduser())
  loaded = as_loaded(perplexity, model, overrides, keys, adapters, on_note)
  from maxtext_like.evaluation.perplexity import measure, windows
  from maxtext_like.evaluation.scoring import Scorer

  longest, tokenizer = loaded.config.model.max_position_embeddings, loaded.tokenizer
  length = min(LENGTH, longest) if max_length is None else max_length
  if length > longest:
    raise UserError(f"max_length is {length}, but the model takes {longest} tokens\n  fix: max_length of at most {longest}")
  encode = tokenizer.encode_special if loaded.config.data.special_tokens_in_text == "parse" else tokenizer.encode
  tokens = [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *encode(text)]
  windows(len(tokens), length, stride)  # refuses impossible sizes before anything is compiled
  scorer = Scorer(loaded.model, loaded.decoder, max_length=length, batch_size=batch_size, on_batch=on_batch)
  found = measure(scorer, loaded.params, tokens, stride=stride)
  return found if loaded.decoder.uses_float16 else dataclasses.replace(found, clamped=None)


def _read(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except OSError as error:
    raise UserError(f"{path}: cannot be read: {error.strerror}", fix="pass the path of a readable text file") from None
  except UnicodeDecodeError as error:
    raise UserError(f"{path}: not UTF-8 at byte {error.start}\n  fix: convert it to UTF-8, for example with iconv") from None
