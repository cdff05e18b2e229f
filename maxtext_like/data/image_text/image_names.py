"""Images as records name them: a path, or the image itself as a base64 ``data:`` URI or as bytes. No URL is fetched."""

import base64
import io
import os
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from maxtext_like.data.documents import MAX_RECORD_BYTES
from maxtext_like.data.readers.input_files import open_regular
from maxtext_like.strict_json import printable

USUAL_FIELD = "images"  # default of ``images_field``
SINGULAR_FIELD = "image"  # read from records that have no "images", such as LLaVA's
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_SHOWN = 40  # characters of a URI in a message
_MEANS_IMAGES = re.compile(r"(images?|imgs?|pics?|pictures?|photos?)([_-].*)?", re.IGNORECASE)
_FILE = re.compile(r"[^\n]{1,1000}\.(png|jpe?g|webp|gif|bmp|tiff?|avif|heic)([?#][^\n]*)?", re.IGNORECASE)


@dataclass(frozen=True)
class ImageFields:
  """The names of the fields and placeholders of images in records.

  Attributes:
    field: field that lists the images (``images_field``).
    placeholder: string in a text that stands for an image.
  """

  field: str = USUAL_FIELD
  placeholder: str = "<image>"

  def listed(self, record: Mapping[str, Any], *, singular: bool = True) -> tuple[str, list[Any]]:
    """Returns the name of the field that lists the images, and its images as a list; empty for ``""``, ``[]`` and null.

    Args:
      record: the record.
      singular: read "image" if there is no "images".
    """
    names = (USUAL_FIELD, SINGULAR_FIELD) if singular and self.field == USUAL_FIELD else (self.field,)
    name = next((name for name in names if record.get(name) is not None), self.field)
    given = record.get(name)
    if given is None or given == "":
      return name, []
    return name, list(given) if isinstance(given, list | tuple) else [given]

  def unread(self, record: Mapping[str, Any], read: Container[str]) -> str | None:
    """Returns the first field that is not read but appears to have images; None if there is no such field."""
    return next((name for name, value in record.items() if name not in read and _has_images(name, value)), None)

  def unread_reason(self, shown: str, name: str) -> str:
    """Returns the reason why a record is bad: it has a placeholder, but its images are in a field that is not read.

    Args:
      shown: the field as the message names it.
      name: as in ``remedy``.
    """
    what = f"'{printable(shown)}' looks like images ({self.remedy(name)})"
    return f"the text has '{self.placeholder}' and no image is read, but {what}"

  def remedy(self, name: str) -> str:
    """Returns what to do so that images in an unread field are read.

    Args:
      name: field of the record that has the images; "" if they are in a field of a message.
    """
    if not name:
      return f"list them in the record's own field '{self.field}'"
    return f"images_field={printable(name)} reads it, for a model that takes images"


def _has_images(name: str, value: object) -> bool:
  """Returns True if a value appears to be an image: a file name, a ``data:`` URI or bytes, or any text if the field's name
  means images."""
  if isinstance(value, Mapping):
    return any(_has_images(name, value.get(key)) for key in ("bytes", "path", "url"))
  if isinstance(value, list | tuple):
    return bool(value) and all(_has_images(name, item) for item in value)
  if isinstance(value, bytes):
    return bool(value)
  if not isinstance(value, str) or not value:
    return False
  return bool(_MEANS_IMAGES.fullmatch(name) or value[:11].lower() == "data:image/" or _FILE.fullmatch(value))


def means_images(name: str) -> bool:
  """Returns True if the name of a field means images."""
  return _MEANS_IMAGES.fullmatch(name) is not None


def resolve_image(given: object, folder: str) -> str:
  """Returns the name by which an image is opened: an absolute path, or the image itself as a ``data:`` URI.

  Args:
    given: the image in the record: a path (a relative one must be in the folder or below it), a ``data:`` URI, bytes, or an
      object as Hugging Face's ``Image`` stores it, with "bytes", or with "path" or "url" if the bytes are null.
    folder: absolute path of the folder of the record's file.

  Raises:
    ValueError: it is not an image; the message is the reason.
  """
  if isinstance(given, Mapping):
    inside = given.get("bytes")
    if inside is not None and not isinstance(inside, bytes):
      raise ValueError(f"an image's bytes are {type(inside).__name__}, expected bytes (write base64 as a data: URI)")
    given = inside if inside is not None else given.get("path") or given.get("url")
    if given is None:
      raise ValueError("an image has no bytes and no path")
  if isinstance(given, bytes):
    check_size([len(given) * 4 // 3])
    return f"data:application/octet-stream;base64,{base64.b64encode(given).decode('ascii')}"
  if not isinstance(given, str) or not given:
    raise ValueError("expected an image: the name of a file, a data: URI, or an object with bytes or a path")
  if scheme := _SCHEME.match(given):
    if scheme[1].lower() == "data":
      return given
    raise ValueError(f"an image must be a file or a data: URI, found {scheme[1]}:... (URLs are not fetched)")
  joined = os.path.normpath(os.path.join(folder, given))
  if not os.path.isabs(given) and os.path.commonpath([folder, joined]) != folder:
    raise ValueError(f"image '{given}' is outside the folder of the record's file; use its absolute path")
  return joined


def check_size(sizes: Iterable[int]) -> None:
  """Raises ValueError if the base64 images of a record are longer than a record may be, in any kind of file."""
  if (size := sum(sizes)) > MAX_RECORD_BYTES:
    raise ValueError(f"the images inside it have {size} bytes in base64, more than the limit of {MAX_RECORD_BYTES}")


def check_all(names: Iterable[str]) -> None:
  """Applies ``check_size`` to the images of a record, as ``resolve_image`` returns them."""
  check_size(len(name) for name in names if is_data(name))


def is_data(name: str | Path) -> bool:
  """Returns True if a name is the image itself, as a ``data:`` URI."""
  return isinstance(name, str) and name[:5].lower() == "data:"


def shown(name: str | Path) -> str:
  """Returns a name for messages, in one line of printable characters."""
  text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(name))
  return f"{text[:_SHOWN]}... ({len(text):,} characters)" if is_data(name) else text


def open_image(name: str | Path) -> BinaryIO:
  """Opens an image for reading. Raises OSError for a file, and ValueError for a ``data:`` URI that is not base64."""
  if not is_data(name):
    return io.BufferedReader(open_regular(name))
  head, comma, body = str(name).partition(",")
  if not comma or not head.lower().endswith(";base64"):
    raise ValueError("a data: URI must be base64, as in data:image/png;base64,iVBOR...")
  return io.BytesIO(base64.b64decode(body, validate=True))
