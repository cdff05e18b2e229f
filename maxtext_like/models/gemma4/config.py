"""The ``model:`` and ``vision:`` keys of Gemma 4."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from maxtext_like.config.key_class import Mathematics, Shape, When, does_something
from maxtext_like.config.model import ExpertsConfig, ModelConfig, divides_heads, even
from maxtext_like.config.problems import Problem, above_zero, at_least
from maxtext_like.config.vision import PatchVision
from maxtext_like.models.gemma3.config import GemmaConfig

SPELLINGS = {
  "start_of_turn": ("<|turn>",),
  "end_of_turn": ("<turn|>",),
  "start_of_image": ("<|image>",),
  "end_of_image": ("<image|>",),
  "image": ("<|image|>",),
}

_PER_LAYER = When("hidden_size_per_layer_input")


def chat_template(model: "Config") -> str:
  """Return the chat template that is published for a model. E2B and E4B, with per-layer embeddings, have their own."""
  return "gemma4-small" if model.hidden_size_per_layer_input else "gemma4"


@dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig, GemmaConfig):
  """``model:`` of Gemma 4. ``head_dim`` and ``num_kv_heads`` apply to the sliding layers."""

  parts = frozenset({"experts", "vision pooler"})

  # In the per-layer embedding, the tokens of an image use the row of the padding token.
  pad_token_id: Mathematics[Annotated[int | None, _PER_LAYER]]
  global_head_dim: Shape[int | None]
  global_num_kv_heads: Shape[Annotated[int | None, When("share_kv_projections")]]
  share_kv_projections: Shape[bool]  # "k_eq_v": global layers take v from the raw k projection
  num_kv_shared_layers: Shape[int]
  use_double_wide_mlp: Shape[bool]
  hidden_size_per_layer_input: Shape[int]
  vocab_size_per_layer_input: Shape[Annotated[int | None, _PER_LAYER]]  # None: vocab_size
  global_rope_proportion: Mathematics[float]

  def effective(self, key: str) -> Any:
    """Return the value of a key, with defaults that depend on other keys filled in."""
    value = super().effective(key)
    if not does_something(self, key):
      return value
    meant = {
      "global_head_dim": self.head_dim,
      "global_num_kv_heads": self.num_kv_heads,
      "vocab_size_per_layer_input": self.vocab_size,
    }
    return meant.get(key) if value is None else value

  def problems(self) -> Iterator[Problem]:
    """Yield every contradiction between values, with the keys that are involved."""
    yield from super().problems()
    yield from at_least(self, 0, "num_kv_shared_layers", "hidden_size_per_layer_input")
    yield from at_least(self, 1, "global_head_dim", "global_num_kv_heads", "vocab_size_per_layer_input")
    yield from divides_heads(self, "global_num_kv_heads")
    yield from even(self, "global_head_dim")
    listed = self.layer_types is None or len(self.layer_types) == self.num_decoder_layers
    if listed and self.num_decoder_layers >= 1 and self.inhomogeneous_layer_cycle_interval >= 1:
      yield from self._sharing_problems()
    if not 0 < self.global_rope_proportion <= 1:
      yield Problem(
        f"global_rope_proportion = {self.global_rope_proportion:g} is outside (0, 1]",
        ("global_rope_proportion",),
        fix="set global_rope_proportion above 0 and at most 1",
      )

  def _sharing_problems(self) -> Iterator[Problem]:
    L, types, shared = self.num_decoder_layers, self.attention_types(), self.num_kv_shared_layers
    if shared >= L:
      yield Problem(
        f"num_kv_shared_layers = {shared} of num_decoder_layers = {L}", ("num_kv_shared_layers", "num_decoder_layers"),
        "the last layers reuse keys and values of earlier layers, so at least one layer must have its own",
      )  # fmt: skip
    elif shared > 0:
      owners, sharers = types[: L - shared], types[L - shared :]
      for kind in sorted(set(sharers) - set(owners)):
        yield Problem(
          f"a {kind} layer among the last {shared} reuses keys and values, but none of the first {L - shared} is {kind}",
          ("num_kv_shared_layers", "num_decoder_layers", "inhomogeneous_layer_cycle_interval", "layer_types"),
          "share fewer layers",
        )

  def ignored_values(self) -> Iterator[Problem]:
    """Yield settings that can be built but have no effect, or another effect than they suggest."""
    yield from super().ignored_values()
    cycle, L = self.inhomogeneous_layer_cycle_interval, self.num_decoder_layers
    last_is_sliding = self.layer_types[-1] == "sliding" if self.layer_types else cycle >= 1 and L % cycle != 0
    if last_is_sliding:
      keys = ("layer_types",) if self.layer_types else ("num_decoder_layers", "inhomogeneous_layer_cycle_interval")
      yield Problem(
        f"the last of {L} layers would be sliding; the last layer of Gemma 4 is global", keys,
        "make num_decoder_layers a multiple of inhomogeneous_layer_cycle_interval, or end layer_types with global",
      )  # fmt: skip
    if self.use_double_wide_mlp and self.num_kv_shared_layers == 0:
      yield Problem(
        "use_double_wide_mlp widens the layers that reuse keys and values, but there are none",
        ("use_double_wide_mlp", "num_kv_shared_layers"),
        "set num_kv_shared_layers, or a larger mlp_dim",
      )
    if self.global_num_kv_heads is not None and not self.share_kv_projections:
      yield Problem(
        f"global_num_kv_heads = {self.global_num_kv_heads} without share_kv_projections",
        ("global_num_kv_heads", "share_kv_projections"),
        "global layers can have their own number of kv heads only with share_kv_projections: true",
      )
    if self.vocab_size_per_layer_input is not None and self.hidden_size_per_layer_input == 0:
      yield Problem(
        f"vocab_size_per_layer_input = {self.vocab_size_per_layer_input} without a per-layer embedding",
        ("vocab_size_per_layer_input", "hidden_size_per_layer_input"),
        "set hidden_size_per_layer_input",
      )


@dataclass(frozen=True, kw_only=True)
class Vision(PatchVision):
  """``vision:`` of Gemma 4."""

  placeholder_keys = ("image_token_id", "video_token_id", "audio_token_id")

  head_dim_for_vit: Shape[int | None]  # None: hidden_size_for_vit / num_attention_heads_for_vit
  rope_theta_for_vit: Mathematics[float]
  standardize_for_vit: Shape[bool]
  use_clipped_linears_for_vit: Shape[bool]
  video_token_id: Mathematics[int | None]  # videos are not supported, but the token is looked up as padding
  audio_token_id: Mathematics[int | None]  # the same for sound

  @property
  def head_dim(self) -> int:
    """Size of a head of the tower."""
    return self.head_dim_for_vit or super().head_dim

  def effective(self, key: str) -> Any:
    """Return the value of a key, with the meaning of null filled in."""
    return self.head_dim if key == "head_dim_for_vit" else super().effective(key)

  def divides_heads(self) -> Iterator[Problem]:
    """Yield a problem if the width of the tower must be divided among its heads but is not divisible."""
    if self.head_dim_for_vit is None:
      for problem in super().divides_heads():
        yield replace(problem, fix="set head_dim_for_vit, or make it divisible")

  def problems(self) -> Iterator[Problem]:
    """Yield every contradiction between values, with the keys that are involved."""
    yield from super().problems()
    yield from at_least(self, 0, "video_token_id", "audio_token_id")
    yield from at_least(self, 1, "head_dim_for_vit")
    yield from above_zero(self, "rope_theta_for_vit")

  def decoder_problems(self, model: ModelConfig) -> Iterator[Problem]:
    """Yield the reasons why the tower cannot be built for a decoder. It is called only with ``use_multimodal``."""
    if self.num_attention_heads_for_vit > 0 and self.head_dim % 4:
      yield Problem(
        f"heads of the vision tower have {self.head_dim} elements, which is not a multiple of 4",
        ("head_dim_for_vit", "hidden_size_for_vit", "num_attention_heads_for_vit"),
        "one half of a head is rotated by the column and the other by the row, both in pairs",
      )
    yield from super().decoder_problems(model)
