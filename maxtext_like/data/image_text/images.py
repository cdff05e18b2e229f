"""Image files to the inputs of a vision tower, as Hugging Face's processors of Gemma 3 and Gemma 4 make them.

Gemma 3: every image becomes a square (bilinear), numbers in [-1, 1]. Gemma 4: the aspect ratio is kept, as many whole
squares of patches as the number of tokens allows (bicubic), numbers in [0, 1], patches with their positions. Both filters
look at all the pixels that a smaller picture's pixel covers. Pillow is needed: the extra ``vision``.

C colours, I images, P patches.
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

if TYPE_CHECKING:
  from PIL.Image import Image

MAX_PIXELS = 89_478_485  # of a file, a quarter of a GiB unpacked: where Pillow warns of an attack
FORMATS = ("PNG", "JPEG")


class BadImageError(Exception):
  """An image file that cannot be used; the message is the reason, without the file's name."""


@dataclass(frozen=True, eq=False)
class TowerImage:
  """One image at the size that the tower takes it, small enough to wait in a queue: grey levels, no padding.

  Attributes:
    levels: uint8: Gemma 3 [C, side, side]; Gemma 4 [P, 3 * patch ** 2], row by row.
    columns: patches in a row; 0 with Gemma 3.
    tokens: image tokens that the tower makes of it.
  """

  levels: np.ndarray
  columns: int
  tokens: int

  def pixels(self) -> np.ndarray:
    """float32, as ``levels``: Gemma 3 in [-1, 1], Gemma 4 in [0, 1]."""
    if not self.columns:
      return self.levels / np.float32(127.5) - np.float32(1)
    return self.levels / np.float32(255)

  def positions(self) -> np.ndarray:
    """int32 [P, 2], (column, row) of each patch. Gemma 4."""
    row, column = np.divmod(np.arange(len(self.levels), dtype=np.int32), self.columns)
    return np.stack([column, row], axis=-1)


@dataclass(frozen=True)
class UnreadImage:
  """One image file of which only the header was read.

  Attributes:
    path: of the file, or a ``data:`` URI.
    tokens: image tokens that the tower makes of it.
  """

  path: str | Path
  tokens: int


def tower_arrays(images: Sequence[TowerImage | None], vision: VisionConfig) -> dict[str, np.ndarray]:
  """The decoder's image inputs for images in order; None is an empty place.

  Returns:
    "pixel_values" float32 [I, C, side, side] (Gemma 3), or [I, P, 3 * patch ** 2] and "image_position_ids" int32
    [I, P, 2] (Gemma 4), P the most patches that an image can have; padding and empty places are 0 and (-1, -1).
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
  """UserError when Pillow, which reads image files, is not installed."""
  try:
    import PIL.Image
  except ImportError:
    raise UserError("images need Pillow, which is not installed\n  fix: pip install -e '.[vision]'") from None
  warnings.filterwarnings("ignore", category=PIL.Image.DecompressionBombWarning)  # such an image is refused here


def load_image(path: str | Path, vision: VisionConfig) -> TowerImage:
  """A PNG or JPEG file for the tower of ``vision``.

  Raises:
    BadImageError: no such file, no image, damaged, or larger than 89 million pixels.
  """
  return tower_image(read_image(path), vision)


def read_image(path: str | Path) -> "Image":
  """An image file in RGB, upright as its EXIF orientation says; transparency is dropped, as transformers does."""
  from PIL import ImageOps

  with _opened(path) as image:
    ImageOps.exif_transpose(image, in_place=True)  # which spares a copy: a large file is unpacked twice as it is
    return image.convert("RGB")


def check_header(path: str | Path) -> None:
  """BadImageError when a file is plainly no image that can be used, from its first bytes; the picture is not unpacked."""
  with _opened(path):
    pass


def measure_image(path: str | Path, vision: VisionConfig) -> UnreadImage:
  """How many tokens an image file takes up, from its header alone. BadImageError as far as that shows it.

  An image that lies on its side, as its EXIF orientation may say, takes up as many as when it stands.
  """
  with _opened(path) as image:
    if isinstance(vision, SquareVision):
      return UnreadImage(path, vision.vision_output_length)
    assert isinstance(vision, PatchVision), "the two kinds of towers"
    return UnreadImage(path, _tokens(*patched_size(image.height, image.width, vision), vision))


@contextlib.contextmanager
def _opened(path: str | Path) -> "Iterator[Image]":
  """An image file, of which no pixel has been unpacked. BadImageError for what goes wrong, inside too."""
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
  except (OSError, SyntaxError, ValueError, EOFError) as error:  # what Pillow raises for damaged files
    raise BadImageError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def tower_image(image: "Image", vision: VisionConfig) -> TowerImage:
  """An RGB image for the tower of ``vision``."""
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
  """What is left of the patches of an image of the size that the tower takes it."""
  return height * width // (vision.patch_size_for_vit * vision.pooling_size_for_vit) ** 2


def patched_size(height: int, width: int, vision: PatchVision) -> tuple[int, int]:
  """(height, width) that Gemma 4 gives an image: whole squares of pooled patches, at most ``vision.patches``, same shape.

  A side that would be less than one square is one square, and the other as many as fit the ratio and the tokens.
  """
  square = vision.pooling_size_for_vit * vision.patch_size_for_vit
  factor = math.sqrt(vision.patches * vision.patch_size_for_vit**2 / (height * width))
  down, across = (math.floor(factor * side / square) for side in (height, width))
  if down == 0:
    down, across = 1, min(width // height, vision.vision_output_length)
  elif across == 0:
    down, across = min(height // width, vision.vision_output_length), 1
  return down * square, across * square
