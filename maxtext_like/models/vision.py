"""The vision tower of a Gemma: from the ``vision:`` section to the configuration of its layers."""

from maxtext_like.config.model import ModelConfig
from maxtext_like.config.vision import VisionConfig
from maxtext_like.layers.vision_gemma3 import SiglipConfig
from maxtext_like.layers.vision_gemma4 import Gemma4VisionConfig


def tower(model: ModelConfig, vision: VisionConfig) -> SiglipConfig | Gemma4VisionConfig:
  """The tower and projector that belong to a decoder.

  Raises:
    ValueError: the family has no tower, or sizes that no tower can have.
  """
  if model.decoder_block == "gemma3":
    return SiglipConfig(
      image_size=vision.image_size_for_vit,
      patch_size=vision.patch_size_for_vit,
      emb_dim=vision.hidden_size_for_vit,
      mlp_dim=vision.intermediate_size_for_vit,
      num_layers=vision.num_hidden_layers_for_vit,
      num_heads=vision.num_attention_heads_for_vit,
      tokens_per_image=vision.vision_output_length,
      output_dim=model.emb_dim,
      epsilon=vision.normalization_layer_epsilon_for_vit,
    )
  if model.decoder_block == "gemma4":
    return Gemma4VisionConfig(
      patch_size=vision.patch_size_for_vit,
      emb_dim=vision.hidden_size_for_vit,
      mlp_dim=vision.intermediate_size_for_vit,
      num_layers=vision.num_hidden_layers_for_vit,
      num_heads=vision.num_attention_heads_for_vit,
      head_dim=vision.head_dim,
      position_table_size=vision.num_position_embeddings_for_vit,
      output_dim=model.emb_dim,
      pooling=vision.pooling_size_for_vit,
      rope_theta=vision.rope_theta_for_vit,
      standardize=vision.standardize_for_vit,
      clipped=vision.use_clipped_linears_for_vit,
      epsilon=vision.normalization_layer_epsilon_for_vit,
    )
  raise ValueError(f"decoder_block {model.decoder_block} has no vision tower")
