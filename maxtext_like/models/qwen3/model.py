"""Qwen3 (Yang et al. 2025): creates the configurations of the layers and of the decoder around them."""

from maxtext_like.layers.attention.attention import AttentionConfig
from maxtext_like.layers.attention.rope import RopeConfig
from maxtext_like.layers.block import Block, BlockConfig
from maxtext_like.layers.decoder import DecoderConfig
from maxtext_like.layers.embedding import EmbeddingConfig
from maxtext_like.layers.kernels.attention.registry import Choice
from maxtext_like.layers.mlp import MLPConfig
from maxtext_like.layers.moe.moe import MoEConfig
from maxtext_like.layers.norms import NormConfig
from maxtext_like.layers.precision import Precision
from maxtext_like.models.qwen3.config import Config


def decoder(m: Config, precision: Precision, kernel: Choice, platform: str) -> tuple[DecoderConfig, tuple[Block, ...]]:
  """Return the configuration of the decoder, and the layers, which are all equal."""

  def norm(dim: int) -> NormConfig:
    return NormConfig(dim=dim, epsilon=m.normalization_layer_epsilon, round_before_scale=True)

  attention = AttentionConfig(
    emb_dim=m.emb_dim,
    num_query_heads=m.num_query_heads,
    num_kv_heads=m.num_kv_heads,
    head_dim=m.head_dim,
    scale=m.head_dim**-0.5,
    soft_cap=m.attn_logits_soft_cap,
    rope=RopeConfig(dim=m.head_dim, theta=m.rope_max_timescale),
    norm=norm(m.head_dim),
    kernel=kernel,
    platform=platform,
  )
  if m.num_experts:
    ffn = MoEConfig(
      emb_dim=m.emb_dim,
      mlp_dim=m.moe_mlp_dim,
      num_experts=m.num_experts,
      num_experts_per_tok=m.num_experts_per_tok,
      activation=m.mlp_activation,
      norm_topk_prob=m.norm_topk_prob,
      losses=m.router_losses,
    )
  else:
    ffn = MLPConfig(emb_dim=m.emb_dim, mlp_dim=m.mlp_dim, activation=m.mlp_activation)
  layer = Block(BlockConfig(mixer=attention, ffn=ffn, norm=norm(m.emb_dim)), precision)
  cfg = DecoderConfig(
    embedding=EmbeddingConfig(vocab_size=m.vocab_size, emb_dim=m.emb_dim),
    norm=norm(m.emb_dim),
    tied=m.logits_via_embedding,
    final_soft_cap=m.final_logits_soft_cap,
    pad_token_id=m.pad_token_id or 0,
  )
  return cfg, (layer,) * m.num_decoder_layers
