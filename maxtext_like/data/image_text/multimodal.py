"""Turns records of text and images into tokens, and rows of them into the decoder's image inputs.

Each placeholder in a text is replaced by the frame and the tokens of an image, in the order of the images. Gemma 3: two
newlines, begin-of-image, image tokens, end-of-image, two newlines. Gemma 4: the same without newlines.

B rows, M places for images in a row, T positions.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np

from maxtext_like.config.vision import VisionConfig
from maxtext_like.data.documents import BadRecordError, Record
from maxtext_like.data.image_text.image_names import shown
from maxtext_like.data.image_text.images import (
  BadImageError,
  MeasuredImage,
  TowerImage,
  load_image,
  measure_image,
  require_pillow,
  tower_arrays,
)
from maxtext_like.data.pack import ImageSpan, Row
from maxtext_like.errors import UserError
from maxtext_like.targets import IGNORED


def load_for(path: str, vision: VisionConfig, place: str) -> TowerImage:
  """Reads an image file of the record at ``place``. Raises BadRecordError."""
  try:
    return load_image(path, vision)
  except BadImageError as error:
    raise BadRecordError(place, f"image {shown(path)}: {error}") from None


def _measure_for(path: str, vision: VisionConfig, place: str) -> MeasuredImage:
  """Reads only the header of an image file of the record at ``place``. Raises BadRecordError."""
  try:
    return measure_image(path, vision)
  except BadImageError as error:
    raise BadRecordError(place, f"image {shown(path)}: {error}") from None


def interleave(
  parts: Sequence[str], images: Sequence[TowerImage | MeasuredImage], vision: VisionConfig, encode: Callable[[str], list[int]]
) -> tuple[list[int], tuple[ImageSpan, ...]]:
  """Encodes texts with images between them.

  Args:
    parts: texts, one more than there are images.
    images: images in the order of the text.
    vision: the vision tower, and the tokens that frame an image.
    encode: encodes a text.

  Returns:
    The token ids, and the spans of the images in them.
  """
  assert vision.boi_token_id is not None  # VisionConfig checks this
  assert vision.image_token_id is not None
  assert vision.eoi_token_id is not None
  frame, ids, spans = vision.frame, [], []
  for i, part in enumerate(parts):
    ids += encode((frame if i else "") + part + (frame if i < len(images) else ""))
    if i < len(images):
      span = [vision.boi_token_id, *[vision.image_token_id] * images[i].tokens, vision.eoi_token_id]
      spans.append(ImageSpan(len(ids), len(ids) + len(span), images[i]))
      ids += span
  return ids, tuple(spans)


@dataclass(frozen=True)
class Multimodal:
  """How images enter the rows of a run.

  Attributes:
    vision: the ``vision:`` section, with ``use_multimodal``.
    encode_text: encodes a text; None for a source of tokens without images.
    own_rows: rows of a batch whose pixels this process needs; None for all. Images are then decoded when their batch is made,
      and the pixels of all other rows are 0.
  """

  vision: VisionConfig
  encode_text: Callable[[str], list[int]] | None
  own_rows: Container[int] | None = None

  def __post_init__(self):
    require_pillow()

  def check_length(self, length: int) -> None:
    """Raises UserError if a row of ``length`` tokens cannot hold one image."""
    most = self.vision.vision_output_length
    if most + 2 > length:
      raise UserError(
        f"max_target_length = {length} has no room for an image: vision_output_length = {most} tokens and 2 around them\n"
        f"  fix: max_target_length={most + 2} or more"
      )

  def encode(self, record: Record, place: str) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Encodes a record, without bos and eos.

    Returns:
      The token ids, and the spans of the images in them.

    Raises:
      BadRecordError: the numbers of placeholders and images differ; an image cannot be used; the text encodes to the image
        token.
    """
    v = self.vision
    assert self.encode_text is not None
    assert v.image_token_id is not None  # VisionConfig checks this
    parts = self.parts(record, place)
    ids, spans = interleave(parts, [self.read_image(path, place) for path in record.images], v, self.encode_text)
    if ids.count(v.image_token_id) != sum(span.image.tokens for span in spans):
      raise self.image_token_in_text(place)
    return ids, spans

  def read_image(self, path: str, place: str) -> TowerImage | MeasuredImage:
    """Reads an image file of the record at ``place``; only its header if not all rows are needed. Raises BadRecordError."""
    return (load_for if self.own_rows is None else _measure_for)(path, self.vision, place)

  def parts(self, record: Record, place: str) -> list[str]:
    """Returns the texts between the images of a record. If there are no images, a placeholder is text.

    Raises:
      BadRecordError: the numbers of placeholders and images differ.
    """
    parts = record.text.split(self.vision.image_placeholder) if record.images else [record.text]
    if len(parts) - 1 != len(record.images):
      raise BadRecordError(
        place,
        f"the text has {len(parts) - 1} '{self.vision.image_placeholder}', but the record has {len(record.images)} images",
      )
    return parts

  def image_token_in_text(self, place: str) -> BadRecordError:
    """Returns the error for a text that encodes to the image token."""
    token = self.vision.image_token_id
    return BadRecordError(place, f"the text contains the token {token}, which stands for images (image_token_id)")

  def mask_targets(self, row: Row) -> None:
    """Removes the loss at positions whose target is an image token."""
    row.targets[row.targets == self.vision.image_token_id] = IGNORED

  def batch(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Returns the image inputs of a batch. The shapes are static, so they do not depend on the number of images.

    Returns:
      "token_types" int32 [B, T], 1 at image tokens; "pixel_values" [B, M, ...] and, for Gemma 4, "image_position_ids"
      [B, M, P, 2]: the images of each row in order, then empty places.

    Raises:
      UserError: an image whose header was read cannot be decoded.
    """
    places = self.vision.max_images_per_row
    images = [self._unpacked(row) if self.own_rows is None or i in self.own_rows else [] for i, row in enumerate(rows)]
    slots = [[*found, *[None] * (places - len(found))] for found in images]
    arrays = tower_arrays([image for row in slots for image in row], self.vision)
    made = {name: array.reshape(len(rows), places, *array.shape[1:]) for name, array in arrays.items()}
    tokens = np.stack([row.tokens for row in rows])
    return {"token_types": (tokens == self.vision.image_token_id).astype(np.int32)} | made

  def _unpacked(self, row: Row) -> list[TowerImage]:
    try:
      return [load_for(str(i.path), self.vision, "images") if isinstance(i, MeasuredImage) else i for i in row.images]
    except BadRecordError as bad:
      raise UserError(
        f"{bad.reason}: the header is valid, but the image cannot be decoded\n  fix: repair the file, or remove its record"
      ) from None

  def identity(self) -> dict[str, object]:
    """Returns everything about images that the rows depend on, for the state of the data."""
    v = self.vision
    keys = ("image_size_for_vit", "patch_size_for_vit", "pooling_size_for_vit", "vision_output_length", "image_token_id")
    keys += ("boi_token_id", "eoi_token_id", "image_placeholder", "images_field", "max_images_per_row")
    return {key: getattr(v, key) for key in keys if hasattr(v, key)}
