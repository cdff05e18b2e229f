"""Keys and values of this project that have a new name. The former name works for one release, and a note says what to write.

``RENAMED`` and ``RENAMED_VALUES`` are read wherever a key comes in: files and words, also inside ``layer_precision``
(``maxtext.py``), and manifests of checkpoints.
"""

import re
from collections.abc import Mapping
from typing import Any

RENAMED = {"float16_rescue": "float16_clamp"}
"""Former name, present name."""
RENAMED_VALUES = {"objective": {"language_modelling": "language_modeling"}}
"""Key, former value, present value."""


def note(former: str) -> str:
  """Return the line that says what to write in place of a former name."""
  return f"{former} is now called {RENAMED[former]}; the former name works until the next release"


def note_of_value(key: str, former: str) -> str:
  """Return the line that says what to write in place of a former value."""
  return f"{key}={former} is now called {RENAMED_VALUES[key][former]}; the former name works until the next release"


def in_words(entry: str) -> str:
  """Return words ``key=value``, as an entry of ``layer_precision`` has them, with the present names."""
  return re.sub(r"[^\s=]+(?==)", lambda key: RENAMED.get(key[0], key[0]), entry)


def renamed(sections: Mapping[str, Any]) -> dict[str, Any]:
  """Return the stored values of a configuration, by section, under the present names."""

  def present(key: str, value: Any) -> Any:
    return RENAMED_VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value

  found = {
    section: {RENAMED.get(key, key): present(key, value) for key, value in values.items()}
    if isinstance(values, Mapping)
    else values
    for section, values in sections.items()
  }
  precision = found.get("precision")
  if isinstance(precision, dict) and isinstance(layers := precision.get("layer_precision"), list | tuple):
    precision["layer_precision"] = [in_words(entry) if isinstance(entry, str) else entry for entry in layers]
  return found
