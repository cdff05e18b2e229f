"""The configuration that a step holds, to run its model elsewhere: the model and its numbers, not the machine it was on."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext_like.config.load import Loaded, load_config, make_section
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.precision_keys import foreign_keys
from maxtext_like.config.schema import LEAVES
from maxtext_like.config.yaml_file import to_text
from maxtext_like.errors import UserError

_SECTIONS = ("model", "vision", "precision")


def section(name: str, stored: dict[str, Any]) -> Any:
  """A section of a stored configuration; keys that are newer than the step have their defaults."""
  values = stored.get(name, {}) | {"decoder_block": stored["model"]["decoder_block"]}
  return make_section(name, {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def load_stored(stored: dict[str, Any], place: str, overrides: Sequence[str] = ()) -> Loaded:
  """The model, its tower and its precision as they were stored, laid over configs/base.yml, then ``overrides``.

  Args:
    stored: ``Manifest.config``.
    place: names the step in errors.
    overrides: ``key=value`` words.

  Raises:
    UserError: as ``load_config``.
  """
  model: ModelConfig = section("model", stored)
  inactive = foreign_keys(model)
  lines = []
  for name in _SECTIONS:
    # What this version does not know was said for another; what the model has no use for may not be said.
    known = [key for key in stored.get(name, {}) if LEAVES.get(key, ("",))[0] == name and key not in inactive]
    lines += [f"{name}:", *(f"  {key}: {to_text(stored[name][key])}" for key in known)]
  longest = model.max_position_embeddings
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "stored.yml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    try:
      return load_config(path, [f"max_target_length={min(2048, longest)}", *overrides])
    except UserError as error:
      raise UserError(re.sub(rf"\S*{re.escape(path.name)}(:\d+)?", lambda _: place, str(error))) from None
