"""The ``model:`` and ``vision:`` keys of Gemma 3, and those that Gemma 3 and 4 share."""

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
  """Return the chat template that is published for a model."""
  return "gemma3"


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(GroupedQueryConfig):
  """Keys that Gemma 3 and 4 share: sliding and global layers. ``rope_max_timescale`` applies to the global layers."""

  # layer_types = None: every inhomogeneous_layer_cycle_interval-th layer is global. The stacks of layers follow from it.
  layer_types: Shape[tuple[LayerType, ...] | None]
  inhomogeneous_layer_cycle_interval: Shape[int]
  sliding_window_size: Mathematics[int | None]
  use_bidirectional_image_attn: Mathematics[bool]
  local_rope_max_timescale: Mathematics[float]

  def attention_types(self) -> tuple[LayerType, ...]:
    """Return the type of every layer."""
    if self.layer_types is not None:
      return self.layer_types
    cycle = self.inhomogeneous_layer_cycle_interval
    types: tuple[LayerType, ...] = tuple("sliding" if (i + 1) % cycle else "global" for i in range(self.num_decoder_layers))
    return types

  def effective(self, key: str) -> Any:
    """Return the value of a key, with defaults that depend on other keys filled in."""
    if key == "inhomogeneous_layer_cycle_interval":
      return None  # another way to write layer_types
    return self.attention_types() if key == "layer_types" else super().effective(key)

  def problems(self) -> Iterator[Problem]:
    """Yield every contradiction between values, with the keys that are involved."""
    yield from super().problems()
    yield from at_least(self, 1, "inhomogeneous_layer_cycle_interval")
    yield from above_zero(self, "local_rope_max_timescale")
    if self.sliding_window_size is None:
      yield Problem(
        "sliding_window_size is not set", ("sliding_window_size",), "set it to the number of keys that a token sees"
      )
    elif self.sliding_window_size < 1:
      yield Problem(
        f"sliding_window_size = {self.sliding_window_size}", ("sliding_window_size",),
        "the window counts the token itself, so it is at least 1",
      )  # fmt: skip
    if self.layer_types is not None and len(self.layer_types) != self.num_decoder_layers:
      yield Problem(
        f"layer_types has {len(self.layer_types)} entries, num_decoder_layers is {self.num_decoder_layers}",
        ("layer_types", "num_decoder_layers"),
        fix=f"write {self.num_decoder_layers} entries, one for each layer",
      )


@dataclass(frozen=True, kw_only=True)
class Config(GemmaConfig):
  """``model:`` of Gemma 3."""

  rope_types = ("default", "linear")

  query_pre_attn_scalar: Mathematics[float | None]  # scores are multiplied by this ** -0.5; None means head_dim
  rope_linear_scaling_factor: Mathematics[Annotated[float, When("rope_type", "linear")]]

  def effective(self, key: str) -> Any:
    """Return the value of a key, with defaults that depend on other keys filled in."""
    value = super().effective(key)
    return self.head_dim if key == "query_pre_attn_scalar" and value is None else value

  def problems(self) -> Iterator[Problem]:
    """Yield every contradiction between values, with the keys that are involved."""
    yield from super().problems()
    yield from above_zero(self, "rope_linear_scaling_factor", "query_pre_attn_scalar")

  def ignored_values(self) -> Iterator[Problem]:
    """Yield settings that can be built but have no effect, or another effect than they suggest."""
    yield from super().ignored_values()
    if (self.rope_linear_scaling_factor != 1) != (self.rope_type == "linear"):
      yield Problem(
        f"rope_type: {self.rope_type} with rope_linear_scaling_factor = {self.rope_linear_scaling_factor:g}",
        ("rope_type", "rope_linear_scaling_factor"),
        "use rope_type: linear with a factor other than 1, and rope_type: default with 1",
      )


@dataclass(frozen=True, kw_only=True)
class Vision(SquareVision):
  """``vision:`` of Gemma 3."""

  @property
  def frame(self) -> str:
    """Text between an image and the surrounding text."""
    return "\n\n"

  def decoder_problems(self, model: ModelConfig) -> Iterator[Problem]:
    """Yield the reasons why the tower cannot be built for a decoder. It is called only with ``use_multimodal``."""
    yield from super().decoder_problems(model)
    if self.patch_size_for_vit < 1 or self.vision_output_length < 1:
      return
    side, rest = divmod(self.image_size_for_vit, self.patch_size_for_vit)
    if side == 0 or rest:
      yield Problem(
        f"image_size_for_vit = {self.image_size_for_vit} is not a multiple of patch_size_for_vit = {self.patch_size_for_vit}",
        ("image_size_for_vit", "patch_size_for_vit"),
        fix="set image_size_for_vit to a multiple of patch_size_for_vit",
      )
    elif (out := math.isqrt(self.vision_output_length)) ** 2 != self.vision_output_length or side % out:
      yield Problem(
        f"a grid of {side} x {side} patches cannot be pooled to vision_output_length = {self.vision_output_length} tokens",
        ("vision_output_length", "image_size_for_vit", "patch_size_for_vit"),
        "it must be a square number whose root divides image_size_for_vit / patch_size_for_vit",
      )
