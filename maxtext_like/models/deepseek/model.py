"""DeepSeek V3 and V3.2: creates the configurations of the layers and of the decoder around them."""

from maxtext_like.layers.attention.indexer import IndexerConfig
from maxtext_like.layers.attention.mla import MLAConfig
from maxtext_like.layers.attention.rope import RopeConfig
from maxtext_like.layers.block import Block, BlockConfig
from maxtext_like.layers.decoder import DecoderConfig
from maxtext_like.layers.embedding import EmbeddingConfig
from maxtext_like.layers.kernels.attention.registry import Choice
from maxtext_like.layers.mlp import MLPConfig
from maxtext_like.layers.moe.moe import MoEConfig
from maxtext_like.layers.norms import NormConfig
from maxtext_like.layers.precision import Precision
from maxtext_like.models.deepseek.config import Config


def _rope(m: Config) -> RopeConfig:
  return RopeConfig(
    dim=m.qk_rope_head_dim,
    theta=m.rope_max_timescale,
    kind=m.rope_type,
    factor=m.rope_factor,
    beta_fast=m.beta_fast,
    beta_slow=m.beta_slow,
    original_max_position_embeddings=m.original_max_position_embeddings,
    mscale=m.mscale,
    mscale_all_dim=m.mscale_all_dim,
    interleave=m.rope_interleave,
  )


def _attention(m: Config, kernel: Choice, platform: str) -> MLAConfig:
  indexer = None
  if m.use_indexer:
    indexer = IndexerConfig(
      emb_dim=m.emb_dim,
      q_lora_rank=m.q_lora_rank,
      num_heads=m.indexer_n_heads,
      head_dim=m.indexer_head_dim,
      topk=m.indexer_topk,
      rope=_rope(m),
    )
  return MLAConfig(
    emb_dim=m.emb_dim,
    num_heads=m.num_query_heads,
    q_lora_rank=m.q_lora_rank,
    kv_lora_rank=m.kv_lora_rank,
    nope_dim=m.qk_nope_head_dim,
    rope_dim=m.qk_rope_head_dim,
    value_dim=m.v_head_dim,
    rope=_rope(m),
    bias=m.attention_bias,
    indexer=indexer,
    indexer_sparse=m.indexer_sparse_training,
    indexer_loss_weight=m.indexer_loss_scaling_factor,
    kernel=kernel,
    platform=platform,
  )


def decoder(m: Config, precision: Precision, kernel: Choice, platform: str) -> tuple[DecoderConfig, tuple[Block, ...]]:
  """Return the configuration of the decoder, and the layers: ``first_num_dense_layers`` with an MLP, the rest with experts."""
  mlp = MLPConfig(emb_dim=m.emb_dim, mlp_dim=m.mlp_dim, activation=m.mlp_activation)
  moe = None
  if m.num_experts:
    moe = MoEConfig(
      emb_dim=m.emb_dim,
      mlp_dim=m.moe_mlp_dim,
      num_experts=m.num_experts,
      num_experts_per_tok=m.num_experts_per_tok,
      activation=m.mlp_activation,
      router="sigmoid",
      norm_topk_prob=m.norm_topk_prob,
      routed_scaling_factor=m.routed_scaling_factor,
      n_groups=max(m.n_routing_groups, 1),
      topk_groups=max(m.topk_routing_group, 1),
      selection_bias=m.routed_bias,
      shared_experts=m.shared_experts,
      losses=m.router_losses,
    )
  attention = _attention(m, kernel, platform)
  norm = NormConfig(dim=m.emb_dim, epsilon=m.normalization_layer_epsilon, round_before_scale=True)
  layers = []
  for i in range(m.num_decoder_layers):
    ffn = mlp if moe is None or i < m.first_num_dense_layers else moe
    layers.append(Block(BlockConfig(mixer=attention, ffn=ffn, norm=norm), precision))
  cfg = DecoderConfig(
    embedding=EmbeddingConfig(vocab_size=m.vocab_size, emb_dim=m.emb_dim),
    norm=norm,
    tied=m.logits_via_embedding,
    final_soft_cap=m.final_logits_soft_cap,
    pad_token_id=m.pad_token_id or 0,
  )
  return cfg, tuple(layers)
