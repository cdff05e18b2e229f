"""Configurations as Python code writes them: a name and keywords, or values that it changed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import words
from maxtext_like.config import load as files
from maxtext_like.config.data_keys import NO_CONVERSATIONS
from maxtext_like.config.load import Loaded, to_config_dict
from maxtext_like.config.schema import Config
from maxtext_like.config.values import load_values
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from ml_collections import ConfigDict

  Configuration = str | Path | Loaded | Config | ConfigDict
  """What a configuration may be given as."""


def load_config(model: "Configuration", *overrides: str, **keys: Any) -> Loaded:
  """Loads, merges and checks a configuration.

  Args:
    model: a model's name (``"gemma4-tiny"``), the path of a model file, or a configuration: what this function returned, its
      ``config``, or a ``ConfigDict`` of it.
    overrides: words as on the command line: ``"steps=20"``, or the path of an overlay.
    keys: the same as Python values: ``steps=20``.

  Returns:
    ``config``, the typed sections (``.config.training.steps``), with ``origins``, ``notes`` and ``to_yaml()``.

  Raises:
    UserError: anything wrong, with place, value and remedy; conflicts are listed all at once.
  """
  given = words(overrides, keys, load_config)
  if isinstance(model, Loaded):
    if not given:
      return model
    model = model.config
  if isinstance(model, Config):
    return load_values(to_config_dict(model).to_dict(), "Config", given)
  if isinstance(model, str | Path):
    return files.load_config(model, given)
  if callable(getattr(model, "to_dict", None)):
    return load_values(model.to_dict(), "ConfigDict", given)
  raise UserError(
    f"{model!r:.60} ({type(model).__name__}) is no configuration\n"
    '  fix: a model\'s name with keys behind it, as "gemma4-tiny", steps=20, or what load_config returned'
  )


def load_for_sft(config: "Configuration", given: list[str]) -> Loaded:
  """The configuration of a run on conversations: what ``train`` would need beside the words is laid under them.

  That is ``data_format=chat``, and the ``dataset`` that the files of ``dataset_path`` are of. Raises as ``load_config``.
  """
  from maxtext_like.data.sources import kind_of_files

  chat = "data_format=chat"
  try:
    return load_config(config, chat, *given)  # somebody has chosen a dataset that has conversations
  except UserError as error:
    if NO_CONVERSATIONS not in str(error):
      raise
  loaded = load_config(config, chat, "dataset=jsonl", *given)
  kind = kind_of_files(loaded.config.data)
  return loaded if kind == "jsonl" else load_config(config, chat, f"dataset={kind}", *given)
