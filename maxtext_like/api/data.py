"""What a run would make of its data, from Python."""

import numbers
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import words
from maxtext_like.api.configuration import load_config, load_for_sft
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.api.configuration import Configuration
  from maxtext_like.data.preview import DataPreview


def look_at_data(
  config: "Configuration", *overrides: str, show: int = 3, documents: int = 10_000, for_sft: bool = False, **keys: Any
) -> "DataPreview":
  """What a run would make of its training data: records as they are tokenised, with what is learned, and counts of a pass.

  Args:
    config: a name, a path, or what ``load_config`` returned.
    overrides: words laid over it, as ``"data_format=chat"``.
    show: records of each source that are shown, the first.
    documents: of each source that are counted, the first.
    for_sft: the words are those of ``sft``, which adds what it needs.
    keys: values laid over it, as ``data_format="chat"``.

  Returns:
    ``records`` with ``parts``, texts and whether they are learned; ``counts`` by source; bad records are counted, not raised.

  Raises:
    UserError: configuration or files cannot be used.
  """
  for name, value in {"show": show, "documents": documents}.items():
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
      raise UserError(f"look_at_data: {name}={value!r:.60}: not a whole number from 0")
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
