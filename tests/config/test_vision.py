"""The ``vision:`` section: refusals, and a tower for every Gemma that can be built."""

import dataclasses
from typing import Any

import pytest

from maxtext_like.config.files import model_names
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.models.registry import FAMILIES

GEMMAS = [name for name in model_names() if name.startswith("gemma")]


@pytest.mark.parametrize("name", model_names())
def test_off_unless_asked_for(name):
  assert not load_config(name).config.vision.use_multimodal


@pytest.mark.parametrize("name", GEMMAS)
def test_every_gemma_has_a_tower(name):
  config = load_config(name, ["use_multimodal=true"]).config
  cfg = FAMILIES[config.model.decoder_block].tower(config.model, config.vision)
  assert cfg.output_dim == config.model.emb_dim
  assert cfg.num_layers == config.vision.num_hidden_layers_for_vit


def test_a_family_without_a_tower_is_an_error_of_the_builder_too():
  vision = load_config("gemma3-tiny", ["use_multimodal=true"]).config.vision
  with pytest.raises(ValueError, match="deepseek has no vision tower"):
    FAMILIES["deepseek"].tower(load_config("deepseek3-tiny").config.model, vision)


@pytest.mark.parametrize(
  ("name", "words", "reason"),
  [
    ("deepseek3-tiny", ["use_multimodal=true"], "use_multimodal = true has no effect in decoder_block deepseek"),
    ("deepseek3-tiny", ["hidden_size_for_vit=8"], "hidden_size_for_vit = 8 has no effect"),
    ("gemma3-tiny", ["standardize_for_vit=true"], "standardize_for_vit = true has no effect in decoder_block gemma3"),
    ("gemma4-tiny", ["hidden_size_for_vit=0", "use_multimodal=true"], "hidden_size_for_vit is not set"),
    ("gemma4-tiny", ["image_token_id=null", "use_multimodal=true"], "image_token_id is not set"),
    ("gemma4-tiny", ["image_token_id=261", "use_multimodal=true"], "are 261, 261 and 262"),
    ("gemma4-tiny", ["eoi_token_id=512", "use_multimodal=true"], "eoi_token_id = 512 is outside the vocabulary of 512"),
    ("gemma4-tiny", ["video_token_id=-1"], "video_token_id = -1 is below 0"),
    ("gemma3-tiny", ["audio_token_id=7"], "audio_token_id = 7 has no effect in decoder_block gemma3"),
    ("gemma3-tiny", ["boi_token_id=600", "use_multimodal=true"], "boi_token_id = 600 is outside the vocabulary"),
    ("gemma3-tiny", ["image_size_for_vit=33", "use_multimodal=true"], "not a multiple of patch_size_for_vit = 4"),
    ("gemma3-tiny", ["vision_output_length=15", "use_multimodal=true"], "cannot be pooled to vision_output_length = 15"),
    ("gemma3-tiny", ["vision_output_length=9", "use_multimodal=true"], "cannot be pooled to vision_output_length = 9"),
    ("gemma3-tiny", ["num_attention_heads_for_vit=5", "use_multimodal=true"], "not divisible by num_attention_heads_for_vit"),
    ("gemma4-tiny", ["head_dim_for_vit=10", "use_multimodal=true"], "10 elements, which is not a multiple of 4"),
    ("gemma4-tiny", ["num_position_embeddings_for_vit=47", "use_multimodal=true"], "48 patches"),
    ("gemma4-tiny", ["max_images_per_row=0"], "max_images_per_row = 0 is below 1"),
    ("qwen3-tiny", ["vision_tower=frozen"], "qwen3 models have no vision tower"),
    ("gemma3-tiny", ["vision_tower=frozen"], "vision_tower = frozen with use_multimodal: false"),
    (
      "gemma3-tiny",
      ["vision_tower=adapted", "use_multimodal=true"],
      "vision_tower = adapted needs an adapter, but lora_rank = 0",
    ),
    (
      "gemma4-tiny",
      ["vision_tower=projector", "use_multimodal=true", "trainable_parameters_mask=[mlp]"],
      "vision_tower = projector with trainable_parameters_mask",
    ),
    ("gemma4-tiny", ["pooling_size_for_vit=0"], "pooling_size_for_vit = 0 is below 1"),
  ],
)
def test_contradictions(name, words, reason):
  with pytest.raises(UserError, match=reason) as refused:
    load_config(name, words)
  assert "argument" in str(refused.value)


def test_sizes_do_not_matter_without_the_tower():
  vision: Any = load_config("gemma4-tiny").config.vision
  assert dataclasses.replace(vision, hidden_size_for_vit=0).patches == 144


@pytest.mark.parametrize("name", ["gemma3-tiny", "gemma4-tiny"])
def test_the_image_token_may_lie_beyond_the_table(name):
  """In MaxText the image token is 262144 with a vocabulary of 262144. It is never looked up in the table."""
  assert load_config(name, ["image_token_id=512", "use_multimodal=true"]).config.vision.image_token_id == 512
