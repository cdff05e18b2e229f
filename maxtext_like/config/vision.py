"""Section ``vision:``: the vision tower, and the fields of a data record that hold images.

Key names follow MaxText where it has the same key. The sizes are 0 in a model without a tower. A family with a tower extends
``SquareVision`` (images resized to a square) or ``PatchVision`` (aspect ratio kept) in ``models/<family>/config.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from maxtext_like.config.key_class import Mathematics, Shape, TrainingOnly
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.problems import InvalidSectionError, Problem, above_zero, at_least

VisionTower = Literal["frozen", "projector", "trained", "adapted"]
"""How the tower is trained: not at all, only its projector, all of it, or LoRA adapters."""

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
  """Section ``vision:``. Sizes are in elements, sides of images and patches in pixels."""

  placeholder_keys: ClassVar[tuple[str, ...]] = ()  # keys whose tokens are in placeholder_ids

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
    """Return the value of a key, with null replaced by what it means. Two towers are equal if all effective values are."""
    return getattr(self, key)

  @property
  def frame(self) -> str:
    """Text inserted between an image and the surrounding text."""
    return ""

  @property
  def placeholder_ids(self) -> tuple[int, ...]:
    """Placeholder tokens of images, video and audio, which are embedded as padding."""
    ids = (getattr(self, key) for key in self.placeholder_keys)
    return tuple(token for token in ids if token is not None)

  @property
  def patches(self) -> int:
    """Number of patches per image, padding included."""
    raise NotImplementedError(f"{type(self).__name__} has no tower")

  def image_shapes(self) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of one image in a batch; "pixel_values" is float32, the others are int32."""
    raise NotImplementedError(f"{type(self).__name__} has no tower")

  def divides_heads(self) -> Iterator[Problem]:
    """Yield a problem if the width of the tower is not a multiple of the number of heads."""
    hidden, heads = self.hidden_size_for_vit, self.num_attention_heads_for_vit
    if heads > 0 and hidden % heads:
      yield Problem(
        f"hidden_size_for_vit = {hidden} is not divisible by num_attention_heads_for_vit = {heads}",
        ("hidden_size_for_vit", "num_attention_heads_for_vit"),
        "set a multiple of num_attention_heads_for_vit",
      )

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values, with the keys involved."""
    yield from at_least(self, 0, *_NEEDED)
    yield from at_least(self, 1, "max_images_per_row")
    yield from above_zero(self, "normalization_layer_epsilon_for_vit")
    for name in ("image_placeholder", "images_field"):
      if not getattr(self, name):
        yield Problem(f"{name} is empty", (name,), fix=f"set {name} to one or more values")
    if not self.use_multimodal:
      return
    for name in _NEEDED:
      value = getattr(self, name)
      if value is None or (value == 0 and not name.endswith("_id")):
        yield Problem(f"{name} is not set", (name, "use_multimodal"), f"set {name}, which the vision tower needs")
    yield from self.divides_heads()
    tokens = [self.image_token_id, self.boi_token_id, self.eoi_token_id]
    if len(set(tokens)) < 3 and None not in tokens:
      yield Problem(
        f"image_token_id, boi_token_id and eoi_token_id are {tokens[0]}, {tokens[1]} and {tokens[2]}",
        ("image_token_id", "boi_token_id", "eoi_token_id"),
        "set three different tokens",
      )

  def decoder_problems(self, model: ModelConfig) -> Iterator[Problem]:
    """Yield problems of the tower with a decoder. Called only if ``use_multimodal`` is true."""
    # The image token is never embedded. Gemma 3's is outside the 262144 rows of MaxText's table.
    for name in ("boi_token_id", "eoi_token_id"):
      value = getattr(self, name)
      if value is not None and value >= model.vocab_size >= 1:
        yield Problem(
          f"{name} = {value} is outside the vocabulary of {model.vocab_size}",
          (name, "vocab_size"),
          fix=f"set {name} to an id from 0 to {model.vocab_size - 1}",
        )


@dataclass(frozen=True, kw_only=True)
class SquareVision(VisionConfig):
  """A tower that resizes every image to a square of one size."""

  image_size_for_vit: Shape[int]

  @property
  def patches(self) -> int:
    """Number of patches per image."""
    return (self.image_size_for_vit // self.patch_size_for_vit) ** 2

  def image_shapes(self) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of one image in a batch; "pixel_values" is float32, the others are int32."""
    return {"pixel_values": (3, self.image_size_for_vit, self.image_size_for_vit)}

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values, with the keys involved."""
    yield from super().problems()
    yield from at_least(self, 0, "image_size_for_vit")


@dataclass(frozen=True, kw_only=True)
class PatchVision(VisionConfig):
  """A tower that keeps the aspect ratio: patches with positions, pooled in squares into tokens."""

  pooling_size_for_vit: Mathematics[int]
  num_position_embeddings_for_vit: Shape[int]

  @property
  def patches(self) -> int:
    """Maximum number of patches per image; every image is padded to it."""
    return self.vision_output_length * self.pooling_size_for_vit**2

  def image_shapes(self) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of one image in a batch; "pixel_values" is float32, the others are int32."""
    P = self.patches
    return {"pixel_values": (P, 3 * self.patch_size_for_vit**2), "image_position_ids": (P, 2)}

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values, with the keys involved."""
    yield from super().problems()
    yield from at_least(self, 0, "num_position_embeddings_for_vit")
    yield from at_least(self, 1, "pooling_size_for_vit")

  def decoder_problems(self, model: ModelConfig) -> Iterator[Problem]:
    """Yield problems of the tower with a decoder. Called only if ``use_multimodal`` is true."""
    yield from super().decoder_problems(model)
    if (longest := self.vision_output_length * self.pooling_size_for_vit) > self.num_position_embeddings_for_vit:
      yield Problem(
        f"num_position_embeddings_for_vit = {self.num_position_embeddings_for_vit}, but a long narrow image of "
        f"vision_output_length = {self.vision_output_length} tokens has up to {longest} patches along one side",
        ("num_position_embeddings_for_vit", "vision_output_length", "pooling_size_for_vit"),
        f"set num_position_embeddings_for_vit to {longest} or more",
      )
