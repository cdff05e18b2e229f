"""The keys of Gemma 3 in ``model:`` and ``vision:``, and those that every Gemma has."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from maxtext_like.config.key_class import Mathematics, Shape, When
from maxtext_like.config.model import GroupedQueryConfig, ModelConfig
from maxtext_like.config.problems import Problem, above_zero, at_least
from maxtext_like.config.vision import SquareVision

LayerType = Literal["sliding", "global"]
SPELLINGS = {
  "bos": ("<bos>",),
  "eos": ("<eos>",),
  "pad": ("<pad>",),
  "start_of_turn": ("<start_of_turn>",),
  "end_of_turn": ("<end_of_turn>",),
  "start_of_image": ("<start_of_image>",),
  "end_of_image": ("<end_of_image>",),
  "image": ("<image_soft_token>",),
}


def chat_template(model: Any) -> str:
  """The chat template that is published for a model."""
  return "gemma3"


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(GroupedQueryConfig):
  """What Gemma 3 and 4 share: sliding and global layers. ``rope_max_timescale`` is the global layers'."""

  # layer_types = None: every inhomogeneous_layer_cycle_interval-th layer is global. The stacks of layers follow from it.
  layer_types: Shape[tuple[LayerType, ...] | None]
  inhomogeneous_layer_cycle_interval: Shape[int]
  sliding_window_size: Mathematics[int | None]
  use_bidirectional_image_attn: Mathematics[bool]
  local_rope_max_timescale: Mathematics[float]

  def attention_types(self) -> tuple[LayerType, ...]:
    """The type of every layer, spelt out."""
    if self.layer_types is not None:
      return self.layer_types
    cycle = self.inhomogeneous_layer_cycle_interval
    types: tuple[LayerType, ...] = tuple("sliding" if (i + 1) % cycle else "global" for i in range(self.num_decoder_layers))
    return types

  def effective(self, key: str) -> Any:
    """The value of a key, with what it means filled in where it is left out."""
    if key == "inhomogeneous_layer_cycle_interval":
      return None  # another way to write layer_types
    return self.attention_types() if key == "layer_types" else super().effective(key)

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values, each with the keys that take part."""
    yield from super().problems()
    yield from at_least(self, 1, "inhomogeneous_layer_cycle_interval")
    yield from above_zero(self, "local_rope_max_timescale")
    if self.sliding_window_size is None:
      yield Problem("sliding_window_size is not set", ("sliding_window_size",), "set it to the number of keys a token sees")
    elif self.sliding_window_size < 1:
      yield Problem(
        f"sliding_window_size = {self.sliding_window_size}", ("sliding_window_size",),
        "the window counts the token itself, so it is at least 1",
      )  # fmt: skip
    if self.layer_types is not None and len(self.layer_types) != self.num_decoder_layers:
      yield Problem(
        f"layer_types has {len(self.layer_types)} entries, num_decoder_layers is {self.num_decoder_layers}",
        ("layer_types", "num_decoder_layers"),
      )


@dataclass(frozen=True, kw_only=True)
class Config(GemmaConfig):
  """``model:`` of Gemma 3."""

  rope_types = ("default", "linear")

  query_pre_attn_scalar: Mathematics[float | None]  # scores are scaled by this ** -0.5; None is head_dim
  rope_linear_scaling_factor: Mathematics[Annotated[float, When("rope_type", "linear")]]

  def effective(self, key: str) -> Any:
    """The value of a key, with what it means filled in where it is left out."""
    value = super().effective(key)
    return self.head_dim if key == "query_pre_attn_scalar" and value is None else value

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values, each with the keys that take part."""
    yield from super().problems()
    yield from above_zero(self, "rope_linear_scaling_factor", "query_pre_attn_scalar")

  def pointless(self) -> Iterator[Problem]:
    """What can be built, but does nothing or something else than is written."""
    yield from super().pointless()
    if (self.rope_linear_scaling_factor != 1) != (self.rope_type == "linear"):
      yield Problem(
        f"rope_type: {self.rope_type} with rope_linear_scaling_factor = {self.rope_linear_scaling_factor:g}",
        ("rope_type", "rope_linear_scaling_factor"),
        "rope_type: linear goes with a factor other than 1, rope_type: default with 1",
      )


@dataclass(frozen=True, kw_only=True)
class Vision(SquareVision):
  """``vision:`` of Gemma 3."""

  @property
  def frame(self) -> str:
    """Text that stands between an image and the text around it."""
    return "\n\n"

  def unfit(self, model: ModelConfig) -> Iterator[Problem]:
    """What keeps the tower from being built for a decoder; asked with ``use_multimodal`` alone."""
    yield from super().unfit(model)
    if self.patch_size_for_vit < 1 or self.vision_output_length < 1:
      return
    side, rest = divmod(self.image_size_for_vit, self.patch_size_for_vit)
    if side == 0 or rest:
      yield Problem(
        f"image_size_for_vit = {self.image_size_for_vit} is not a multiple of patch_size_for_vit = {self.patch_size_for_vit}",
        ("image_size_for_vit", "patch_size_for_vit"),
      )
    elif (out := math.isqrt(self.vision_output_length)) ** 2 != self.vision_output_length or side % out:
      yield Problem(
        f"a grid of {side} x {side} patches cannot be pooled to vision_output_length = {self.vision_output_length} tokens",
        ("vision_output_length", "image_size_for_vit", "patch_size_for_vit"),
        "it is a square number whose root divides image_size_for_vit / patch_size_for_vit",
      )
