"""Qwen3 at Hugging Face: converts config.json of ``qwen3`` and ``qwen3_moe`` to the ``model:`` section and back; tensor names.

Defaults are those of the transformers 5.23 classes. Files on the Hub leave out values that equal them.
"""

from typing import Any

from maxtext_like.checkpoint.huggingface.family import COMMON, GROUPED_ATTENTION, STACKED_EXPERTS, HuggingFace, Rule, gated
from maxtext_like.checkpoint.huggingface.fields import Fields, rope_type
from maxtext_like.models.qwen3.config import Config


def _read(top: Fields) -> dict[str, Any]:
  moe = top.values["model_type"] == "qwen3_moe"
  top.only("hidden_act", "silu", "no other activation is trained here")
  top.only("attention_bias", False, "attention has no biases here")
  top.only("use_sliding_window", False, "every layer is global")
  layers, heads = top.integer("num_hidden_layers", 24 if moe else 32), top.integer("num_attention_heads", 32)
  if set(top.texts("layer_types", layers) or ()) - {"full_attention"}:
    raise top.error("layer_types", "only 'full_attention' is supported")
  width = top.integer("hidden_size", 2048 if moe else 4096)
  # The class with experts has no head_dim.
  head_dim = top.integer("head_dim", max(width // heads, 1) if moe else 128, null=max(width // heads, 1))
  values = {
    "decoder_block": "qwen3",
    "vocab_size": top.integer("vocab_size", 151936),
    "emb_dim": width,
    "mlp_dim": top.integer("intermediate_size", 6144 if moe else 22016),
    "num_decoder_layers": layers,
    "num_query_heads": heads,
    "num_kv_heads": top.integer("num_key_value_heads", 4 if moe else 32, null=heads),
    "head_dim": head_dim,
    "mlp_activation": "silu",
    "normalization_layer_epsilon": top.number("rms_norm_eps", 1e-6),
    "logits_via_embedding": top.boolean("tie_word_embeddings", False),
    "max_position_embeddings": top.integer("max_position_embeddings", 32768, least=2),
    "rope_type": "default",
    "rope_max_timescale": _theta(top),
    "pad_token_id": top.token("pad_token_id", None),
    "bos_token_id": top.token("bos_token_id", None),
    "eos_token_id": top.tokens("eos_token_id", None),
  }
  return values | (_experts(top, layers) if moe else {"num_experts": 0})


def _theta(top: Fields) -> float:
  rope = top.section("rope_scaling" if "rope_scaling" in top else "rope_parameters")
  if (kind := rope_type(rope, "default")) != "default":
    raise rope.error("rope_type", f"'{kind}' is not supported for Qwen3; supported: 'default'")
  for section in (top, rope):
    section.only("partial_rotary_factor", 1.0, "every dimension of a head is rotated", nullable=section is top)
  return (rope if "rope_theta" in rope.values else top).number("rope_theta", 1e4)


def _experts(top: Fields, layers: int) -> dict[str, Any]:
  top.only("decoder_sparse_step", 1, "every layer has experts")
  if top.values.get("mlp_only_layers"):
    raise top.error("mlp_only_layers", "is not empty; every layer has experts here")
  return {
    "num_experts": top.integer("num_local_experts" if "num_local_experts" in top else "num_experts", 128),
    "num_experts_per_tok": top.integer("num_experts_per_tok", 8),
    "moe_mlp_dim": top.integer("moe_intermediate_size", 768),
    "norm_topk_prob": top.boolean("norm_topk_prob", False),
    "load_balance_loss": "huggingface",
    "load_balance_loss_weight": top.number("router_aux_loss_coef", 0.001, zero=True),
  }


def _write(m: Config) -> dict[str, Any]:
  moe = m.num_experts > 0
  experts = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": m.moe_mlp_dim,
    "norm_topk_prob": m.norm_topk_prob,
    "num_experts": m.num_experts,
    "num_experts_per_tok": m.num_experts_per_tok,
    # The weight of another definition would be wrong under this name. If it is missing, transformers uses 0.001.
    "router_aux_loss_coef": m.load_balance_loss_weight if m.load_balance_loss == "huggingface" else 0.0,
  }
  return (experts if moe else {}) | {
    "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
    "model_type": "qwen3_moe" if moe else "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "vocab_size": m.vocab_size,
    "hidden_size": m.emb_dim,
    "intermediate_size": m.mlp_dim,
    "num_hidden_layers": m.num_decoder_layers,
    "num_attention_heads": m.num_query_heads,
    "num_key_value_heads": m.num_kv_heads,
    "head_dim": m.head_dim,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_position_embeddings": m.max_position_embeddings,
    "rms_norm_eps": m.normalization_layer_epsilon,
    "rope_theta": m.rope_max_timescale,
    "rope_scaling": None,
    "tie_word_embeddings": m.logits_via_embedding,
    "pad_token_id": m.pad_token_id,
    "bos_token_id": m.bos_token_id,
    "eos_token_id": m.eos_token_id,
  }


HUGGING_FACE = HuggingFace(
  model_types=("qwen3", "qwen3_moe"),
  read=_read,
  write=_write,
  names={
    **COMMON,
    "mlp_activation": "hidden_act",
    "moe_mlp_dim": "moe_intermediate_size",
    "load_balance_loss_weight": "router_aux_loss_coef",
  },
  layer={
    "pre_attention_norm.scale": Rule("input_layernorm.weight"),
    **GROUPED_ATTENTION,
    "pre_mlp_norm.scale": Rule("post_attention_layernorm.weight"),
    **gated("mlp", "mlp"),
    "moe.router.kernel": Rule("mlp.gate.weight", "linear"),
    **gated("moe.experts", "mlp.experts.{e}"),
  },
  stacked=STACKED_EXPERTS,
)
