"""Gemma 3 and Gemma 4: the configuration of every layer and of what stands around them."""

from maxtext_like.config.model import LayerType, ModelConfig
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


def layer_types(m: ModelConfig) -> tuple[LayerType, ...]:
  """Sliding or global, for every layer. Gemma 4's last layer is always global."""
  every = m.inhomogeneous_layer_cycle_interval
  types = m.layer_types or tuple("sliding" if (i + 1) % every else "global" for i in range(m.num_decoder_layers))
  return (*types[:-1], "global") if m.decoder_block == "gemma4" else types


def _rope(m: ModelConfig, kind: LayerType, head_dim: int) -> RopeConfig:
  if kind == "sliding":
    return RopeConfig(dim=head_dim, theta=m.local_rope_max_timescale)
  if m.decoder_block == "gemma4":
    return RopeConfig(dim=head_dim, theta=m.rope_max_timescale, kind="proportional", proportion=m.global_rope_proportion)
  factor = m.rope_linear_scaling_factor if m.rope_type == "linear" else 1.0
  return RopeConfig(dim=head_dim, theta=m.rope_max_timescale, kind="linear", factor=factor)


def _attention(m: ModelConfig, kind: LayerType, shared: bool, kernel: Choice, platform: str) -> AttentionConfig:
  gemma4, sliding = m.decoder_block == "gemma4", kind == "sliding"
  head_dim, kv_heads = m.head_dim, m.num_kv_heads
  if gemma4 and not sliding:
    head_dim = m.global_head_dim or head_dim
    if m.share_kv_projections:  # the global layers' own number of heads holds only together with k_eq_v
      kv_heads = m.global_num_kv_heads or kv_heads
  return AttentionConfig(
    emb_dim=m.emb_dim,
    num_query_heads=m.num_query_heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    scale=1.0 if gemma4 else (m.query_pre_attn_scalar or head_dim) ** -0.5,
    rope=_rope(m, kind, head_dim),
    window=m.sliding_window_size if sliding else None,
    epsilon=m.normalization_layer_epsilon,
    norm_plus_one=not gemma4,
    value_norm=gemma4,
    value_is_key=gemma4 and m.share_kv_projections and not sliding,
    shared_kv=shared,
    # Gemma 3: images are bidirectional in every layer; Gemma 4: in sliding layers, where the model has it at all.
    bidirectional_blocks=m.use_bidirectional_image_attn and (sliding or not gemma4),
    kernel=kernel,
    platform=platform,
  )


def decoder(
  m: ModelConfig, precision: Precision, kernel: Choice, platform: str
) -> tuple[DecoderConfig, tuple[GemmaLayer, ...]]:
  """What surrounds the layers, and the layers."""
  gemma4, types = m.decoder_block == "gemma4", layer_types(m)
  first_shared = m.num_decoder_layers - m.num_kv_shared_layers
  moe = None
  if m.num_experts:
    moe = MoEConfig(
      emb_dim=m.emb_dim,
      mlp_dim=m.moe_mlp_dim,
      num_experts=m.num_experts,
      num_experts_per_tok=m.num_experts_per_tok,
      activation=m.mlp_activation,
      epsilon=m.normalization_layer_epsilon,
      norm_topk_prob=m.norm_topk_prob,
      load_balance_loss_weight=m.load_balance_loss_weight,
    )
  layers = []
  for i, kind in enumerate(types):
    shared = i >= first_shared
    width = m.mlp_dim * (2 if shared and m.use_double_wide_mlp else 1)
    cfg = GemmaLayerConfig(
      attention=_attention(m, kind, shared, kernel, platform),
      mlp=MLPConfig(emb_dim=m.emb_dim, mlp_dim=width, activation=m.mlp_activation),
      moe=moe,
      per_layer_dim=m.hidden_size_per_layer_input,
      layer_scalar=gemma4,
      # Every layer that owns keys and values writes them, so the last one before the shared layers is the donor.
      kv_slot=kind if m.num_kv_shared_layers else None,
      epsilon=m.normalization_layer_epsilon,
      norm_plus_one=not gemma4,
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
    norm=NormConfig(dim=m.emb_dim, epsilon=m.normalization_layer_epsilon, scale_plus_one=not gemma4),
    tied=m.logits_via_embedding,
    final_soft_cap=m.final_logits_soft_cap,
    per_layer_input=per_layer,
    kv_slots=tuple((name, a.num_kv_heads, a.head_dim) for name, a in owners.items()),
    pad_token_id=m.pad_token_id or 0,
  )
  return cfg, tuple(layers)
