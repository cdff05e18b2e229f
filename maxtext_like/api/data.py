"""``look_at_data``: shows records as a run tokenizes them, and counts one pass over the data."""

import numbers
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import words
from maxtext_like.api.config import load_config, load_for_sft
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.api.config import Configuration
  from maxtext_like.data.preview import DataPreview


def look_at_data(
  config: "Configuration", *overrides: str, show: int = 3, documents: int = 10_000, for_sft: bool = False, **keys: Any
) -> "DataPreview":
  """Tokenize the first training records as a run does, mark the learned tokens, and count one pass over the data.

  Args:
    config: a configuration, as for ``load_config``.
    overrides: words that override the configuration, such as ``"data_format=chat"``.
    show: number of first records to return from each source.
    documents: number of first documents to count in each source.
    for_sft: treat the arguments as those of ``sft``.
    keys: the same as Python values, such as ``data_format="chat"``.

  Returns:
    An object with ``records``, whose ``parts`` are pairs of text and True if it is learned, and ``counts`` by source. Bad
    records are counted and raise no error.

  Raises:
    UserError: the configuration or a file is invalid.
  """
  for name, value in {"show": show, "documents": documents}.items():
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
      raise UserError(f"look_at_data: {name}={value!r:.60}: not an integer of 0 or more\n  fix: pass {name}=2")
  from maxtext_like.data.preview import preview
  from maxtext_like.models.registry import FAMILIES
  from maxtext_like.training.run import resolve_tokenizer
  from maxtext_like.training.run.preflight import run_directory

  given = words(overrides, keys, look_at_data)
  c = (load_for_sft(config, given) if for_sft else load_config(config, *given)).config
  return preview(
    resolve_tokenizer.resolve(c.data, c.checkpoint, run_directory(c).checkpoints),
    vocab_size=c.model.vocab_size,
    length=c.training.max_target_length,
    vision=c.vision,
    chat_template=FAMILIES[c.model.decoder_block].chat_template(c.model),
    show=int(show),
    most=int(documents),
  )
