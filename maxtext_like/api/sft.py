"""``sft``: fine-tunes a model on conversations."""

from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import require_shown, words
from maxtext_like.api.config import load_for_sft
from maxtext_like.api.train import Run, train

if TYPE_CHECKING:
  from maxtext_like.api.config import Configuration
  from maxtext_like.training.loop.progress import Shown


def sft(config: "Configuration", *overrides: str, progress: "Shown" = None, **keys: Any) -> Run:
  """Fine-tune on conversations: ``train`` with ``data_format=chat`` and the ``dataset`` chosen by the files.

  Args:
    config: a configuration, as for ``load_config``.
    overrides: words that override the configuration, such as ``"dataset_path=chats.jsonl"``.
    progress: target of printed lines, as for ``train``.
    keys: the same as Python values, such as ``dataset_path="chats.jsonl"``.

  Raises:
    ExitError: as ``train``.
  """
  from maxtext_like.training.loop.progress import Progress

  require_shown(progress)
  loaded = load_for_sft(config, words(overrides, keys, sft))
  with Progress(0, 1, progress) as shown:
    for note in loaded.notes:
      shown.say(f"note    {note}")
  return train(loaded, progress=progress)
