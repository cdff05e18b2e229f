"""Keys of this project that have a new name. The former name works for one release, and a note says what to write.

``RENAMED`` is read wherever a key comes in: files and words, also inside ``layer_precision`` (``maxtext.py``), and manifests of
checkpoints.
"""

import re
from collections.abc import Mapping
from typing import Any

RENAMED = {"float16_rescue": "float16_clamp"}
"""Former name, present name."""


def note(former: str) -> str:
  """Return the line that says what to write in place of a former name."""
  return f"{former} is now called {RENAMED[former]}; the former name works until the next release"


def in_words(entry: str) -> str:
  """Return words ``key=value``, as an entry of ``layer_precision`` has them, with the present names."""
  return re.sub(r"[^\s=]+(?==)", lambda key: RENAMED.get(key[0], key[0]), entry)


def renamed(sections: Mapping[str, Any]) -> dict[str, Any]:
  """Return the stored values of a configuration, by section, under the present names."""
  found = {
    section: {RENAMED.get(key, key): value for key, value in values.items()} if isinstance(values, Mapping) else values
    for section, values in sections.items()
  }
  precision = found.get("precision")
  if isinstance(precision, dict) and isinstance(layers := precision.get("layer_precision"), list | tuple):
    precision["layer_precision"] = [in_words(entry) if isinstance(entry, str) else entry for entry in layers]
  return found
