"""Checks the image arrays of an .npz file, in the format of Hugging Face's processors, against the vision tower.

I images, P patches of one image, T position.
"""

from collections.abc import Mapping

import numpy as np

from maxtext_like.config.vision import PatchVision, SquareVision, VisionConfig
from maxtext_like.errors import UserError

IMAGE_INPUTS = ("pixel_values", "image_position_ids")
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


def has_images(arrays: Mapping[str, np.ndarray]) -> bool:
  """Returns True if the arrays contain images."""
  return "pixel_values" in arrays


def image_batch(
  arrays: Mapping[str, np.ndarray], tokens: np.ndarray, where: str, vision: VisionConfig | None
) -> dict[str, np.ndarray]:
  """Returns the image inputs of the decoder: float32 "pixel_values", int32 "image_position_ids" and "token_types".

  Args:
    arrays: arrays of the file.
    tokens: [B, T].
    where: name of the file in errors.
    vision: the ``vision:`` section of the model; None if it has none.

  Returns:
    The arrays by name; empty without images.

  Raises:
    UserError: arrays do not fit the tower or the tokens, or the model has no tower for the images or image tokens.
  """
  types = _token_types(arrays, tokens.shape, where)
  on = vision is not None and vision.use_multimodal
  if not has_images(arrays):
    if "image_position_ids" in arrays:
      raise UserError(f"{where}: image_position_ids without pixel_values")
    if types is not None and types.any():
      raise UserError(f"{where}: mm_token_type_ids or token_type_ids marks image tokens, but pixel_values is missing")
    return {}
  if vision is None or not on:
    why = "use_multimodal is false" if vision and vision.hidden_size_for_vit else "its config.json has no vision_config"
    raise UserError(f"{where}: pixel_values: the model has no vision tower ({why})")
  batch = {"pixel_values": _pixels(arrays["pixel_values"], where, vision)}
  if isinstance(vision, SquareVision):
    if "image_position_ids" in arrays:
      raise UserError(f"{where}: image_position_ids: not used by Gemma 3, whose images all have one size\n  fix: remove it")
    features = len(batch["pixel_values"]) * vision.vision_output_length
  else:
    assert isinstance(vision, PatchVision), "the two kinds of towers"
    batch["image_position_ids"] = _positions(arrays, where, vision, batch["pixel_values"].shape[:2])
    features = _pooled_tokens(batch["image_position_ids"], vision.pooling_size_for_vit)
  placed = int((tokens == vision.image_token_id).sum())
  if placed != features:
    raise UserError(
      f"{where}: input_ids has {placed} image tokens (id {vision.image_token_id}), but pixel_values gives {features}"
    )
  if types is not None:
    batch["token_types"] = types.astype(np.int32)
  return batch


def _token_types(arrays: Mapping[str, np.ndarray], shape: tuple[int, ...], where: str) -> np.ndarray | None:
  given = [name for name in TOKEN_TYPES if name in arrays]
  if not given:
    return None
  if len(given) == 2:
    raise UserError(f"{where}: both {given[0]} and {given[1]} are present\n  fix: remove one of them")
  types = arrays[given[0]]
  if types.dtype.kind not in "iu" or types.shape != shape:
    raise UserError(f"{where}: {given[0]}: {types.dtype} {list(types.shape)}, expected integers {list(shape)}")
  if types.size and (types.min() < 0 or types.max() > 3):
    raise UserError(f"{where}: {given[0]}: out of range, expected 0 (text), 1 (image), 2 (video) or 3 (audio)")
  return types


def _pixels(pixels: np.ndarray, where: str, vision: VisionConfig) -> np.ndarray:
  if pixels.dtype.kind != "f":
    raise UserError(f"{where}: pixel_values: dtype {pixels.dtype}, expected floating point, as the processor returns")
  if isinstance(vision, SquareVision):
    side = vision.image_size_for_vit
    fits, expected = pixels.ndim == 4 and pixels.shape[1:] == (3, side, side), f"[images, 3, {side}, {side}]"
  else:
    assert isinstance(vision, PatchVision), "the two kinds of towers"
    size, squares = 3 * vision.patch_size_for_vit**2, vision.pooling_size_for_vit**2
    fits = pixels.ndim == 3 and pixels.shape[2] == size and pixels.shape[1] > 0 and pixels.shape[1] % squares == 0
    expected = f"[images, patches, {size}] with patches a multiple of {squares}"
  if not fits or not len(pixels):
    raise UserError(f"{where}: pixel_values: shape {list(pixels.shape)}, expected {expected}")
  if not np.isfinite(pixels).all():
    raise UserError(f"{where}: pixel_values: not finite")
  return np.ascontiguousarray(pixels, np.float32)


def _positions(arrays: Mapping[str, np.ndarray], where: str, vision: PatchVision, shape: tuple[int, ...]) -> np.ndarray:
  if "image_position_ids" not in arrays:
    raise UserError(f"{where}: pixel_values without image_position_ids, which Gemma 4's tower needs")
  positions, rows = arrays["image_position_ids"], vision.num_position_embeddings_for_vit
  if positions.dtype.kind not in "iu" or positions.shape != (*shape, 2):
    found = f"{positions.dtype} {list(positions.shape)}"
    raise UserError(f"{where}: image_position_ids: {found}, expected integers {[*shape, 2]}: (column, row) of every patch")
  if positions.min() < -1 or positions.max() >= rows or ((positions < 0).any(-1) != (positions < 0).all(-1)).any():
    raise UserError(f"{where}: image_position_ids: out of range, expected 0 to {rows - 1}, or (-1, -1) for padding")
  return np.ascontiguousarray(positions, np.int32)


def _pooled_tokens(positions: np.ndarray, pooling: int) -> int:
  """Returns the number of image tokens of all images: squares of pooling x pooling patches that contain a patch."""
  return sum(len(np.unique(image[image[:, 0] >= 0] // pooling, axis=0)) for image in positions)
