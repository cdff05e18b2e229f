"""How config.json calls what our keys call otherwise, so that a message about a file speaks the file's language."""

import re
from collections.abc import Collection, Mapping

_COMMON = {
  "decoder_block": "model_type",
  "emb_dim": "hidden_size",
  "mlp_dim": "intermediate_size",
  "num_decoder_layers": "num_hidden_layers",
  "num_query_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "normalization_layer_epsilon": "rms_norm_eps",
  "logits_via_embedding": "tie_word_embeddings",
  "rope_max_timescale": "rope_theta",
}
_GEMMA = {
  **_COMMON,
  "mlp_activation": "hidden_activation",
  "final_logits_soft_cap": "final_logit_softcapping",
  "sliding_window_size": "sliding_window",
  "vision_output_length": "default_output_length",
  "patch_size_for_vit": "patch_size",
  "hidden_size_for_vit": "hidden_size",
  "intermediate_size_for_vit": "intermediate_size",
  "num_hidden_layers_for_vit": "num_hidden_layers",
  "num_attention_heads_for_vit": "num_attention_heads",
}
NAMES: dict[str, dict[str, str]] = {
  "gemma3": {
    **_GEMMA,
    "inhomogeneous_layer_cycle_interval": "sliding_window_pattern",
    "local_rope_max_timescale": "rope_local_base_freq",
    "rope_linear_scaling_factor": "factor",
    "image_size_for_vit": "image_size",
    "normalization_layer_epsilon_for_vit": "layer_norm_eps",
    "vision_output_length": "mm_tokens_per_image",
    "image_token_id": "image_token_index",
    "boi_token_id": "boi_token_index",
    "eoi_token_id": "eoi_token_index",
  },
  "gemma4": {
    **_GEMMA,
    "inhomogeneous_layer_cycle_interval": "layer_types",
    "use_bidirectional_image_attn": "use_bidirectional_attention",
    "local_rope_max_timescale": "rope_theta",
    "global_num_kv_heads": "num_global_key_value_heads",
    "share_kv_projections": "attention_k_eq_v",
    "global_rope_proportion": "partial_rotary_factor",
    "num_experts_per_tok": "top_k_experts",
    "moe_mlp_dim": "moe_intermediate_size",
    "head_dim_for_vit": "head_dim",
    "normalization_layer_epsilon_for_vit": "rms_norm_eps",
    "rope_theta_for_vit": "rope_theta",
    "num_position_embeddings_for_vit": "position_embedding_size",
    "pooling_size_for_vit": "pooling_kernel_size",
    "standardize_for_vit": "standardize",
    "use_clipped_linears_for_vit": "use_clipped_linears",
  },
  "deepseek": {
    **_COMMON,
    "num_kv_heads": "num_attention_heads",
    "mlp_activation": "hidden_act",
    "rope_factor": "factor",
    "num_experts": "n_routed_experts",
    "moe_mlp_dim": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "first_num_dense_layers": "first_k_dense_replace",
    "n_routing_groups": "n_group",
    "topk_routing_group": "topk_group",
    "indexer_n_heads": "index_n_heads",
    "indexer_head_dim": "index_head_dim",
    "indexer_topk": "index_topk",
  },
}
"""Our key to config.json's, by ``decoder_block``; what is not here has the same name."""


def in_config_json(text: str, names: Mapping[str, str], own: Collection[str] = ()) -> str:
  """A message with config.json's names for ours.

  Args:
    text: the message.
    names: of the family.
    own: keys that stay, because someone wrote them: on the command line, say.
  """
  return re.sub(r"\b\w+\b", lambda word: word[0] if word[0] in own else names.get(word[0], word[0]), text)
