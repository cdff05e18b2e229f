"""``model:``, the dimensions and the layer pattern of one model. Names are MaxText's wherever MaxText has the same thing."""

from dataclasses import dataclass
from typing import Literal

LayerType = Literal["sliding", "global"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """What a model is: sizes, layer pattern, rotary tables, experts. Sizes are counts of elements; lengths are tokens."""

  model_name: str
  decoder_block: Literal["gemma3", "gemma4", "deepseek"]
  vocab_size: int
  emb_dim: int
  mlp_dim: int
  num_decoder_layers: int
  num_query_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_activation: Literal["gelu", "silu"]  # gelu is the tanh approximation, as in every Gemma
  normalization_layer_epsilon: float
  logits_via_embedding: bool
  max_position_embeddings: int
  final_logits_soft_cap: float | None
  attention_bias: bool
  query_pre_attn_scalar: float | None  # Gemma 3: scores are scaled by this ** -0.5; None is head_dim

  # Layer pattern of the Gemma families.
  layer_types: tuple[LayerType, ...] | None  # None: every inhomogeneous_layer_cycle_interval-th layer is global
  inhomogeneous_layer_cycle_interval: int
  sliding_window_size: int | None
  global_head_dim: int | None
  global_num_kv_heads: int | None
  share_kv_projections: bool  # Gemma 4 "k_eq_v": global layers take v from the raw k projection
  num_kv_shared_layers: int
  use_double_wide_mlp: bool
  hidden_size_per_layer_input: int
  vocab_size_per_layer_input: int | None  # None: vocab_size
  use_bidirectional_image_attn: bool

  # Rotary position embedding. For Gemma, rope_max_timescale is the global layers'.
  rope_type: Literal["default", "linear", "yarn"]
  rope_max_timescale: float
  local_rope_max_timescale: float
  rope_linear_scaling_factor: float
  global_rope_proportion: float
  rope_factor: float
  beta_fast: float
  beta_slow: float
  mscale: float
  mscale_all_dim: float
  original_max_position_embeddings: int
  rope_interleave: bool

  # Mixture of experts.
  num_experts: int  # 0: none
  num_experts_per_tok: int
  moe_mlp_dim: int
  shared_experts: int
  first_num_dense_layers: int
  norm_topk_prob: bool
  routed_scaling_factor: float
  routed_bias: bool
  routed_bias_update_rate: float
  n_routing_groups: int
  topk_routing_group: int
  load_balance_loss_weight: float

  # Multi-head latent attention and the sparse indexer of DeepSeek.
  q_lora_rank: int  # 0: one query projection
  kv_lora_rank: int
  qk_nope_head_dim: int
  qk_rope_head_dim: int
  v_head_dim: int
  use_indexer: bool
  indexer_n_heads: int
  indexer_head_dim: int
  indexer_topk: int
  indexer_sparse_training: bool  # False: dense warm-up, only the indexer is trained
  indexer_loss_scaling_factor: float

  # Token ids with a meaning for the model.
  pad_token_id: int
  bos_token_id: int
  eos_token_id: int
