"""Records of text with images, for every kind of file whose records have fields."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from maxtext_like.config.vision import VisionConfig
from maxtext_like.data.documents import (
  MAX_RECORD_BYTES,
  BadRecordError,
  Record,
  check_text,
  fix_of_missing_field,
  list_names,
  text_fields,
)
from maxtext_like.data.image_text.image_names import ImageFields, check_all, means_images, resolve_image
from maxtext_like.data.sources import DataConfig

logger = logging.getLogger(__name__)


class Captions:
  """Finds the images of records. If the model takes no images, they are left out with one warning."""

  def __init__(self, text_field: str, fields: ImageFields, *, take: bool):
    """Sets up the fields; ``take`` is True if the model takes images (``use_multimodal``)."""
    self.take = take
    self._text_field, self._fields, self._warned = text_field, fields, False

  @classmethod
  def of(cls, data: DataConfig, vision: VisionConfig | None) -> "Captions | None":
    """Returns the captions of a configuration; None without a model that could take images, or for conversations."""
    if vision is None or data.data_format == "chat":
      return None
    return cls(data.text_field, ImageFields(vision.images_field, vision.image_placeholder), take=vision.use_multimodal)

  def images(self, record: Mapping[str, Any], text: str, place: str, folder: str) -> tuple[str, ...]:
    """Returns the images of a record, in the form of ``image_names.resolve_image``.

    Raises:
      BadRecordError: a listed value is not an image; or the text has a placeholder, but the images are in a field that is not
        read.
    """
    name, given = self._fields.listed(record)
    waits = not given and self._fields.placeholder in text
    other = self._fields.unread(record, (self._text_field, self._fields.field)) if waits else None
    if not self.take:
      if given or other:
        self.warn_left_out(name if given else str(other), place)
      return ()
    if other:
      raise BadRecordError(place, self._fields.unread_reason(other, other))
    try:
      images = tuple(resolve_image(image, folder) for image in given)
      check_all(images)
    except ValueError as error:
      raise BadRecordError(place, f"{name}: {error}") from None
    return images

  def warn_left_out(self, name: str, place: str) -> None:
    """Logs once that the images of a field are left out."""
    if not self._warned:
      self._warned = True
      logger.warning("%s: images (field '%s') are left out and only the text is used; use_multimodal=true uses them",
                     place, name)  # fmt: skip

  def column(self, columns: Iterable[tuple[str, str]]) -> str | None:
    """Returns the first column of a table whose name means images, or that has images as ``datasets`` stores them; or None.

    Args:
      columns: name and type of each column, as Arrow writes them.
    """
    for name, kind in columns:
      if name == self._text_field or not ("string" in kind or "binary" in kind):
        continue
      if name == self._fields.field or means_images(name) or "struct<bytes: " in kind:
        return name
    return None

  def __call__(self, record: object, place: str, folder: str) -> Record:
    """Returns the record of an object, such as a row of a table. Raises BadRecordError."""
    field = self._text_field
    if not isinstance(record, Mapping) or field not in record:
      fields = list(record) if isinstance(record, Mapping) else []
      fix = fix_of_missing_field(fields, text_fields(record) if isinstance(record, Mapping) else [])
      raise BadRecordError(place, f"no field '{field}' (data.text_field); fields: {list_names(fields)}", fix)
    if record[field] is None:
      raise BadRecordError(place, f"field '{field}' is null")
    text = check_text(record[field], place, field)
    if len(text) > MAX_RECORD_BYTES:
      raise BadRecordError(place, f"the value has {len(text)} characters, more than the limit of {MAX_RECORD_BYTES}")
    return Record(text, images=self.images(record, text, place, folder))
