"""Image files as inputs of a vision tower, with the preprocessing of Hugging Face's processors for Gemma 3 and Gemma 4.

Gemma 3: each image is resized to a square (bilinear), with values in [-1, 1]. Gemma 4: each image keeps its aspect ratio and
gets as many complete squares of patches as the number of tokens allows (bicubic), with values in [0, 1] and a position for each
patch. Both filters are antialiased. Needs Pillow: the extra ``vision``.

C colors, I images, P patches.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from maxtext_like.config.vision import PatchVision, SquareVision, VisionConfig
from maxtext_like.data.image_text.image_names import open_image
from maxtext_like.data.readers.input_files import NotRegularError
from maxtext_like.errors import UserError
from maxtext_like.extras import install

if TYPE_CHECKING:
  from PIL.Image import Image

MAX_PIXELS = 89_478_485  # most pixels of an image (a quarter of a GiB when decoded); Pillow warns of an attack above this
FORMATS = ("PNG", "JPEG")


class BadImageError(Exception):
  """An image file that cannot be used. The message is the reason, without the name of the file."""


@dataclass(frozen=True, eq=False)
class TowerImage:
  """One image at the size of the vision tower's input. It is stored as uint8 without padding, so that a queue of images is
  small.

  Attributes:
    levels: uint8. Gemma 3: [C, side, side]; Gemma 4: [P, 3 * patch ** 2], row by row.
    columns: number of patches in a row; 0 for Gemma 3.
    tokens: number of image tokens that the tower makes from it.
  """

  levels: np.ndarray
  columns: int
  tokens: int

  def pixels(self) -> np.ndarray:
    """Returns float32 values in the shape of ``levels``: Gemma 3 in [-1, 1], Gemma 4 in [0, 1]."""
    if not self.columns:
      return self.levels / np.float32(127.5) - np.float32(1)
    return self.levels / np.float32(255)

  def positions(self) -> np.ndarray:
    """Returns the (column, row) of each patch, int32 [P, 2]. Gemma 4 only."""
    row, column = np.divmod(np.arange(len(self.levels), dtype=np.int32), self.columns)
    return np.stack([column, row], axis=-1)


@dataclass(frozen=True)
class MeasuredImage:
  """One image file of which only the header was read.

  Attributes:
    path: path of the file, or a ``data:`` URI.
    tokens: number of image tokens that the tower makes from it.
  """

  path: str | Path
  tokens: int


def tower_arrays(images: Sequence[TowerImage | None], vision: VisionConfig) -> dict[str, np.ndarray]:
  """Returns the decoder's image inputs for a sequence of images, in which None is an empty place.

  Returns:
    "pixel_values" float32 [I, C, side, side] (Gemma 3) or [I, P, 3 * patch ** 2] (Gemma 4), and for Gemma 4
    "image_position_ids"
    int32 [I, P, 2], with P the largest number of patches of an image. Padding and empty places are 0 and (-1, -1).
  """
  shapes = {name: (len(images), *shape) for name, shape in vision.image_shapes().items()}
  arrays: dict[str, np.ndarray] = {"pixel_values": np.zeros(shapes["pixel_values"], np.float32)}
  if "image_position_ids" in shapes:
    arrays["image_position_ids"] = np.full(shapes["image_position_ids"], -1, np.int32)
  for i, image in enumerate(images):
    if image is not None:
      arrays["pixel_values"][i, : len(image.levels)] = image.pixels()
      if "image_position_ids" in arrays:
        arrays["image_position_ids"][i, : len(image.levels)] = image.positions()
  return arrays


def require_pillow() -> None:
  """Raises UserError if Pillow, which reads image files, is not installed."""
  try:
    import PIL.Image
  except ImportError:
    raise UserError(f"images need Pillow, which is not installed\n  fix: {install('vision')}") from None
  warnings.filterwarnings("ignore", category=PIL.Image.DecompressionBombWarning)  # this module refuses such images itself


def load_image(path: str | Path, vision: VisionConfig) -> TowerImage:
  """Reads a PNG or JPEG file for the tower of ``vision``.

  Raises:
    BadImageError: the file does not exist, is not an image, is damaged, or has more than 89 million pixels.
  """
  return tower_image(read_image(path), vision)


def read_image(path: str | Path) -> "Image":
  """Reads an image file as RGB, rotated as its EXIF orientation says. Transparency is dropped, as in transformers."""
  from PIL import ImageOps

  with _opened(path) as image:
    ImageOps.exif_transpose(image, in_place=True)  # in place saves a copy of a large image
    return image.convert("RGB")


def check_header(path: str | Path) -> None:
  """Raises BadImageError if the header of a file shows that it is not a usable image. Pixels are not decoded."""
  with _opened(path):
    pass


def measure_image(path: str | Path, vision: VisionConfig) -> MeasuredImage:
  """Returns the number of tokens of an image, from its header alone.

  An EXIF rotation by 90 degrees does not change the number.

  Raises:
    BadImageError: the header shows that the file is not a usable image.
  """
  with _opened(path) as image:
    if isinstance(vision, SquareVision):
      return MeasuredImage(path, vision.vision_output_length)
    assert isinstance(vision, PatchVision), "the two kinds of towers"
    return MeasuredImage(path, _tokens(*patched_size(image.height, image.width, vision), vision))


@contextlib.contextmanager
def _opened(path: str | Path) -> "Iterator[Image]":
  """Opens an image file without decoding its pixels. Turns every error of the block into BadImageError."""
  from PIL import Image, UnidentifiedImageError

  try:
    with open_image(path) as file, Image.open(file, formats=FORMATS) as image:
      if image.width * image.height > MAX_PIXELS:
        raise BadImageError(f"{image.width} x {image.height} pixels, more than the limit of {MAX_PIXELS} (decompression bomb?)")
      yield image
  except NotRegularError as error:
    raise BadImageError(error.strerror) from None
  except FileNotFoundError:
    raise BadImageError("no such file") from None
  except UnidentifiedImageError:
    raise BadImageError(f"not a {' or '.join(FORMATS)} image") from None
  except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
    raise BadImageError(str(error).rstrip(".")) from None
  except (OSError, SyntaxError, ValueError, EOFError) as error:  # Pillow raises these for damaged files
    raise BadImageError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def tower_image(image: "Image", vision: VisionConfig) -> TowerImage:
  """Resizes an RGB image for the tower of ``vision``."""
  from PIL.Image import Resampling

  if isinstance(vision, SquareVision):
    side = vision.image_size_for_vit
    levels = np.asarray(image.resize((side, side), Resampling.BILINEAR)).transpose(2, 0, 1)
    return TowerImage(np.ascontiguousarray(levels), 0, vision.vision_output_length)
  assert isinstance(vision, PatchVision), "the two kinds of towers"
  p = vision.patch_size_for_vit
  height, width = patched_size(image.height, image.width, vision)
  if (width, height) != image.size:
    image = image.resize((width, height), Resampling.BICUBIC)
  rows, columns = height // p, width // p
  grid = np.asarray(image).reshape(rows, p, columns, p, 3).transpose(0, 2, 1, 3, 4)
  return TowerImage(grid.reshape(rows * columns, -1), columns, _tokens(height, width, vision))


def _tokens(height: int, width: int, vision: PatchVision) -> int:
  """Returns the number of tokens of an image after pooling, from its size in the tower."""
  return height * width // (vision.patch_size_for_vit * vision.pooling_size_for_vit) ** 2


def patched_size(height: int, width: int, vision: PatchVision) -> tuple[int, int]:
  """Returns the (height, width) that Gemma 4 gives an image: multiples of a pooled square, at most ``vision.patches`` patches.

  The aspect ratio is kept. A side that would be shorter than one square is one square, and the other side then has as many
  squares as the aspect ratio and the number of tokens allow.
  """
  square = vision.pooling_size_for_vit * vision.patch_size_for_vit
  factor = math.sqrt(vision.patches * vision.patch_size_for_vit**2 / (height * width))
  down, across = (math.floor(factor * side / square) for side in (height, width))
  if down == 0:
    down, across = 1, min(width // height, vision.vision_output_length)
  elif across == 0:
    down, across = min(height // width, vision.vision_output_length), 1
  return down * square, across * square
