"""Records the outputs of transformers' image processors for some images: ``python record.py`` in an environment with torch,
transformers and Pillow. Last run: transformers 5.23.0, Pillow 13.0.0, the PIL processors of Gemma 3 and Gemma 4.

A formula makes the images, so only the results are stored: every ``STEP``-th number, as a grey level.
"""

from pathlib import Path

import numpy as np

SIZES = [(37, 53), (48, 48), (1, 1), (900, 1200), (1200, 700), (400, 3000), (30, 2000), (2000, 20), (672, 960), (511, 513)]
SOFT_TOKENS = (70, 280)
STEP = 293


def picture(height: int, width: int) -> np.ndarray:
  """Returns an image, uint8 [height, width, 3]: waves of several lengths and noise, on which resize filters differ."""
  y, x = np.mgrid[:height, :width].astype(np.float64)
  waves = [np.sin(x / 7 + y / 23), np.cos(x / 61 - y / 3), np.sin(np.hypot(x - width / 3, y - height / 2) / 5)]
  noise = np.random.default_rng(height * 10_000 + width).uniform(-40, 40, (height, width, 3))
  return np.clip(127 + 90 * np.stack(waves, axis=-1) + noise, 0, 255).astype(np.uint8)


def grey_levels(pixels: np.ndarray) -> np.ndarray:
  """Returns every ``STEP``-th number of an array with values in [0, 1], as a grey level."""
  return np.round(pixels.reshape(-1)[::STEP] * 255).astype(np.uint8)


def main() -> None:
  from PIL import Image
  from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
  from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

  folder, recorded = Path(__file__).parent, {}
  photo = Image.fromarray(picture(301, 457))
  photo.save(folder / "photo.jpg", quality=80)
  images = {f"{h}x{w}": Image.fromarray(picture(h, w)) for h, w in SIZES} | {"photo": Image.open(folder / "photo.jpg")}
  gemma3 = Gemma3ImageProcessorPil(size={"height": 896, "width": 896}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
  for name, image in images.items():
    pixels = gemma3(image, return_tensors="np")["pixel_values"][0]
    assert pixels.shape == (3, 896, 896)
    recorded[f"gemma3.{name}.pixels"] = grey_levels((pixels + 1) / 2)
    for tokens in SOFT_TOKENS:
      made = Gemma4ImageProcessorPil(max_soft_tokens=tokens)(image, return_tensors="np")
      recorded[f"gemma4.{tokens}.{name}.pixels"] = grey_levels(made["pixel_values"][0])
      recorded[f"gemma4.{tokens}.{name}.positions"] = made["image_position_ids"][0].astype(np.int16)
      recorded[f"gemma4.{tokens}.{name}.tokens"] = np.asarray(made["num_soft_tokens_per_image"])
  np.savez_compressed(folder / "processors.npz", **recorded)


if __name__ == "__main__":
  main()
