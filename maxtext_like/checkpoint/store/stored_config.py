"""The configuration that a step holds, to run its model elsewhere: the model and its numbers, not the machine it was on."""

from collections.abc import Sequence
from typing import Any

from maxtext_like.config.load import KindOfFiles, Loaded, make_section
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.precision_keys import foreign_keys
from maxtext_like.config.schema import LEAVES
from maxtext_like.config.values import load_values

_SECTIONS = ("model", "vision", "precision")


def section(name: str, stored: dict[str, Any]) -> Any:
  """A section of a stored configuration; keys that are newer than the step have their defaults."""
  values = stored.get(name, {}) | {"decoder_block": stored["model"]["decoder_block"]}
  return make_section(name, {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def load_stored(
  stored: dict[str, Any], place: str, overrides: Sequence[str] = (), kind_of_files: KindOfFiles | None = None
) -> Loaded:
  """The model, its tower and its precision as they were stored, laid over configs/base.yml, then ``overrides``.

  Args:
    stored: ``Manifest.config``.
    place: names the step in errors.
    overrides: ``key=value`` words.
    kind_of_files: as of ``load_config``.

  Raises:
    UserError: as ``load_config``.
  """
  model: ModelConfig = section("model", stored)
  useless = foreign_keys(model)
  # What this version does not know was said for another; what the model has no use for may not be said.
  values = {
    name: {k: v for k, v in stored.get(name, {}).items() if LEAVES.get(k, ("",))[0] == name and k not in useless}
    for name in _SECTIONS
  }
  return load_values(
    values, place, [f"max_target_length={min(2048, model.max_position_embeddings)}", *overrides], kind_of_files
  )
