"""Records of text and images to tokens, and rows of them to the decoder's image inputs.

A record's placeholders become, in the order of its images, what each family frames an image in:
Gemma 3: two newlines, begin-of-image, image tokens, end-of-image, two newlines; Gemma 4: the same without newlines.

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
  TowerImage,
  UnreadImage,
  load_image,
  measure_image,
  require_pillow,
  tower_arrays,
)
from maxtext_like.data.pack import ImageSpan, Row
from maxtext_like.errors import UserError
from maxtext_like.targets import IGNORED


def load_for(path: str, vision: VisionConfig, place: str) -> TowerImage:
  """An image file that the record at ``place`` names. Raises BadRecordError."""
  try:
    return load_image(path, vision)
  except BadImageError as error:
    raise BadRecordError(place, f"image {shown(path)}: {error}") from None


def _measure_for(path: str, vision: VisionConfig, place: str) -> UnreadImage:
  """As ``load_for``, of the header alone."""
  try:
    return measure_image(path, vision)
  except BadImageError as error:
    raise BadRecordError(place, f"image {shown(path)}: {error}") from None


def interleave(
  parts: Sequence[str], images: Sequence[TowerImage | UnreadImage], vision: VisionConfig, encode: Callable[[str], list[int]]
) -> tuple[list[int], tuple[ImageSpan, ...]]:
  """Token ids of texts with images between them, each in its family's frame, and where the images stand.

  Args:
    parts: one more than there are images.
    images: in the order of the text.
    vision: the tower, and the tokens around an image.
    encode: of text.
  """
  assert vision.boi_token_id is not None  # VisionConfig has seen to it
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
    encode_text: ids of a text; None for a source of tokens without images.
    own_rows: rows of a batch whose pixels are wanted here; None: of all. Then only these images are unpacked, when their batch
      is made, and the pixels of all others are 0.
  """

  vision: VisionConfig
  encode_text: Callable[[str], list[int]] | None
  own_rows: Container[int] | None = None

  def __post_init__(self):
    require_pillow()

  def check_length(self, length: int) -> None:
    """UserError when a row of ``length`` tokens has no room for one image."""
    most = self.vision.vision_output_length
    if most + 2 > length:
      raise UserError(
        f"max_target_length = {length} has no room for an image: vision_output_length = {most} tokens and 2 around them\n"
        f"  fix: max_target_length={most + 2} or more"
      )

  def encode(self, record: Record, place: str) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Token ids of a record without bos and eos, and where its images stand in them.

    Raises:
      BadRecordError: placeholders and images differ in number, an image that cannot be used, or text that gives the
        image token.
    """
    v = self.vision
    assert self.encode_text is not None
    assert v.image_token_id is not None  # VisionConfig has seen to it
    parts = self.parts(record, place)
    ids, spans = interleave(parts, [self.look_at(path, place) for path in record.images], v, self.encode_text)
    if ids.count(v.image_token_id) != sum(span.image.tokens for span in spans):
      raise self.image_token_in_text(place)
    return ids, spans

  def look_at(self, path: str, place: str) -> TowerImage | UnreadImage:
    """An image file that the record at ``place`` names, unpacked where every row is wanted. Raises BadRecordError."""
    return (load_for if self.own_rows is None else _measure_for)(path, self.vision, place)

  def parts(self, record: Record, place: str) -> list[str]:
    """The text between the images of a record; without any, the placeholder is text.

    Raises:
      BadRecordError: placeholders and images differ in number.
    """
    parts = record.text.split(self.vision.image_placeholder) if record.images else [record.text]
    if len(parts) - 1 != len(record.images):
      raise BadRecordError(
        place,
        f"the text has {len(parts) - 1} '{self.vision.image_placeholder}' for the {len(record.images)} images of the record",
      )
    return parts

  def image_token_in_text(self, place: str) -> BadRecordError:
    """Says that a text gives the token that stands for images."""
    token = self.vision.image_token_id
    return BadRecordError(place, f"the text gives the token {token}, which stands for images (image_token_id)")

  def mask_targets(self, row: Row) -> None:
    """No loss where an image token would be predicted."""
    row.targets[row.targets == self.vision.image_token_id] = IGNORED

  def batch(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The image inputs of a batch: static shapes, whether there are images or not.

    Returns:
      "token_types" int32 [B, T], 1 at image tokens; "pixel_values" [B, M, ...] and, with Gemma 4, "image_position_ids"
      [B, M, P, 2]: the images of each row in order, then empty places.

    Raises:
      UserError: an image that was only measured cannot be used.
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
      return [load_for(str(i.path), self.vision, "images") if isinstance(i, UnreadImage) else i for i in row.images]
    except BadRecordError as bad:
      raise UserError(
        f"{bad.reason}: its header is that of an image\n  fix: repair the file, or leave its record out"
      ) from None

  def identity(self) -> dict[str, object]:
    """What the rows depend on, for the state of the data."""
    v = self.vision
    keys = ("image_size_for_vit", "patch_size_for_vit", "pooling_size_for_vit", "vision_output_length", "image_token_id")
    keys += ("boi_token_id", "eoi_token_id", "image_placeholder", "images_field", "max_images_per_row")
    return {key: getattr(v, key) for key in keys if hasattr(v, key)}
