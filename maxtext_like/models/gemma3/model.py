"""Gemma 3: creates the configurations of the layers, of the decoder around them, and of the vision tower."""

from maxtext_like.layers.attention.attention import AttentionConfig
from maxtext_like.layers.attention.rope import RopeConfig
from maxtext_like.layers.block import Block, BlockConfig
from maxtext_like.layers.decoder import DecoderConfig
from maxtext_like.layers.embedding import EmbeddingConfig
from maxtext_like.layers.kernels.attention.registry import Choice
from maxtext_like.layers.mlp import MLPConfig
from maxtext_like.layers.norms import NormConfig
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.vision.gemma3 import SiglipConfig
from maxtext_like.models.gemma3.config import Config, LayerType, Vision


def _norm(m: Config, dim: int) -> NormConfig:
  return NormConfig(dim=dim, epsilon=m.normalization_layer_epsilon, scale_plus_one=True)


def _rope(m: Config, kind: LayerType) -> RopeConfig:
  if kind == "sliding":
    return RopeConfig(dim=m.head_dim, theta=m.local_rope_max_timescale)
  factor = m.rope_linear_scaling_factor if m.rope_type == "linear" else 1.0
  return RopeConfig(dim=m.head_dim, theta=m.rope_max_timescale, kind="linear", factor=factor)


def _layer(m: Config, kind: LayerType, kernel: Choice, platform: str) -> BlockConfig:
  attention = AttentionConfig(
    emb_dim=m.emb_dim,
    num_query_heads=m.num_query_heads,
    num_kv_heads=m.num_kv_heads,
    head_dim=m.head_dim,
    scale=(m.query_pre_attn_scalar or m.head_dim) ** -0.5,
    soft_cap=m.attn_logits_soft_cap,
    rope=_rope(m, kind),
    window=m.sliding_window_size if kind == "sliding" else None,
    norm=_norm(m, m.head_dim),
    bidirectional_images=m.use_bidirectional_image_attn,
    kernel=kernel,
    platform=platform,
  )
  mlp = MLPConfig(emb_dim=m.emb_dim, mlp_dim=m.mlp_dim, activation=m.mlp_activation)
  return BlockConfig(mixer=attention, ffn=mlp, norm=_norm(m, m.emb_dim), sandwich=True)


def decoder(m: Config, precision: Precision, kernel: Choice, platform: str) -> tuple[DecoderConfig, tuple[Block, ...]]:
  """Return the configuration of the decoder, and the layers."""
  cfg = DecoderConfig(
    embedding=EmbeddingConfig(vocab_size=m.vocab_size, emb_dim=m.emb_dim, scale_by_sqrt_dim=True),
    norm=_norm(m, m.emb_dim),
    tied=m.logits_via_embedding,
    final_soft_cap=m.final_logits_soft_cap,
    pad_token_id=m.pad_token_id or 0,
  )
  return cfg, tuple(Block(_layer(m, kind, kernel, platform), precision) for kind in m.attention_types())


def tower(m: Config, v: Vision) -> SiglipConfig:
  """Return the configuration of the vision tower and projector."""
  return SiglipConfig(
    image_size=v.image_size_for_vit,
    patch_size=v.patch_size_for_vit,
    emb_dim=v.hidden_size_for_vit,
    mlp_dim=v.intermediate_size_for_vit,
    num_layers=v.num_hidden_layers_for_vit,
    num_heads=v.num_attention_heads_for_vit,
    tokens_per_image=v.vision_output_length,
    output_dim=m.emb_dim,
    epsilon=v.normalization_layer_epsilon_for_vit,
  )
