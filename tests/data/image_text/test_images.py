"""Image files for the towers: equal to transformers' processors within one gray level, for any aspect ratio."""

import dataclasses
import importlib.util
import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maxtext_like.config.load import load_config
from maxtext_like.data.image_text.images import BadImageError, load_image, patched_size, read_image, tower_arrays, tower_image

GOLDEN = Path(__file__).parents[2] / "golden" / "images"


def _record():
  spec = importlib.util.spec_from_file_location("record", GOLDEN / "record.py")
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


record = _record()
EXPECTED = dict(np.load(GOLDEN / "processors.npz"))
GEMMA3 = load_config("gemma3-4b").config.vision
GEMMA4: Any = load_config("gemma4-31b").config.vision
NAMES = [f"{h}x{w}" for h, w in record.SIZES] + ["photo"]


def image_of(name: str, folder: Path) -> Path:
  """Returns the file of a recorded image."""
  if name == "photo":
    return GOLDEN / "photo.jpg"
  height, width = map(int, name.split("x"))
  Image.fromarray(record.picture(height, width)).save(folder / "a.png", compress_level=0)
  return folder / "a.png"


DECODED = 1387178543  # CRC-32 of the photo as decoded by libjpeg-turbo 3.2.0; other decoders may differ in the last bit


def assert_within_one_gray_level(pixels: np.ndarray, key: str) -> None:
  """Allows one level of difference; two for a JPEG that this machine's library decodes with one level of difference."""
  levels = 1
  if ".photo." in key:
    with Image.open(GOLDEN / "photo.jpg") as photo:
      levels = 1 if zlib.crc32(np.asarray(photo.convert("RGB")).tobytes()) == DECODED else 2
  got, want = pixels.reshape(-1)[:: record.STEP] * 255.0, EXPECTED[key].astype(float)
  assert got.shape == want.shape
  assert np.abs(got - want).max() <= levels + 0.001


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_gemma_3_as_transformers(name: str, tmp_path: Path):
  made = load_image(image_of(name, tmp_path), GEMMA3)
  arrays = tower_arrays([made], GEMMA3)
  assert arrays.keys() == {"pixel_values"}
  pixels = arrays["pixel_values"][0]
  assert (pixels.shape, pixels.dtype, made.tokens) == ((3, 896, 896), np.float32, 256)
  assert pixels.min() >= -1
  assert pixels.max() <= 1.001
  assert_within_one_gray_level((pixels + 1) / 2, f"gemma3.{name}.pixels")


@pytest.mark.parametrize("tokens", record.SOFT_TOKENS)
@pytest.mark.parametrize("name", NAMES)
def test_gemma_4_as_transformers(name: str, tokens: int, tmp_path: Path):
  vision = dataclasses.replace(GEMMA4, vision_output_length=tokens)
  made = load_image(image_of(name, tmp_path), vision)
  arrays = tower_arrays([made], vision)
  key = f"gemma4.{tokens}.{name}"
  assert made.tokens == EXPECTED[f"{key}.tokens"]
  np.testing.assert_array_equal(arrays["image_position_ids"][0], EXPECTED[f"{key}.positions"])
  assert arrays["pixel_values"].shape == (1, tokens * 9, 768)
  assert_within_one_gray_level(arrays["pixel_values"], f"{key}.pixels")


@pytest.mark.parametrize("seed", range(50))
def test_any_size_gives_whole_squares_within_the_tokens(seed: int):
  height, width = np.exp(np.random.default_rng(seed).uniform(0, 9, 2)).astype(int)
  tiny: Any = load_config("gemma4-tiny").config.vision
  for vision in (GEMMA4, tiny):
    square = vision.pooling_size_for_vit * vision.patch_size_for_vit
    down, across = (side // square for side in patched_size(int(height), int(width), vision))
    assert patched_size(int(height), int(width), vision) == (down * square, across * square)
    assert min(down, across) >= 1
    assert down * across <= vision.vision_output_length
    assert max(down, across) * vision.pooling_size_for_vit <= vision.num_position_embeddings_for_vit


def test_patches_are_row_major_with_the_color_last():
  vision = load_config("gemma4-tiny").config.vision  # patches of 4, squares of 12
  levels = np.arange(48 * 48 * 3).reshape(48, 48, 3) % 251
  made = tower_image(Image.fromarray(levels.astype(np.uint8)), vision)
  assert made.tokens == 16
  for patch, (x, y) in enumerate([(x, y) for y in range(12) for x in range(12)]):
    expected = levels[4 * y : 4 * y + 4, 4 * x : 4 * x + 4].reshape(-1) / 255
    np.testing.assert_allclose(made.pixels()[patch], expected, atol=1e-6)


def test_empty_places_are_padding_alone():
  for name in ("gemma3-tiny", "gemma4-tiny"):
    vision = load_config(name).config.vision
    image = tower_image(Image.fromarray(record.picture(24, 60)), vision)
    arrays, alone = tower_arrays([None, image, None], vision), tower_arrays([image], vision)
    assert not arrays["pixel_values"][::2].any()
    for key, array in arrays.items():
      np.testing.assert_array_equal(array[1], alone[key][0])
    if "image_position_ids" in arrays:
      assert (arrays["image_position_ids"][::2] == -1).all()


def test_gray_palette_transparency_and_orientation(tmp_path: Path):
  square = Image.fromarray(record.picture(20, 30))
  for mode in ("L", "P", "RGBA", "LA", "1", "CMYK"):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    square.convert(mode).save(path)
    assert read_image(path).mode == "RGB"
  turned = square.getexif()
  turned[0x0112] = 6  # rotated by 90 degrees, as phones write photos
  square.save(tmp_path / "a.jpg", exif=turned)
  assert read_image(tmp_path / "a.jpg").size == (20, 30)


def damaged() -> dict[str, bytes]:
  made = {}
  for kind in ("PNG", "JPEG", "GIF"):
    buffer = io.BytesIO()
    Image.fromarray(record.picture(64, 64)).save(buffer, kind)
    made[kind] = buffer.getvalue()
  huge = bytearray(made["PNG"])
  huge[16:24] = (200_000).to_bytes(4, "big") * 2
  return {
    "not a PNG or JPEG image": b"hello",
    "not a PNG or JPEG": b"",
    "not a PNG": made["GIF"],
    "cannot be read: .*truncated": made["JPEG"][:900],
    "cannot be read": made["PNG"][:3000],
    "cannot be read: ": made["PNG"][:1000] + b"\0" * 50 + made["PNG"][1050:],
    "exceeds limit|more than the limit|not a PNG|cannot be read": bytes(huge),
  }


@pytest.mark.parametrize("reason", damaged())
def test_damaged_files_are_refused_with_the_reason(reason: str, tmp_path: Path):
  (tmp_path / "a.png").write_bytes(damaged()[reason])
  with pytest.raises(BadImageError, match=reason):
    load_image(tmp_path / "a.png", GEMMA3)


def test_missing_files_and_folders(tmp_path: Path):
  with pytest.raises(BadImageError, match="no such file"):
    load_image(tmp_path / "a.png", GEMMA3)
  with pytest.raises(BadImageError, match="a folder, not a regular file"):
    load_image(tmp_path, GEMMA3)


def test_more_pixels_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr("maxtext_like.data.image_text.images.MAX_PIXELS", 100)
  with pytest.raises(BadImageError, match="48 x 48 pixels, more than the limit of 100"):
    load_image(image_of("48x48", tmp_path), GEMMA3)
