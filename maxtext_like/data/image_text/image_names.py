"""How records name images: a file, or the image itself, as a ``data:`` URI in base64 or as bytes. Nothing is fetched."""

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

USUAL_FIELD = "images"  # where ``images_field`` is this,
SINGULAR_FIELD = "image"  # a record without it may have this, as LLaVA's have
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_SHOWN = 40  # characters of a URI
_MEANS_IMAGES = re.compile(r"(images?|imgs?|pics?|pictures?|photos?)([_-].*)?", re.IGNORECASE)
_FILE = re.compile(r"[^\n]{1,1000}\.(png|jpe?g|webp|gif|bmp|tiff?|avif|heic)([?#][^\n]*)?", re.IGNORECASE)


@dataclass(frozen=True)
class ImageFields:
  """What records call their images.

  Attributes:
    field: the one that lists them (``images_field``).
    placeholder: stands for an image in a text.
  """

  field: str = USUAL_FIELD
  placeholder: str = "<image>"

  def listed(self, record: Mapping[str, Any], *, singular: bool = True) -> tuple[str, list[Any]]:
    """The field that lists images, and what it lists, one image or a list of them; nothing: ``""``, ``[]``, null.

    Without ``singular`` "image" is not read in place of "images".
    """
    names = (USUAL_FIELD, SINGULAR_FIELD) if singular and self.field == USUAL_FIELD else (self.field,)
    name = next((name for name in names if record.get(name) is not None), self.field)
    given = record.get(name)
    if given is None or given == "":
      return name, []
    return name, list(given) if isinstance(given, list | tuple) else [given]

  def unread(self, record: Mapping[str, Any], read: Container[str]) -> str | None:
    """The first field, of those that nobody reads, that has images to all appearances; None: there is none."""
    return next((name for name, value in record.items() if name not in read and _has_images(name, value)), None)

  def unread_reason(self, shown: str, name: str) -> str:
    """Why a record is bad that has a placeholder and no image but one in a field that nobody reads.

    `shown`: the field; `name`: as of ``remedy``.
    """
    what = f"'{printable(shown)}' looks like images ({self.remedy(name)})"
    return f"the text has '{self.placeholder}' and no image is read, but {what}"

  def remedy(self, name: str) -> str:
    """How images are read that nobody reads; `name`: of the record's field that has them; "": they are a message's."""
    if not name:
      return f"list them in the record's own field '{self.field}'"
    return f"images_field={printable(name)} reads it, for a model that takes images"


def _has_images(name: str, value: object) -> bool:
  """By the field's name where it holds a text, else by what it holds: a file's name, a ``data:`` URI, bytes."""
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
  """Whether a field is called as if it had images."""
  return _MEANS_IMAGES.fullmatch(name) is not None


def located(given: object, folder: str) -> str:
  """What an image is opened by: an absolute path, or the image itself as a ``data:`` URI.

  Args:
    given: in a record: a file's name, where a relative path lies in the folder or below it; a ``data:`` URI; bytes; an object
      with "bytes", or where they are null with "path" (or "url"), as Hugging Face's ``Image`` is stored.
    folder: absolute, of the record's file.

  Raises:
    ValueError: it is no image; its message is the reason.
  """
  if isinstance(given, Mapping):
    inside = given.get("bytes")
    if inside is not None and not isinstance(inside, bytes):
      raise ValueError(f"an image's bytes are {type(inside).__name__}, expected bytes (of base64 a data: URI)")
    given = inside if inside is not None else given.get("path") or given.get("url")
    if given is None:
      raise ValueError("an image has neither bytes nor a path")
  if isinstance(given, bytes):
    check_size([len(given) * 4 // 3])
    return f"data:application/octet-stream;base64,{base64.b64encode(given).decode('ascii')}"
  if not isinstance(given, str) or not given:
    raise ValueError("expected an image: the name of a file, a data: URI, or an object with bytes or a path")
  if scheme := _SCHEME.match(given):
    if scheme[1].lower() == "data":
      return given
    raise ValueError(f"an image has to be a file or a data: URI, found {scheme[1]}:... (nothing is fetched)")
  joined = os.path.normpath(os.path.join(folder, given))
  if not os.path.isabs(given) and os.path.commonpath([folder, joined]) != folder:
    raise ValueError(f"image '{given}' leads out of the folder of the file; give its absolute path")
  return joined


def check_size(sizes: Iterable[int]) -> None:
  """ValueError when images of so many characters of base64 are more than a record may have, whatever file it is of."""
  if (size := sum(sizes)) > MAX_RECORD_BYTES:
    raise ValueError(f"the images inside it have {size} bytes in base64, more than the limit of {MAX_RECORD_BYTES}")


def check_all(names: Iterable[str]) -> None:
  """``check_size`` of the images of a record, as ``located`` gives them."""
  check_size(len(name) for name in names if is_data(name))


def is_data(name: str | Path) -> bool:
  """Whether a name is the image itself."""
  return isinstance(name, str) and name[:5].lower() == "data:"


def shown(name: str | Path) -> str:
  """A name for messages, in one line whatever it holds."""
  text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(name))
  return f"{text[:_SHOWN]}... ({len(text):,} characters)" if is_data(name) else text


def open_image(name: str | Path) -> BinaryIO:
  """The bytes of an image. OSError of a file; ValueError: a ``data:`` URI that is not base64."""
  if not is_data(name):
    return io.BufferedReader(open_regular(name))
  head, comma, body = str(name).partition(",")
  if not comma or not head.lower().endswith(";base64"):
    raise ValueError("a data: URI has to be base64, as data:image/png;base64,iVBOR...")
  return io.BytesIO(base64.b64decode(body, validate=True))
