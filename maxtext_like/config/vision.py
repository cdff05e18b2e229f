"""``vision:``, the tower that turns images into tokens, and how a record of the data names its images.

Names are MaxText's where MaxText has the same. Sizes of the tower are 0 in a model without one; rules that need the
family are in ``rules.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from maxtext_like.config.problems import InvalidSectionError, Problem, above_zero, at_least

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

  use_multimodal: bool
  image_size_for_vit: int  # Gemma 3; Gemma 4 keeps the aspect ratio and derives the size from vision_output_length
  patch_size_for_vit: int
  hidden_size_for_vit: int
  intermediate_size_for_vit: int
  num_hidden_layers_for_vit: int
  num_attention_heads_for_vit: int
  head_dim_for_vit: int | None  # None: hidden_size_for_vit / num_attention_heads_for_vit
  normalization_layer_epsilon_for_vit: float
  rope_theta_for_vit: float
  num_position_embeddings_for_vit: int
  pooling_size_for_vit: int
  standardize_for_vit: bool
  use_clipped_linears_for_vit: bool
  vision_output_length: int
  image_token_id: int | None
  boi_token_id: int | None
  eoi_token_id: int | None
  video_token_id: int | None  # Gemma 4; no video is read, but the token is looked up as padding
  audio_token_id: int | None  # the same of sound
  image_placeholder: str
  images_field: str
  max_images_per_row: int

  def __post_init__(self):
    if problems := list(self.problems()):
      raise InvalidSectionError(problems)

  @property
  def head_dim(self) -> int:
    """Size of a head of the tower."""
    return self.head_dim_for_vit or self.hidden_size_for_vit // self.num_attention_heads_for_vit

  @property
  def square(self) -> bool:
    """Gemma 3: every image is resized to one square."""
    return self.image_size_for_vit > 0

  @property
  def max_patches(self) -> int:
    """Gemma 4: patches that an image has at most, and that every image is padded to."""
    return self.vision_output_length * self.pooling_size_for_vit**2

  @property
  def placeholder_ids(self) -> tuple[int, ...]:
    """Gemma 4: tokens that stand for images, video and sound, and are looked up as padding wherever they occur."""
    ids = (self.image_token_id, self.video_token_id, self.audio_token_id)
    return tuple(token for token in ids if token is not None)

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values, each with the keys that take part."""
    yield from at_least(self, 0, *_NEEDED, "image_size_for_vit", "num_position_embeddings_for_vit")
    yield from at_least(self, 0, "video_token_id", "audio_token_id")
    yield from at_least(self, 1, "head_dim_for_vit", "pooling_size_for_vit", "max_images_per_row")
    yield from above_zero(self, "normalization_layer_epsilon_for_vit", "rope_theta_for_vit")
    for name in ("image_placeholder", "images_field"):
      if not getattr(self, name):
        yield Problem(f"{name} is empty", (name,))
    if not self.use_multimodal:
      return
    for name in _NEEDED:
      value = getattr(self, name)
      if value is None or (value == 0 and not name.endswith("_id")):
        yield Problem(f"{name} is not set", (name, "use_multimodal"), "the vision tower needs it")
    hidden, heads = self.hidden_size_for_vit, self.num_attention_heads_for_vit
    if self.head_dim_for_vit is None and heads > 0 and hidden % heads:
      yield Problem(
        f"hidden_size_for_vit = {hidden} is not divisible by num_attention_heads_for_vit = {heads}",
        ("hidden_size_for_vit", "num_attention_heads_for_vit"),
        "set head_dim_for_vit, or make it divisible",
      )
    tokens = [self.image_token_id, self.boi_token_id, self.eoi_token_id]
    if len(set(tokens)) < 3 and None not in tokens:
      yield Problem(
        f"image_token_id, boi_token_id and eoi_token_id are {tokens[0]}, {tokens[1]} and {tokens[2]}",
        ("image_token_id", "boi_token_id", "eoi_token_id"),
        "they are three different tokens",
      )
