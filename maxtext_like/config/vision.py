"""``vision:``, the tower that turns images into tokens, and how a record of the data names its images.

Names are MaxText's where MaxText has the same. Sizes of the tower are 0 in a model without one. A family with a tower extends
``SquareVision`` or ``PatchVision``, by how it takes images, in its ``models/<family>/config.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from maxtext_like.config.key_class import Mathematics, Shape, TrainingOnly
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.problems import InvalidSectionError, Problem, above_zero, at_least

VisionTower = Literal["frozen", "projector", "trained", "adapted"]
"""What training does to a tower; "projector" trains that alone of it."""

_NEEDED = (
  "patch_size_for_vit",
  "hidden_size_for_vit",
  "intermediate_size_for_vit",
  "num_hidden_layers_for_vit",
  "num_attention_heads_for_vit",
  "vision_output_length",
  "image_token_id",
  "boi_token_id",
  "eoi_token_id",
)


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
  """Sizes of the tower in elements, sides of images and patches in pixels; token ids; images in the data."""

  placeholder_keys: ClassVar[tuple[str, ...]] = ()  # of placeholder_ids

  use_multimodal: Shape[bool]
  patch_size_for_vit: Shape[int]
  hidden_size_for_vit: Shape[int]
  intermediate_size_for_vit: Shape[int]
  num_hidden_layers_for_vit: Shape[int]
  num_attention_heads_for_vit: Shape[int]
  normalization_layer_epsilon_for_vit: Mathematics[float]
  vision_output_length: Mathematics[int]
  image_token_id: Mathematics[int | None]
  boi_token_id: Mathematics[int | None]
  eoi_token_id: Mathematics[int | None]
  image_placeholder: TrainingOnly[str]
  images_field: TrainingOnly[str]
  max_images_per_row: TrainingOnly[int]

  def __post_init__(self):
    if problems := list(self.problems()):
      raise InvalidSectionError(problems)

  @property
  def head_dim(self) -> int:
    """Size of a head of the tower."""
    return self.hidden_size_for_vit // self.num_attention_heads_for_vit

  def effective(self, key: str) -> Any:
    """The value of a key, with what null means filled in: two towers are the same if the effective values are equal."""
    return getattr(self, key)

  @property
  def frame(self) -> str:
    """Text that stands between an image and the text around it."""
    return ""

  @property
  def placeholder_ids(self) -> tuple[int, ...]:
    """Tokens that stand for images and the like, and are looked up as padding wherever they occur."""
    ids = (getattr(self, key) for key in self.placeholder_keys)
    return tuple(token for token in ids if token is not None)

  @property
  def patches(self) -> int:
    """Patches of an image as the tower has them, padding included."""
    raise NotImplementedError(f"{type(self).__name__} has no tower")

  def image_shapes(self) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that a batch has of one image; "pixel_values" is float32, the others are int32."""
    raise NotImplementedError(f"{type(self).__name__} has no tower")

  def divides_heads(self) -> Iterator[Problem]:
    """A problem where the width of the tower cannot be divided among its heads."""
    hidden, heads = self.hidden_size_for_vit, self.num_attention_heads_for_vit
    if heads > 0 and hidden % heads:
      yield Problem(
        f"hidden_size_for_vit = {hidden} is not divisible by num_attention_heads_for_vit = {heads}",
        ("hidden_size_for_vit", "num_attention_heads_for_vit"),
        "make it divisible",
      )

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values, each with the keys that take part."""
    yield from at_least(self, 0, *_NEEDED)
    yield from at_least(self, 1, "max_images_per_row")
    yield from above_zero(self, "normalization_layer_epsilon_for_vit")
    for name in ("image_placeholder", "images_field"):
      if not getattr(self, name):
        yield Problem(f"{name} is empty", (name,))
    if not self.use_multimodal:
      return
    for name in _NEEDED:
      value = getattr(self, name)
      if value is None or (value == 0 and not name.endswith("_id")):
        yield Problem(f"{name} is not set", (name, "use_multimodal"), "the vision tower needs it")
    yield from self.divides_heads()
    tokens = [self.image_token_id, self.boi_token_id, self.eoi_token_id]
    if len(set(tokens)) < 3 and None not in tokens:
      yield Problem(
        f"image_token_id, boi_token_id and eoi_token_id are {tokens[0]}, {tokens[1]} and {tokens[2]}",
        ("image_token_id", "boi_token_id", "eoi_token_id"),
        "they are three different tokens",
      )

  def unfit(self, model: ModelConfig) -> Iterator[Problem]:
    """What keeps the tower from being built for a decoder; asked with ``use_multimodal`` alone."""
    # The image token is never looked up: Gemma 3's lies beyond the 262144 rows that MaxText gives its table.
    for name in ("boi_token_id", "eoi_token_id"):
      value = getattr(self, name)
      if value is not None and value >= model.vocab_size >= 1:
        yield Problem(f"{name} = {value} is outside the vocabulary of {model.vocab_size}", (name, "vocab_size"))


@dataclass(frozen=True, kw_only=True)
class SquareVision(VisionConfig):
  """A tower that takes every image as one square of the same size."""

  image_size_for_vit: Shape[int]

  @property
  def patches(self) -> int:
    """Patches of an image."""
    return (self.image_size_for_vit // self.patch_size_for_vit) ** 2

  def image_shapes(self) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that a batch has of one image; "pixel_values" is float32, the others are int32."""
    return {"pixel_values": (3, self.image_size_for_vit, self.image_size_for_vit)}

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values, each with the keys that take part."""
    yield from super().problems()
    yield from at_least(self, 0, "image_size_for_vit")


@dataclass(frozen=True, kw_only=True)
class PatchVision(VisionConfig):
  """A tower that takes images in their aspect ratio, as patches with a place each, and pools squares of them."""

  pooling_size_for_vit: Mathematics[int]
  num_position_embeddings_for_vit: Shape[int]

  @property
  def patches(self) -> int:
    """Patches that an image has at most, and that every image is padded to."""
    return self.vision_output_length * self.pooling_size_for_vit**2

  def image_shapes(self) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that a batch has of one image; "pixel_values" is float32, the others are int32."""
    P = self.patches
    return {"pixel_values": (P, 3 * self.patch_size_for_vit**2), "image_position_ids": (P, 2)}

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values, each with the keys that take part."""
    yield from super().problems()
    yield from at_least(self, 0, "num_position_embeddings_for_vit")
    yield from at_least(self, 1, "pooling_size_for_vit")

  def unfit(self, model: ModelConfig) -> Iterator[Problem]:
    """What keeps the tower from being built for a decoder; asked with ``use_multimodal`` alone."""
    yield from super().unfit(model)
    if (longest := self.vision_output_length * self.pooling_size_for_vit) > self.num_position_embeddings_for_vit:
      yield Problem(
        f"num_position_embeddings_for_vit = {self.num_position_embeddings_for_vit}, but a long narrow image of "
        f"vision_output_length = {self.vision_output_length} tokens has {longest} patches in a line",
        ("num_position_embeddings_for_vit", "vision_output_length", "pooling_size_for_vit"),
        f"set num_position_embeddings_for_vit to {longest} or more",
      )
