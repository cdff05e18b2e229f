"""Keys of a config.json that nothing reads: harmless, reported, or refused because they change the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from maxtext_like.checkpoint.huggingface.config import interpret
from maxtext_like.checkpoint.huggingface.unread import HARMLESS, OTHER_MODEL, WITHOUT_EFFECT
from maxtext_like.errors import UserError

GOLDEN = Path(__file__).parents[2] / "golden"
FILES = [*GOLDEN.glob("*/checkpoint/config.json"), *GOLDEN.glob("*/config_as_saved_by_transformers.json")]
RELEASED = {  # further keys of the released files
  "qwen3": {"max_window_layers": 28, "sliding_window": None, "rope_scaling": None, "attention_dropout": 0.0},
  "deepseek3": {"auto_map": {"AutoConfig": "a.B"}, "ep_size": 1, "pretraining_tp": 1, "aux_loss_alpha": 0.001, "seq_aux": True},
  "gemma3_vision": {
    "eoi_token_index": 4,
    "initializer_range": 0.02,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
  },
  "gemma4_dense": {"boa_token_id": 5, "audio_config": {"hidden_size": 3}, "vision_soft_tokens_per_image": 280},
}


def notes(case: str, change: dict[str, Any], section: str = "") -> tuple[str, ...]:
  config = json.loads((GOLDEN / case / "checkpoint" / "config.json").read_text())
  (config[section] if section else config).update(change)
  return interpret(config, "config.json").notes


def test_the_tables_do_not_overlap():
  assert not HARMLESS & OTHER_MODEL.keys()
  assert not HARMLESS & WITHOUT_EFFECT.keys()
  assert not OTHER_MODEL.keys() & WITHOUT_EFFECT.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-3:]))
def test_files_of_transformers_and_of_releases_are_read_completely(path):
  assert interpret(json.loads(path.read_text()), "config.json").notes == ()


@pytest.mark.parametrize("case", RELEASED)
def test_keys_of_releases_are_harmless(case):
  assert notes(case, RELEASED[case]) == ()


@pytest.mark.parametrize(
  ("case", "section", "change", "said"),
  [
    (
      "qwen3",
      "",
      {"attention_dropout": 0.1},
      "config.json: attention_dropout = 0.1 has no effect: this project trains without dropout",
    ),
    (
      "gemma3_text",
      "",
      {"attn_logit_softcapping": 50.0},
      "attn_logit_softcapping = 50.0 has no effect: transformers' class ignores it",
    ),
    ("deepseek3", "", {"num_nextn_predict_layers": 1}, "the layers that predict further tokens are ignored"),
    ("qwen3", "", {"flux_capacitor": 1.21}, "config.json: flux_capacitor = 1.21 is not read; if it changes the equations"),
    ("gemma3_vision", "text_config", {"new_scale": [1]}, "config.json: text_config: new_scale = [1] is not read"),
    ("gemma3_vision", "vision_config", {"new_norm": "x"}, "config.json: vision_config: new_norm = 'x' is not read"),
    ("deepseek3", "rope_scaling", {"attn_factor": 2.0}, "config.json: rope_scaling: attn_factor = 2.0 is not read"),
  ],
)
def test_keys_that_may_matter_are_reported(case, section, change, said):
  (note,) = notes(case, change, section)
  assert said in note


@pytest.mark.parametrize(
  ("case", "change", "said"),
  [
    (
      "deepseek32",
      {"index_topk_freq": 4},
      "index_topk_freq: 4 is not supported: ",
    ),
    ("qwen3", {"dual_chunk_attention_config": {"chunk_size": 8}}, "attention is not divided into chunks"),
    ("qwen3", {"embedding_multiplier": 12.0}, "embeddings have the scale of the family"),
    ("deepseek3", {"num_key_value_heads": 2}, "num_key_value_heads: differs from num_attention_heads"),
    ("deepseek32", {"layer_types": ["indexed_attention"] * 3 + ["full_attention"]}, "layer_types: "),
    ("qwen3", {"max_position_embeddings": 1}, "config.json: max_position_embeddings: 1 is not an integer from 2"),
  ],
)
def test_keys_that_make_another_model_are_refused(case, change, said):
  with pytest.raises(UserError) as refused:
    notes(case, change)
  assert said in str(refused.value)


@pytest.mark.parametrize(
  ("case", "change"),
  [("deepseek32", {"index_topk_freq": 1}), ("qwen3", {"dual_chunk_attention_config": None}), ("qwen3", {"logit_scale": 1.0}),
   ("qwen3", {"unknown_switch": False}), ("deepseek3", {"num_key_value_heads": None})],
)  # fmt: skip
def test_values_that_change_nothing_are_taken(case, change):
  assert notes(case, change) == ()
