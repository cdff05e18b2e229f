"""Rebuilds a configuration from a stored step: model, vision and precision sections, without the settings of the machine."""

from collections.abc import Sequence
from typing import Any

from maxtext_like.config.load import KindOfFiles, Loaded, make_section
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.precision_keys import foreign_keys
from maxtext_like.config.schema import LEAVES
from maxtext_like.config.values import load_values

_SECTIONS = ("model", "vision", "precision")


def section(name: str, stored: dict[str, Any]) -> Any:
  """Returns one section of a stored configuration. Keys that the step does not have get their defaults."""
  values = stored.get(name, {}) | {"decoder_block": stored["model"]["decoder_block"]}
  return make_section(name, {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def load_stored(
  stored: dict[str, Any],
  place: str,
  overrides: Sequence[str] = (),
  kind_of_files: KindOfFiles | None = None,
  *,
  inference: bool = False,
) -> Loaded:
  """Returns a configuration with the stored model, vision and precision sections.

  They override configs/base.yml and are overridden by ``overrides``.

  Args:
    stored: ``Manifest.config``.
    place: name of the step in errors.
    overrides: ``key=value`` words.
    kind_of_files, inference: as for ``load_config``.

  Raises:
    UserError: as ``load_config``.
  """
  model: ModelConfig = section("model", stored)
  useless = foreign_keys(model)
  # Drop keys that this version does not know, and keys that have no effect on this model, which load_values would refuse.
  values = {
    name: {k: v for k, v in stored.get(name, {}).items() if LEAVES.get(k, ("",))[0] == name and k not in useless}
    for name in _SECTIONS
  }
  words = [f"max_target_length={min(2048, model.max_position_embeddings)}", *overrides]
  return load_values(values, place, words, kind_of_files, inference=inference)
