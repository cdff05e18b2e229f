"""How records name images: a file, or the image itself as a ``data:`` URI in base64. Nothing is fetched."""

import base64
import io
import os
import re
from pathlib import Path
from typing import BinaryIO

from maxtext_like.data.input_files import open_regular

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_SHOWN = 40  # characters of a URI


def located(given: object, folder: str) -> str:
  """What an image is opened by: an absolute path, or the ``data:`` URI as it is.

  Args:
    given: the name in a record; a relative path lies in the folder or below it.
    folder: absolute, of the record's file.

  Raises:
    ValueError: it is no name of an image; its message is the reason.
  """
  if not isinstance(given, str) or not given:
    raise ValueError("expected the name of an image file")
  if scheme := _SCHEME.match(given):
    if scheme[1].lower() == "data":
      return given
    raise ValueError(f"an image has to be a file or a data: URI, found {scheme[1]}:... (nothing is fetched)")
  joined = os.path.normpath(os.path.join(folder, given))
  if not os.path.isabs(given) and os.path.commonpath([folder, joined]) != folder:
    raise ValueError(f"image '{given}' leads out of the folder of the file; give its absolute path")
  return joined


def is_data(name: str | Path) -> bool:
  """Whether a name is the image itself."""
  return isinstance(name, str) and name[:5].lower() == "data:"


def shown(name: str | Path) -> str:
  """A name for messages."""
  text = str(name)
  return f"{text[:_SHOWN]}... ({len(text):,} characters)" if is_data(name) else text


def open_image(name: str | Path) -> BinaryIO:
  """The bytes of an image. OSError of a file; ValueError: a ``data:`` URI that is not base64."""
  if not is_data(name):
    return io.BufferedReader(open_regular(name))
  head, comma, body = str(name).partition(",")
  if not comma or not head.lower().endswith(";base64"):
    raise ValueError("a data: URI has to be base64, as data:image/png;base64,iVBOR...")
  return io.BytesIO(base64.b64decode(body, validate=True))
