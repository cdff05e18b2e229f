"""Reads the inputs of ``forward`` from an .npz file in Hugging Face's format and turns them into a batch for a decoder.

Image arrays have the format of Hugging Face's processors and are checked against the vision tower.

B batch, T position, I images, P patches of one image.
"""

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxtext_like.config.vision import PatchVision, SquareVision, VisionConfig
from maxtext_like.errors import UserError
from maxtext_like.layers.embedding import Lookup
from maxtext_like.strict_json import printable
from maxtext_like.targets import IGNORED

IMAGE_INPUTS = ("pixel_values", "image_position_ids")
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
TEXT_INPUTS = ("input_ids", "labels", "attention_mask", "position_ids", "segment_ids")
_SIZE_LIMIT = 8 << 30  # maximum bytes of all unpacked arrays


@dataclass(frozen=True)
class Inputs:
  """A checked batch.

  Attributes:
    batch: int32 [B, T] arrays "tokens", "positions", "segments" and, with labels, "targets" (shifted); with images also those
      of ``image_batch``.
    unused: names in the file that ``forward`` does not use.
  """

  batch: dict[str, np.ndarray]
  unused: tuple[str, ...]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
  """Reads the arrays of an .npz file. Object arrays are refused, because reading them would unpickle.

  Raises:
    UserError: the file is not a readable .npz file of plain arrays, or it unpacks to more than 8 GiB.
  """
  where = printable(path)
  try:
    with zipfile.ZipFile(path) as archive:
      size = sum(member.file_size for member in archive.infolist())
    if size > _SIZE_LIMIT:
      raise UserError(f"{where}: unpacks to {size} bytes, more than the limit of {_SIZE_LIMIT}", fix="save fewer rows per file")
    with np.load(path, allow_pickle=False) as file:
      return {name: file[name] for name in file.files}
  except OSError as error:
    raise UserError(
      f"{where}: cannot be read: {error.strerror or error}", fix="name an .npz file that exists and can be read"
    ) from None
  except (zipfile.BadZipFile, ValueError, EOFError, KeyError, NotImplementedError, zlib.error) as error:
    reason = "contains Python objects, which are pickles; pickle can run code" if "allow_pickle" in str(error) else error
    raise UserError(
      f"{where}: is not an .npz file of plain arrays: {printable(reason)}",
      fix="write the file with np.savez(FILE, input_ids=...), with arrays of numbers only",
    ) from None


def make_batch(
  arrays: Mapping[str, np.ndarray],
  where: str,
  *,
  vocab_size: int,
  lookup: Lookup | None = None,
  vision: VisionConfig | None = None,
) -> Inputs:
  """Checks inputs and builds a batch. Every array has the meaning of Hugging Face (tests/golden, README).

  Positions count from 0 unless given. With ``segment_ids`` alone they restart in every segment. Without mask and segments, a
  jump in the given positions begins a new segment, as transformers infers packed documents. The target of a token is the next
  label; there is no target across given segments or at padding.

  Args:
    arrays: as ``read_arrays`` returns them.
    where: name of the file in messages.
    vocab_size: number of tokens of the model; labels must be below it.
    lookup: embedding lookup of the decoder, which must have a row for every token; None requires tokens below ``vocab_size``.
    vision: the model's vision tower, if it has one; images without a tower are an error.

  Raises:
    UserError: an array is missing, or has a wrong type, shape or range; the message names it.
  """
  check = _Check(arrays, where)
  if "input_ids" not in arrays:
    found = ", ".join(printable(name) for name in arrays) or "nothing"
    raise UserError(
      f"{where}: input_ids is missing; found {found}", fix="save the token ids under this name: np.savez(FILE, input_ids=...)"
    )
  tokens = check.integers("input_ids", 0, None)
  if tokens.ndim != 2 or 0 in tokens.shape:
    raise UserError(
      f"{where}: input_ids: shape {list(tokens.shape)}, expected [rows, positions] with at least one of each",
      fix="save a two-dimensional array: input_ids[None] for one row",
    )
  images = image_batch(arrays, tokens, where, vision)
  # Image tokens are replaced by image features and never looked up, so their ids may be outside the table.
  placed = tokens == vision.image_token_id if images and vision else np.zeros(tokens.shape, bool)
  lookup = lookup or Lookup(vocab_size=vocab_size)
  # Every other token must have a row in the embedding.
  outside = lookup.missing(tokens) & ~placed
  if outside.any():
    row, column = np.argwhere(outside)[0]
    token = int(tokens[row, column])
    raise UserError(
      f"{where}: input_ids[{row}, {column}] = {token}: {lookup.why_missing(token)}",
      fix="tokenize the text with this model's tokenizer",
    )
  # Segments and positions, given or derived from each other.
  B, T = tokens.shape
  mask = check.optional("attention_mask", (B, T), 0, 1)
  positions = check.optional("position_ids", (B, T), 0, 2**31 - 1, one_row=True)
  segment_ids = check.optional("segment_ids", (B, T), 0, 2**31 - 1)
  if segment_ids is not None:
    segments = segment_ids if mask is None else segment_ids * mask
  elif mask is not None:
    segments = mask
  elif positions is not None:
    segments = 1 + np.cumsum(np.diff(positions, axis=1, prepend=positions[:, :1] - 1) != 1, axis=1)
  else:
    segments = np.ones((B, T), np.int64)
  if positions is None:
    positions = _restarting(segment_ids) if segment_ids is not None else np.broadcast_to(np.arange(T), (B, T))
  batch = {"tokens": tokens, "positions": positions, "segments": segments}
  # Targets: labels shifted by one position.
  labels = check.optional("labels", (B, T), IGNORED, vocab_size - 1)
  if labels is not None:
    if ((labels < 0) & (labels != IGNORED)).any():
      raise UserError(
        f"{where}: labels: negative values other than {IGNORED}, which marks positions without a target",
        fix=f"write {IGNORED} at these positions",
      )
    targets = np.full((B, T), IGNORED, np.int64)
    targets[:, :-1] = labels[:, 1:]
    if segment_ids is not None:
      targets[:, :-1][segments[:, 1:] != segments[:, :-1]] = IGNORED
    elif mask is not None:
      targets[:, :-1][(segments[:, 1:] == 0) | (segments[:, :-1] == 0)] = IGNORED
    batch["targets"] = targets
  unused = sorted(set(arrays) - {*TEXT_INPUTS, *TOKEN_TYPES, *IMAGE_INPUTS})
  integers = {name: np.ascontiguousarray(array, np.int32) for name, array in batch.items()}
  return Inputs(integers | images, tuple(unused))


def _restarting(segments: np.ndarray) -> np.ndarray:
  """Returns positions that count from 0 in every run of equal segments."""
  index = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
  starts = np.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
  return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)


class _Check:
  def __init__(self, arrays: Mapping[str, np.ndarray], where: str):
    self.arrays, self.where = arrays, where

  def integers(self, name: str, least: int, most: int | None) -> np.ndarray:
    array = self.arrays[name]
    if array.dtype == np.bool_ and most == 1:
      array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
      raise UserError(f"{self.where}: {name}: dtype {array.dtype}, expected integers", fix=f"save {name} as int32 or int64")
    if array.size:
      low, high = int(array.min()), int(array.max())
      if low < least or (most is not None and high > most):
        bounds = f"from {least} up" if most is None else f"from {least} to {most}"
        raise UserError(
          f"{self.where}: {name}: {low if low < least else high} is out of range, expected {bounds}",
          fix=f"correct {name}, for example in the program that wrote the file",
        )
      if high > 2**63 - 1:
        raise UserError(f"{self.where}: {name}: {high} is out of range", fix=f"save {name} as int64")
    return array.astype(np.int64)

  def optional(self, name: str, shape: tuple[int, int], least: int, most: int, *, one_row: bool = False) -> np.ndarray | None:
    if name not in self.arrays:
      return None
    array = self.integers(name, least, most)
    if one_row and array.shape in ((1, shape[1]), (shape[1],)):
      array = np.broadcast_to(array, shape)
    if array.shape != shape:
      raise UserError(
        f"{self.where}: {name}: shape {list(array.shape)}, expected that of input_ids, {list(shape)}",
        fix=f"save {name} with one value per token",
      )
    return array


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
      raise UserError(
        f"{where}: image_position_ids without pixel_values", fix="save pixel_values too, or remove image_position_ids"
      )
    if types is not None and types.any():
      raise UserError(
        f"{where}: mm_token_type_ids or token_type_ids marks image tokens, but pixel_values is missing",
        fix="save pixel_values too, or remove the array for a text without images",
      )
    return {}
  if vision is None or not on:
    why = "use_multimodal is false" if vision and vision.hidden_size_for_vit else "its config.json has no vision_config"
    raise UserError(
      f"{where}: pixel_values: the model has no vision tower ({why})",
      fix="leave out the image arrays, or use a checkpoint with a vision tower",
    )
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
      f"{where}: input_ids has {placed} image tokens (id {vision.image_token_id}), but pixel_values gives {features}",
      fix="take input_ids and pixel_values from one call of the model's processor",
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
    raise UserError(
      f"{where}: {given[0]}: {types.dtype} {list(types.shape)}, expected integers {list(shape)}",
      fix=f"save {given[0]} as the model's processor returns it",
    )
  if types.size and (types.min() < 0 or types.max() > 3):
    raise UserError(
      f"{where}: {given[0]}: out of range, expected 0 (text), 1 (image), 2 (video) or 3 (audio)",
      fix=f"save {given[0]} as the model's processor returns it",
    )
  return types


def _pixels(pixels: np.ndarray, where: str, vision: VisionConfig) -> np.ndarray:
  if pixels.dtype.kind != "f":
    raise UserError(
      f"{where}: pixel_values: dtype {pixels.dtype}, expected floating point, as the processor returns",
      fix="save pixel_values as the model's processor returns them",
    )
  if isinstance(vision, SquareVision):
    side = vision.image_size_for_vit
    fits, expected = pixels.ndim == 4 and pixels.shape[1:] == (3, side, side), f"[images, 3, {side}, {side}]"
  else:
    assert isinstance(vision, PatchVision), "the two kinds of towers"
    size, squares = 3 * vision.patch_size_for_vit**2, vision.pooling_size_for_vit**2
    fits = pixels.ndim == 3 and pixels.shape[2] == size and pixels.shape[1] > 0 and pixels.shape[1] % squares == 0
    expected = f"[images, patches, {size}] with patches a multiple of {squares}"
  if not fits or not len(pixels):
    raise UserError(
      f"{where}: pixel_values: shape {list(pixels.shape)}, expected {expected}",
      fix="save pixel_values as this model's processor returns them",
    )
  if not np.isfinite(pixels).all():
    raise UserError(f"{where}: pixel_values: not finite", fix="process the images again: the array contains NaN or Inf")
  return np.ascontiguousarray(pixels, np.float32)


def _positions(arrays: Mapping[str, np.ndarray], where: str, vision: PatchVision, shape: tuple[int, ...]) -> np.ndarray:
  if "image_position_ids" not in arrays:
    raise UserError(
      f"{where}: pixel_values without image_position_ids, which Gemma 4's tower needs",
      fix="save image_position_ids too, as the model's processor returns them",
    )
  positions, rows = arrays["image_position_ids"], vision.num_position_embeddings_for_vit
  if positions.dtype.kind not in "iu" or positions.shape != (*shape, 2):
    found = f"{positions.dtype} {list(positions.shape)}"
    raise UserError(
      f"{where}: image_position_ids: {found}, expected integers {[*shape, 2]}: (column, row) of every patch",
      fix="save image_position_ids as the model's processor returns them",
    )
  if positions.min() < -1 or positions.max() >= rows or ((positions < 0).any(-1) != (positions < 0).all(-1)).any():
    raise UserError(
      f"{where}: image_position_ids: out of range, expected 0 to {rows - 1}, or (-1, -1) for padding",
      fix="save image_position_ids as the model's processor returns them",
    )
  return np.ascontiguousarray(positions, np.int32)


def _pooled_tokens(positions: np.ndarray, pooling: int) -> int:
  """Returns the number of image tokens of all images: squares of pooling x pooling patches that contain a patch."""
  return sum(len(np.unique(image[image[:, 0] >= 0] // pooling, axis=0)) for image in positions)
