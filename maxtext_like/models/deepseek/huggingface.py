"""DeepSeek V3 and V3.2 at Hugging Face: converts config.json to the ``model:`` section and back; tensor names.

Defaults are those of the transformers 5.23 classes. Files on the Hub leave out values that equal them.
"""

from collections.abc import Mapping
from typing import Any

from maxtext_like.checkpoint.huggingface.family import COMMON, STACKED_EXPERTS, HuggingFace, Rule, gated
from maxtext_like.checkpoint.huggingface.fields import REFUSED, Fields, rope_type
from maxtext_like.models.deepseek.config import Config


def _read(top: Fields) -> dict[str, Any]:
  """Return the model section of a ``deepseek_v3`` or ``deepseek_v32`` config.json."""
  sparse = top.values["model_type"] == "deepseek_v32"
  top.only("hidden_act", "silu", "no other activation is trained here")
  top.only("scoring_func", "sigmoid", "the router of V3", nullable=True)
  top.only("topk_method", "noaux_tc", "the router of V3", nullable=True)
  top.only("moe_layer_freq", 1, "every layer after the dense ones has experts", nullable=True)
  top.only("mlp_bias", False, "the MLPs have no biases", nullable=not sparse)
  null_is_false = REFUSED if sparse else False  # V3.2's class does not accept null
  layers = top.integer("num_hidden_layers", 61)
  heads = top.integer("num_attention_heads", 128)
  if top.integer("num_key_value_heads", heads, null=heads) != heads:
    raise top.error("num_key_value_heads", f"differs from num_attention_heads, {heads}: each query head has its own keys here")
  if sparse and set(top.texts("layer_types", layers) or ()) - {"indexed_attention"}:
    raise top.error("layer_types", "only 'indexed_attention' is supported")
  nope, rotary = top.integer("qk_nope_head_dim", 128), top.integer("qk_rope_head_dim", 64)
  q_rank = top.integer("q_lora_rank", 1536, null=None)
  if sparse and q_rank is None:
    raise top.error("q_lora_rank", "is null; the indexer of V3.2 reads the query latent")
  experts_key = "num_experts" if sparse and "num_experts" in top else "n_routed_experts"
  position_default = 163840 if sparse else 4096
  return _rope(top, position_default) | {
    "decoder_block": "deepseek",
    "vocab_size": top.integer("vocab_size", 129280),
    "emb_dim": top.integer("hidden_size", 7168),
    "mlp_dim": top.integer("intermediate_size", 18432),
    "num_decoder_layers": layers,
    "num_query_heads": heads,
    "num_kv_heads": heads,
    "mlp_activation": "silu",
    "normalization_layer_epsilon": top.number("rms_norm_eps", 1e-6),
    "logits_via_embedding": top.boolean("tie_word_embeddings", False),
    "max_position_embeddings": top.integer("max_position_embeddings", position_default, least=2),
    "attention_bias": top.boolean("attention_bias", False),
    "rope_interleave": sparse or top.boolean("rope_interleave", True, null=False),
    "num_experts": top.integer(experts_key, 256),
    "num_experts_per_tok": top.integer("num_experts_per_tok", 8),
    "moe_mlp_dim": top.integer("moe_intermediate_size", 2048),
    "shared_experts": top.integer("n_shared_experts", 1, least=0),
    "first_num_dense_layers": _dense_layers(top, layers),
    "norm_topk_prob": top.boolean("norm_topk_prob", True, null=null_is_false),
    "routed_scaling_factor": top.number("routed_scaling_factor", 2.5),
    "routed_bias": True,
    # Released files have both keys, for DeepSeek's own code. transformers reads neither, so a missing key means no loss.
    "load_balance_loss": "deepseek_sequence" if top.boolean("seq_aux", True, null=True) else "switch",
    "load_balance_loss_weight": top.number("aux_loss_alpha", 0.0, zero=True, null=0.0),
    "n_routing_groups": top.integer("n_group", 8),
    "topk_routing_group": top.integer("topk_group", 4),
    "q_lora_rank": q_rank or 0,
    "kv_lora_rank": top.integer("kv_lora_rank", 512),
    "qk_nope_head_dim": nope,
    "qk_rope_head_dim": rotary,
    "v_head_dim": top.integer("v_head_dim", 128),
    "use_indexer": sparse,
    "indexer_n_heads": top.integer("index_n_heads", 64) if sparse else 0,
    "indexer_head_dim": top.integer("index_head_dim", 128) if sparse else 0,
    "indexer_topk": top.integer("index_topk", 2048) if sparse else 0,
    "pad_token_id": top.token("pad_token_id", None),
    "bos_token_id": top.token("bos_token_id", 0),
    "eos_token_id": top.tokens("eos_token_id", 1),
  }


def _dense_layers(top: Fields, layers: int) -> int:
  """Return the number of layers, from the first one, that have an MLP instead of experts."""
  dense = min(top.integer("first_k_dense_replace", 3, least=0), layers)
  kinds = top.texts("mlp_layer_types", layers)
  if kinds is None:
    return dense
  dense = kinds.index("sparse") if "sparse" in kinds else layers
  if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
    raise top.error("mlp_layer_types", "only dense layers followed by sparse layers are supported")
  return dense


def _rope(top: Fields, position_default: int) -> dict[str, Any]:
  rope = top.section("rope_scaling" if "rope_scaling" in top else "rope_parameters")
  kind = rope_type(rope, "default")
  theta = (rope if "rope_theta" in rope.values else top).number("rope_theta", 1e4)
  values: dict[str, Any] = {"rope_max_timescale": theta}
  for section in (top, rope):
    section.only("partial_rotary_factor", 1.0, "every dimension of the rotary part is rotated", nullable=section is top)
  if kind == "default":
    return values | {"rope_type": "default"}
  if kind != "yarn":
    raise rope.error("rope_type", f"'{kind}' is not supported for DeepSeek; supported: 'default', 'yarn'")
  rope.only("truncate", True, "the ramp of DeepSeek's YaRN ends at whole dimensions")
  if "attention_factor" in rope:
    raise rope.error("attention_factor", "is not supported; it follows from factor, mscale and mscale_all_dim")
  if "factor" not in rope:
    raise rope.error("factor", "is missing; YaRN needs it", fix="download config.json of the model again")
  key = "original_max_position_embeddings"  # at the top level it overrides the one in rope parameters
  trained = top.integer("max_position_embeddings", position_default)
  original = (top if key in top.values else rope).integer(key, trained)
  return values | {
    "rope_type": "yarn",
    "rope_factor": rope.number("factor", 1.0),
    "beta_fast": rope.number("beta_fast", 32.0, null=32.0),
    "beta_slow": rope.number("beta_slow", 1.0, null=1.0),
    "mscale": rope.number("mscale", 0.0, zero=True, null=0.0),
    "mscale_all_dim": rope.number("mscale_all_dim", 0.0, zero=True, null=0.0),
    "original_max_position_embeddings": original,
  }


def _write(model: Config) -> dict[str, Any]:
  """Return config.json, in the Hub's form, of a DeepSeek V3 or V3.2."""
  config: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM" if model.use_indexer else "DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v32" if model.use_indexer else "deepseek_v3",
    "attention_bias": model.attention_bias,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "vocab_size": model.vocab_size,
    "hidden_size": model.emb_dim,
    "intermediate_size": model.mlp_dim,
    "moe_intermediate_size": model.moe_mlp_dim,
    "num_hidden_layers": model.num_decoder_layers,
    "first_k_dense_replace": model.first_num_dense_layers,
    "moe_layer_freq": 1,
    "num_attention_heads": model.num_query_heads,
    "num_key_value_heads": model.num_query_heads,
    "q_lora_rank": model.q_lora_rank or None,
    "kv_lora_rank": model.kv_lora_rank,
    "qk_nope_head_dim": model.qk_nope_head_dim,
    "qk_rope_head_dim": model.qk_rope_head_dim,
    "v_head_dim": model.v_head_dim,
    "n_routed_experts": model.num_experts,
    "n_shared_experts": model.shared_experts,
    "num_experts_per_tok": model.num_experts_per_tok,
    "n_group": max(model.n_routing_groups, 1),
    "topk_group": max(model.topk_routing_group, 1),
    "norm_topk_prob": model.norm_topk_prob,
    "routed_scaling_factor": model.routed_scaling_factor,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,  # the multi-token prediction module is not trained here
    "max_position_embeddings": model.max_position_embeddings,
    "rms_norm_eps": model.normalization_layer_epsilon,
    "rope_theta": model.rope_max_timescale,
    "rope_scaling": None,
    "tie_word_embeddings": model.logits_via_embedding,
    "pad_token_id": model.pad_token_id,
    "bos_token_id": model.bos_token_id,
    "eos_token_id": model.eos_token_id,
  }
  if model.rope_type == "yarn":
    config["rope_scaling"] = {
      "type": "yarn",
      "factor": model.rope_factor,
      "beta_fast": model.beta_fast,
      "beta_slow": model.beta_slow,
      "mscale": model.mscale,
      "mscale_all_dim": model.mscale_all_dim,
      "original_max_position_embeddings": model.original_max_position_embeddings,
    }
  if model.use_indexer:
    config |= {
      "index_n_heads": model.indexer_n_heads,
      "index_head_dim": model.indexer_head_dim,
      "index_topk": model.indexer_topk,
    }
  elif not model.rope_interleave:
    config["rope_interleave"] = False
  if model.load_balance_loss_weight and model.load_balance_loss in ("deepseek_sequence", "switch"):
    config |= {"aux_loss_alpha": model.load_balance_loss_weight, "seq_aux": model.load_balance_loss == "deepseek_sequence"}
  return config


def _unused(values: Mapping[str, Any], count: int, layer: int, rest: str) -> str | None:
  if layer < count or layer not in (61, count):
    return None
  return f"tensors of layer {layer}, the multi-token prediction module, are not used"


_NAMES = {
  **COMMON,
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
}

_LAYER = {
  "pre_attention_norm.scale": Rule("input_layernorm.weight"),
  "attention.q": Rule("self_attn.q_proj.weight", "linear"),
  "attention.q_a": Rule("self_attn.q_a_proj.weight", "linear"),
  "attention.q_a_bias": Rule("self_attn.q_a_proj.bias"),
  "attention.q_a_norm.scale": Rule("self_attn.q_a_layernorm.weight"),
  "attention.q_b": Rule("self_attn.q_b_proj.weight", "linear"),
  "attention.kv_a": Rule("self_attn.kv_a_proj_with_mqa.weight", "linear"),
  "attention.kv_a_bias": Rule("self_attn.kv_a_proj_with_mqa.bias"),
  "attention.kv_a_norm.scale": Rule("self_attn.kv_a_layernorm.weight"),
  "attention.kv_b": Rule("self_attn.kv_b_proj.weight", "linear"),
  "attention.o": Rule("self_attn.o_proj.weight", "linear2"),
  "attention.o_bias": Rule("self_attn.o_proj.bias"),
  "attention.indexer.q": Rule("self_attn.indexer.wq_b.weight", "linear"),
  "attention.indexer.k": Rule("self_attn.indexer.wk.weight", "linear"),
  "attention.indexer.k_norm.scale": Rule("self_attn.indexer.k_norm.weight"),
  "attention.indexer.k_norm.bias": Rule("self_attn.indexer.k_norm.bias"),
  "attention.indexer.weights": Rule("self_attn.indexer.weights_proj.weight", "linear"),
  "pre_mlp_norm.scale": Rule("post_attention_layernorm.weight"),
  **gated("mlp", "mlp"),
  "moe.router.kernel": Rule("mlp.gate.weight", "linear"),
  "moe.router.bias": Rule("mlp.gate.e_score_correction_bias", buffer=True, float32=True),
  **gated("moe.experts", "mlp.experts.{e}"),
  **gated("moe.shared", "mlp.shared_experts"),
}


HUGGING_FACE = HuggingFace(
  model_types=("deepseek_v3", "deepseek_v32"),
  read=_read,
  write=_write,
  names=_NAMES,
  layer=_LAYER,
  stacked=STACKED_EXPERTS,
  dense_is_moe=True,
  unused=_unused,
)
