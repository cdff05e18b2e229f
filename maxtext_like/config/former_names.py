"""Keys of this project that have a new name. The former name works for one release, and a note says what to write.

``RENAMED`` is read wherever a key comes in: files and words (``maxtext.py``), ``layer_precision``, a checkpoint's manifest.
"""

from collections.abc import Mapping
from typing import Any

RENAMED = {"float16_rescue": "float16_clamp"}
"""Former name, present name."""


def note(former: str) -> str:
  """Return the line that says what to write in place of a former name."""
  return f"{former} is now called {RENAMED[former]}; the former name works until the next release"


def renamed(sections: Mapping[str, Any]) -> dict[str, Any]:
  """Return the stored values of a configuration, by section, under the present names."""
  return {
    section: {RENAMED.get(key, key): value for key, value in values.items()} if isinstance(values, Mapping) else values
    for section, values in sections.items()
  }
