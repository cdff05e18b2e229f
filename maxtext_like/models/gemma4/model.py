"""Gemma 4: creates the configurations of the layers, of the decoder around them, and of the vision tower."""

import dataclasses

from maxtext_like.layers.attention.attention import AttentionConfig
from maxtext_like.layers.attention.rope import RopeConfig
from maxtext_like.layers.block import Block, BlockConfig
from maxtext_like.layers.decoder import DecoderConfig
from maxtext_like.layers.embedding import EmbeddingConfig
from maxtext_like.layers.kernels.attention.registry import Choice
from maxtext_like.layers.mlp import MLPConfig
from maxtext_like.layers.moe.moe import DenseAndMoEConfig, MoEConfig
from maxtext_like.layers.norms import NormConfig
from maxtext_like.layers.per_layer import PerLayerGateConfig, PerLayerInputConfig
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.vision.gemma4 import Gemma4VisionConfig
from maxtext_like.models.gemma3.config import LayerType
from maxtext_like.models.gemma4.config import Config, Vision


def layer_types(m: Config) -> tuple[LayerType, ...]:
  """Return the type of every layer, sliding or global. The last layer is always global."""
  return (*m.attention_types()[:-1], "global")


def _norm(m: Config, dim: int) -> NormConfig:
  return NormConfig(dim=dim, epsilon=m.normalization_layer_epsilon)


def _attention(m: Config, kind: LayerType, shared: bool, kernel: Choice, platform: str) -> AttentionConfig:
  head_dim, kv_heads = m.head_dim, m.num_kv_heads
  if kind == "sliding":
    rope = RopeConfig(dim=head_dim, theta=m.local_rope_max_timescale)
  else:
    head_dim = m.global_head_dim or head_dim
    if m.share_kv_projections:  # global layers can have their own number of heads only with k_eq_v
      kv_heads = m.global_num_kv_heads or kv_heads
    rope = RopeConfig(dim=head_dim, theta=m.rope_max_timescale, kind="proportional", proportion=m.global_rope_proportion)
  return AttentionConfig(
    emb_dim=m.emb_dim,
    num_query_heads=m.num_query_heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    scale=1.0,
    soft_cap=m.attn_logits_soft_cap,
    rope=rope,
    window=m.sliding_window_size if kind == "sliding" else None,
    norm=_norm(m, head_dim),
    value_norm=True,
    value_is_key=m.share_kv_projections and kind == "global",
    # Every layer with its own keys and values shares them, so later layers reuse those of the last layer of their type.
    shares_kv_as=kind if m.num_kv_shared_layers and not shared else None,
    reuses_kv_of=kind if shared else None,
    bidirectional_images=m.use_bidirectional_image_attn and kind == "sliding",
    kernel=kernel,
    platform=platform,
  )


def _experts(m: Config) -> MoEConfig | None:
  if not m.num_experts:
    return None
  return MoEConfig(
    emb_dim=m.emb_dim,
    mlp_dim=m.moe_mlp_dim,
    num_experts=m.num_experts,
    num_experts_per_tok=m.num_experts_per_tok,
    activation=m.mlp_activation,
    router_norm=dataclasses.replace(_norm(m, m.emb_dim), with_scale=False),
    per_expert_scale=True,
    norm_topk_prob=m.norm_topk_prob,
    losses=m.router_losses,
  )


def decoder(m: Config, precision: Precision, kernel: Choice, platform: str) -> tuple[DecoderConfig, tuple[Block, ...]]:
  """Return the configuration of the decoder, and the layers."""
  types, moe, norm = layer_types(m), _experts(m), _norm(m, m.emb_dim)
  first_shared = m.num_decoder_layers - m.num_kv_shared_layers
  per_layer = per_layer_gate = None
  if m.hidden_size_per_layer_input:
    per_layer = PerLayerInputConfig(
      vocab_size=m.vocab_size_per_layer_input or m.vocab_size,
      num_layers=m.num_decoder_layers,
      width=m.hidden_size_per_layer_input,
      emb_dim=m.emb_dim,
      epsilon=m.normalization_layer_epsilon,
    )
    per_layer_gate = PerLayerGateConfig(emb_dim=m.emb_dim, width=per_layer.width, activation=m.mlp_activation, norm=norm)
  layers = []
  for i, kind in enumerate(types):
    shared = i >= first_shared
    if shared and kind not in types[:first_shared]:
      raise ValueError(f"num_kv_shared_layers={m.num_kv_shared_layers}: no earlier {kind} layer has keys and values to reuse")
    width = m.mlp_dim * (2 if shared and m.use_double_wide_mlp else 1)
    mlp = MLPConfig(emb_dim=m.emb_dim, mlp_dim=width, activation=m.mlp_activation)
    cfg = BlockConfig(
      mixer=_attention(m, kind, shared, kernel, platform),
      ffn=DenseAndMoEConfig(mlp=mlp, moe=moe, norm=norm) if moe else mlp,
      norm=norm,
      sandwich=True,
      per_layer=per_layer_gate,
      layer_scalar=True,
    )
    layers.append(Block(cfg, precision))
  cfg = DecoderConfig(
    embedding=EmbeddingConfig(vocab_size=m.vocab_size, emb_dim=m.emb_dim, scale_by_sqrt_dim=True),
    norm=norm,
    tied=m.logits_via_embedding,
    final_soft_cap=m.final_logits_soft_cap,
    per_layer_input=per_layer,
    pad_token_id=m.pad_token_id or 0,
  )
  return cfg, tuple(layers)


def tower(m: Config, v: Vision) -> Gemma4VisionConfig:
  """Return the configuration of the vision tower and projector."""
  return Gemma4VisionConfig(
    patch_size=v.patch_size_for_vit,
    emb_dim=v.hidden_size_for_vit,
    mlp_dim=v.intermediate_size_for_vit,
    num_layers=v.num_hidden_layers_for_vit,
    num_heads=v.num_attention_heads_for_vit,
    head_dim=v.head_dim,
    position_table_size=v.num_position_embeddings_for_vit,
    output_dim=m.emb_dim,
    pooling=v.pooling_size_for_vit,
    rope_theta=v.rope_theta_for_vit,
    standardize=v.standardize_for_vit,
    clipped=v.use_clipped_linears_for_vit,
    epsilon=v.normalization_layer_epsilon_for_vit,
  )
