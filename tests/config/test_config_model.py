"""The model section: sizes that no model can have are refused when the section is made, by a file or by Python code."""

import dataclasses
from typing import Any

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.config.problems import InvalidSectionError
from maxtext_like.layers.precision import Precision
from maxtext_like.models.build import build_decoder

MODELS: dict[str, Any] = {
  name: load_config(name).config.model
  for name in ("gemma3-tiny", "gemma4-tiny", "gemma4-moe-tiny", "gemma4-e2b-tiny", "deepseek3-tiny", "deepseek3.2-tiny")
}


@pytest.mark.parametrize(
  ("name", "changes", "reason"),
  [
    ("gemma4-tiny", {"num_query_heads": 5, "global_num_kv_heads": None}, "5 is not divisible by num_kv_heads = 2"),
    ("gemma4-tiny", {"num_query_heads": 4, "global_num_kv_heads": 3}, "not divisible by global_num_kv_heads = 3"),
    ("gemma4-tiny", {"head_dim": 31}, "head_dim = 31 is odd"),
    ("gemma4-tiny", {"global_head_dim": 33}, "global_head_dim = 33 is odd"),
    ("gemma4-tiny", {"head_dim": 0}, "head_dim is not set"),
    ("gemma4-tiny", {"sliding_window_size": 0}, "sliding_window_size = 0"),
    ("gemma4-tiny", {"sliding_window_size": None}, "sliding_window_size is not set"),
    ("gemma4-tiny", {"layer_types": ("sliding", "global")}, "layer_types has 2 entries, num_decoder_layers is 6"),
    ("gemma4-tiny", {"num_decoder_layers": 0}, "num_decoder_layers = 0"),
    ("gemma4-tiny", {"inhomogeneous_layer_cycle_interval": 0}, "inhomogeneous_layer_cycle_interval = 0"),
    ("gemma4-tiny", {"vocab_size": 0}, "vocab_size = 0"),
    ("gemma4-tiny", {"final_logits_soft_cap": 0.0}, "final_logits_soft_cap = 0.0"),
    ("gemma3-tiny", {"attn_logits_soft_cap": 0.0}, "attn_logits_soft_cap = 0.0 is not above 0"),
    ("gemma3-tiny", {"attn_logits_soft_cap": 1e5}, "attn_logits_soft_cap = 100000 is outside .*0.0001 to 65504"),
    ("gemma3-tiny", {"attn_logits_soft_cap": 1e-5}, "attn_logits_soft_cap = 1e-05 is outside"),
    ("deepseek3-tiny", {"attn_logits_soft_cap": 50.0}, "scores of latent attention, and of the indexer"),
    ("gemma4-tiny", {"global_rope_proportion": 1.5}, "outside"),
    ("gemma4-tiny", {"normalization_layer_epsilon": 0.0}, "normalization_layer_epsilon"),
    ("gemma4-e2b-tiny", {"num_kv_shared_layers": 9}, "num_kv_shared_layers = 9 of num_decoder_layers = 9"),
    ("gemma4-e2b-tiny", {"num_kv_shared_layers": 8}, "global layer among the last 8"),
    ("gemma4-moe-tiny", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than num_experts = 8"),
    ("gemma4-moe-tiny", {"moe_mlp_dim": 0}, "moe_mlp_dim = 0 with num_experts = 8"),
    ("gemma4-moe-tiny", {"num_experts_per_tok": 0}, "num_experts_per_tok = 0 with num_experts = 8"),
    ("deepseek3-tiny", {"n_routing_groups": 3}, "num_experts = 8 is not divisible by n_routing_groups = 3"),
    ("deepseek3-tiny", {"n_routing_groups": 8}, "groups of 1"),
    ("deepseek3-tiny", {"topk_routing_group": 5}, "topk_routing_group = 5 is more than n_routing_groups = 4"),
    ("deepseek3-tiny", {"num_experts_per_tok": 5}, "more than the 4 experts of topk_routing_group = 2 groups"),
    ("deepseek3-tiny", {"first_num_dense_layers": 5}, "first_num_dense_layers = 5 of num_decoder_layers = 4"),
    ("deepseek3-tiny", {"num_experts": 0}, "num_experts = 0, but 3 layers"),
    ("deepseek3-tiny", {"qk_rope_head_dim": 15}, "qk_rope_head_dim = 15 is odd"),
    ("deepseek3-tiny", {"kv_lora_rank": 0}, "kv_lora_rank is not set"),
    ("deepseek3-tiny", {"routed_bias": False}, "routed_bias_update_rate = 0.001 with routed_bias: false"),
    ("deepseek3.2-tiny", {"indexer_topk": 0}, "indexer_topk is not set"),
    ("deepseek3.2-tiny", {"q_lora_rank": 0}, "use_indexer with q_lora_rank = 0"),
    ("deepseek3.2-tiny", {"indexer_head_dim": 14}, "indexer_head_dim = 14 is less than qk_rope_head_dim = 16"),
    (
      "deepseek3.2-tiny",
      {"indexer_sparse_training": False, "indexer_loss_scaling_factor": 0.0},
      "nothing would be trained",
    ),
  ],
)
def test_impossible_models(name, changes, reason):
  with pytest.raises(InvalidSectionError, match=reason):
    dataclasses.replace(MODELS[name], **changes)


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("gemma3-tiny", {"num_decoder_layers": 8}),  # Gemma 3 may end on a sliding layer
    ("gemma4-tiny", {"global_head_dim": None, "global_num_kv_heads": None}),
    ("deepseek3-tiny", {"num_experts": 0, "first_num_dense_layers": 4}),
    ("deepseek3-tiny", {"q_lora_rank": 0, "attention_bias": True, "norm_topk_prob": False}),
    ("deepseek3.2-tiny", {"indexer_topk": 100_000}),  # more than any sequence: dense attention
    ("deepseek3.2-tiny", {"indexer_sparse_training": False}),
    ("deepseek3.2-tiny", {"indexer_loss_scaling_factor": 0.0}),
  ],
)
def test_unusual_models_are_allowed(name, changes):
  model = dataclasses.replace(MODELS[name], **changes)
  assert {key: getattr(model, key) for key in changes} == changes
  assert len(build_decoder(model, Precision()).layers) == model.num_decoder_layers


def test_layer_types_are_derived_or_given():
  assert MODELS["gemma4-tiny"].attention_types() == ("sliding", "sliding", "global") * 2
  given = ("global", "sliding", "sliding", "sliding", "sliding", "global")
  assert dataclasses.replace(MODELS["gemma4-tiny"], layer_types=given).attention_types() == given
