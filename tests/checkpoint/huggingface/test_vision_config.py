"""``vision_config`` of a config.json: both forms give one tower, it is written back, and unsupported values are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from maxtext_like.checkpoint.huggingface.config import HuggingFaceConfig, export_config, interpret, read_config
from maxtext_like.config.load import load_config, make_section
from maxtext_like.config.vision import VisionConfig
from maxtext_like.errors import UserError

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = ["gemma3_vision", "gemma4_vision_large", "gemma4_vision_small", "stress_fp16_vision"]


def vision_of(config: HuggingFaceConfig, **changes: Any) -> VisionConfig:
  return make_section("vision", config.model | config.vision | changes)


@pytest.mark.parametrize("case", CASES)
def test_both_forms_give_the_same_tower_and_it_is_written_back(case: str):
  saved = json.loads((GOLDEN / case / "config_as_saved_by_transformers.json").read_text())
  from_hub, from_saved = read_config(GOLDEN / case / "checkpoint"), interpret(saved, "saved")
  assert from_hub.vision == from_saved.vision
  assert from_hub.vision["hidden_size_for_vit"] > 0
  model, vision = make_section("model", from_hub.model), vision_of(from_hub, use_multimodal=True)
  exported = json.loads(json.dumps(export_config(model, "bfloat16", vision)))
  again = interpret(exported, "exported")
  assert again.vision == from_hub.vision
  assert again.model == from_hub.model
  assert again.multimodal
  assert exported["architectures"] == json.loads((GOLDEN / case / "checkpoint" / "config.json").read_text())["architectures"]


def test_a_text_model_has_no_tower():
  assert read_config(GOLDEN / "gemma3_text" / "checkpoint").vision == {}
  nested = read_config(GOLDEN / "gemma4_moe" / "checkpoint")
  assert not nested.has_tower
  assert nested.vision == {"image_token_id": 10000, "video_token_id": 10003, "audio_token_id": 10004}
  model = make_section("model", read_config(GOLDEN / "gemma3_text" / "checkpoint").model)
  assert "vision_config" not in export_config(model, "bfloat16", vision_of(nested))


@pytest.mark.parametrize(
  ("name", "vision", "top"),
  [
    (
      "gemma3-4b",
      {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
      | {"image_size": 896, "patch_size": 14, "vision_use_head": False},
      {"model_type": "gemma3", "mm_tokens_per_image": 256},
    ),
    (
      "gemma4-31b",
      {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
      | {"num_key_value_heads": 16, "head_dim": 72, "standardize": True, "rope_parameters": {"rope_theta": 100.0}},
      {"model_type": "gemma4"},
    ),
    ("gemma4-e2b", {"use_clipped_linears": True, "rope_parameters": {"rope_type": "axial"}}, {"model_type": "gemma4"}),
  ],
)
def test_released_files_are_our_model_files(name: str, vision: dict[str, Any], top: dict[str, Any]):
  """The files omit most fields, as on the Hub. The omitted fields have the defaults of the classes."""
  found = interpret(top | {"text_config": {}, "vision_config": vision}, "config.json")
  assert vision_of(found) == load_config(name).config.vision


@pytest.mark.parametrize(
  ("case", "change", "message"),
  [
    ("gemma3_vision", {"model_type": "clip_vision_model"}, "model_type: 'clip_vision_model' is not supported"),
    ("gemma3_vision", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
    ("gemma3_vision", {"num_channels": 1}, "num_channels: 1 is not supported"),
    ("gemma3_vision", {"image_size": [42, 42]}, "image_size: .* is not an integer"),
    ("gemma4_vision_large", {"num_key_value_heads": 1}, "num_key_value_heads: differs from num_attention_heads, 3"),
    ("gemma4_vision_large", {"attention_bias": True}, "attention_bias: True is not supported"),
    ("gemma4_vision_large", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type: 'yarn' is not supported"),
    ("gemma4_vision_large", {"standardize": 1}, "standardize: 1 is not true or false"),
  ],
)
def test_what_is_not_supported_is_refused_by_name(case: str, change: dict[str, Any], message: str):
  config = json.loads((GOLDEN / case / "checkpoint" / "config.json").read_text())
  config["vision_config"] |= change
  with pytest.raises(UserError, match=f"config.json: vision_config.*: {message}"):
    interpret(config, "config.json")
