"""Gemma 4: the configuration of every layer, of what stands around them, and of the vision tower."""

from maxtext_like.layers.attention import AttentionConfig
from maxtext_like.layers.blocks import GemmaLayer, GemmaLayerConfig
from maxtext_like.layers.decoder import DecoderConfig
from maxtext_like.layers.embedding import EmbeddingConfig, PerLayerInputConfig
from maxtext_like.layers.kernels.attention.registry import Choice
from maxtext_like.layers.mlp import MLPConfig
from maxtext_like.layers.moe import MoEConfig
from maxtext_like.layers.norms import NormConfig
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.rope import RopeConfig
from maxtext_like.layers.vision_gemma4 import Gemma4VisionConfig
from maxtext_like.models.gemma3.config import LayerType
from maxtext_like.models.gemma4.config import Config, Vision


def layer_types(m: Config) -> tuple[LayerType, ...]:
  """Sliding or global, for every layer; the last one is always global."""
  return (*m.attention_types()[:-1], "global")


def _attention(m: Config, kind: LayerType, shared: bool, kernel: Choice, platform: str) -> AttentionConfig:
  head_dim, kv_heads = m.head_dim, m.num_kv_heads
  if kind == "sliding":
    rope = RopeConfig(dim=head_dim, theta=m.local_rope_max_timescale)
  else:
    head_dim = m.global_head_dim or head_dim
    if m.share_kv_projections:  # the global layers' own number of heads holds only together with k_eq_v
      kv_heads = m.global_num_kv_heads or kv_heads
    rope = RopeConfig(dim=head_dim, theta=m.rope_max_timescale, kind="proportional", proportion=m.global_rope_proportion)
  return AttentionConfig(
    emb_dim=m.emb_dim,
    num_query_heads=m.num_query_heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    scale=1.0,
    rope=rope,
    window=m.sliding_window_size if kind == "sliding" else None,
    epsilon=m.normalization_layer_epsilon,
    value_norm=True,
    value_is_key=m.share_kv_projections and kind == "global",
    shared_kv=shared,
    bidirectional_blocks=m.use_bidirectional_image_attn and kind == "sliding",
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
    epsilon=m.normalization_layer_epsilon,
    norm_topk_prob=m.norm_topk_prob,
    load_balance_loss_weight=m.load_balance_loss_weight,
  )


def decoder(m: Config, precision: Precision, kernel: Choice, platform: str) -> tuple[DecoderConfig, tuple[GemmaLayer, ...]]:
  """What surrounds the layers, and the layers."""
  types, moe = layer_types(m), _experts(m)
  first_shared = m.num_decoder_layers - m.num_kv_shared_layers
  layers = []
  for i, kind in enumerate(types):
    shared = i >= first_shared
    width = m.mlp_dim * (2 if shared and m.use_double_wide_mlp else 1)
    cfg = GemmaLayerConfig(
      attention=_attention(m, kind, shared, kernel, platform),
      mlp=MLPConfig(emb_dim=m.emb_dim, mlp_dim=width, activation=m.mlp_activation),
      moe=moe,
      per_layer_dim=m.hidden_size_per_layer_input,
      layer_scalar=True,
      # Every layer that owns keys and values writes them, so the last one before the shared layers is the donor.
      kv_slot=kind if m.num_kv_shared_layers else None,
      epsilon=m.normalization_layer_epsilon,
    )
    layers.append(GemmaLayer(cfg, precision))
  owners = {types[i]: layers[i].cfg.attention for i in range(first_shared)} if m.num_kv_shared_layers else {}
  if missing := set(types[first_shared:]) - set(owners) if m.num_kv_shared_layers else set():
    raise ValueError(f"num_kv_shared_layers={m.num_kv_shared_layers}: no layer before them owns {sorted(missing)} keys")
  per_layer = None
  if m.hidden_size_per_layer_input:
    per_layer = PerLayerInputConfig(
      vocab_size=m.vocab_size_per_layer_input or m.vocab_size,
      num_layers=m.num_decoder_layers,
      width=m.hidden_size_per_layer_input,
      emb_dim=m.emb_dim,
      epsilon=m.normalization_layer_epsilon,
    )
  cfg = DecoderConfig(
    embedding=EmbeddingConfig(vocab_size=m.vocab_size, emb_dim=m.emb_dim, scale_by_sqrt_dim=True),
    norm=NormConfig(dim=m.emb_dim, epsilon=m.normalization_layer_epsilon),
    tied=m.logits_via_embedding,
    final_soft_cap=m.final_logits_soft_cap,
    per_layer_input=per_layer,
    kv_slots=tuple((name, a.num_kv_heads, a.head_dim) for name, a in owners.items()),
    pad_token_id=m.pad_token_id or 0,
  )
  return cfg, tuple(layers)


def tower(m: Config, v: Vision) -> Gemma4VisionConfig:
  """The tower and projector that belong to a decoder."""
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
