"""Load a configuration from values in memory: from a checkpoint, or from a ``ConfigDict`` that a notebook or sweep changed."""

import dataclasses
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxtext_like.config.load import KindOfFiles, Loaded, load_config
from maxtext_like.config.yaml_file import to_text
from maxtext_like.errors import UserError


def load_values(
  values: Mapping[str, Any],
  place: str,
  overrides: Sequence[str] = (),
  kind_of_files: KindOfFiles | None = None,
  *,
  inference: bool = False,
) -> Loaded:
  """Load a configuration from ``values``, treated like those of a model file, and ``overrides``.

  Args:
    values: values by section, or by key.
    place: name of these values in errors and origins.
    overrides: ``key=value`` words.
    kind_of_files, inference: as in ``load_config``.

  Raises:
    UserError: as ``load_config``.
  """
  lines = []
  for name, value in values.items():
    if isinstance(value, Mapping):
      lines += [f"{name}:", *(f"  {key}: {to_text(x)}" for key, x in value.items())]
    else:
      lines.append(f"{name}: {to_text(value)}")
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "values.yml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    said = lambda text: re.sub(rf"\S*{re.escape(path.name)}(:\d+)?", lambda _: place, text)
    try:
      loaded = load_config(path, overrides, kind_of_files, inference=inference)
    except UserError as error:
      raise UserError(said(str(error))) from None
  origins = {key: said(origin) for key, origin in loaded.origins.items()}
  return dataclasses.replace(loaded, origins=origins, notes=tuple(map(said, loaded.notes)), path=Path(place))
