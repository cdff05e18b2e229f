"""``load_config``: loads a configuration from a name with keywords, a file, a checkpoint directory, or changed values."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import words
from maxtext_like.config import hub
from maxtext_like.config import load as files
from maxtext_like.config.files import SUFFIXES
from maxtext_like.config.load import Loaded, to_config_dict
from maxtext_like.config.schema import Config
from maxtext_like.config.values import load_values
from maxtext_like.errors import UserError
from maxtext_like.models.registry import FAMILIES
from maxtext_like.storage import Place, is_remote

if TYPE_CHECKING:
  from ml_collections import ConfigDict

  Configuration = str | Path | Loaded | Config | ConfigDict
  """Types that describe a configuration."""


def load_config(model: "Configuration", *overrides: str, **keys: Any) -> Loaded:
  """Load, merge and check a configuration.

  Args:
    model: a model's name (``"gemma4-tiny"``), the path of a model file, a directory with a checkpoint (which defines the model
      and becomes ``init_from``), or a configuration (a result of this function, its ``config``, or its ``ConfigDict``).
    overrides: words as on the command line: ``"steps=20"``, or the path of an overlay.
    keys: the same as Python values: ``steps=20``.

  Returns:
    An object with ``config``, the typed sections (``.config.training.steps``), ``origins``, ``notes`` and ``to_yaml()``.

  Raises:
    UserError: the configuration is invalid. The message has place, value and fix of every problem.
  """
  given = words(overrides, keys, load_config)
  if isinstance(model, Loaded):
    if not given:
      return model
    model = model.config
  if isinstance(model, Config):
    return load_values(to_config_dict(model).to_dict(), "Config", given, _kind_of_files)
  if isinstance(model, str | Path):
    return _load_directory(str(model), given) or files.load_config(model, given, _kind_of_files)
  if callable(getattr(model, "to_dict", None)):
    return load_values(model.to_dict(), "ConfigDict", given, _kind_of_files)
  raise UserError(
    f"{model!r:.60} ({type(model).__name__}) is not a configuration\n"
    '  fix: pass a model name and keys, such as "gemma4-tiny", steps=20, or a result of load_config'
  )


def _load_directory(name: str, given: list[str]) -> Loaded | None:
  """Return the configuration of the checkpoint ``name``, or of ``init_from`` if ``name`` is a family; otherwise None."""
  sources = [word.partition("=")[2] for word in given if word.startswith(("init_from=", "checkpoint.init_from="))]
  family = name if name in FAMILIES and sources and not Path(name).exists() else None
  name = name if family is None else sources[-1]
  if name in files.model_names() or name.endswith(SUFFIXES) or not name:
    return None
  place = Place(name) if is_remote(name) else hub.find(name) or Path(name).expanduser()
  if isinstance(place, Path) and not place.is_dir():
    return None
  from maxtext_like.checkpoint.store.directory_config import load_directory  # imports JAX, so only here

  return load_directory(place, given, _kind_of_files, family=family)


def _kind_of_files(paths: Any, data_format: str) -> str:
  from maxtext_like.data.sources import kind_of_files  # imports NumPy, so only here

  return kind_of_files(paths, data_format)


def load_for_sft(config: "Configuration", given: list[str]) -> Loaded:
  """Load the configuration of a run on conversations, with ``data_format=chat`` as a default. Raises as ``load_config``."""
  return load_config(config, "data_format=chat", *given)
