"""Gemma 4 at Hugging Face: converts config.json to the ``model:`` and ``vision:`` sections and back; tensor names.

Defaults are those of the transformers 5.23 classes. Files on the Hub leave out values that equal them.
"""

from collections.abc import Mapping
from typing import Any

from maxtext_like.checkpoint.huggingface.family import HuggingFace, Rule, Tower
from maxtext_like.checkpoint.huggingface.fields import Fields, rope_type
from maxtext_like.models.gemma3.huggingface import (
  GEMMA_NAMES,
  KINDS,
  LAYER,
  TOWER_LAYERS,
  common,
  layer_types,
  plain,
  spelled_as,
  text_of,
  unused_of_towers,
  write_common,
  write_with_tower,
)
from maxtext_like.models.gemma4.config import Config, Vision

_PLACEHOLDERS = {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881}
"""Tokens that are looked up as padding, with and without a tower, and the defaults of the class."""
_SOFT_TOKENS = 280  # default of the image processor; config.json does not contain it


def _read(top: Fields) -> dict[str, Any]:
  """Return the model section of a ``gemma4`` or ``gemma4_text`` config.json."""
  text = text_of(top)
  values = common(top, text, vocab_size=262144, num_hidden_layers=30, sliding_window=512)
  if text.values.get("use_bidirectional_attention") not in (None, "vision"):
    raise text.error("use_bidirectional_attention", "only null and 'vision' are supported, for language models")
  values |= layer_types(text, values["num_decoder_layers"], 6, last_is_global=True)
  values |= _heads(text, values)
  values |= _experts(text)
  width = text.integer("hidden_size_per_layer_input", 256, least=0)
  rows = text.integer("vocab_size_per_layer_input", 262144)
  shared = text.integer("num_kv_shared_layers", 0, least=0)
  if shared >= values["num_decoder_layers"]:
    raise text.error(
      "num_kv_shared_layers", f"{shared} of {values['num_decoder_layers']}: no layer has its own keys and values"
    )
  rope = text.section("rope_parameters")
  full, sliding = rope.section("full_attention"), rope.section("sliding_attention")
  plain(sliding)
  kind = rope_type(full, "proportional" if not full.values else "default")
  if kind not in ("default", "proportional"):
    raise full.error("rope_type", f"'{kind}' is not supported for Gemma 4; supported: 'default', 'proportional'")
  if "rope_parameters" in text:
    for name in KINDS:
      if name not in rope:
        raise rope.error(name, "is missing", fix="download config.json of the model again")
      if "rope_theta" not in rope.section(name).values:
        raise rope.section(name).error("rope_theta", "is missing", fix="download config.json of the model again")
  full.only("factor", 1.0, "no released Gemma 4 scales its positions")
  default = 1.0 if full.values else 0.25
  proportion = full.number("partial_rotary_factor", default) if kind == "proportional" else 1.0
  if proportion > 1:
    raise full.error("partial_rotary_factor", f"{proportion} is above 1, the complete head")
  return values | {
    "decoder_block": "gemma4",
    "num_kv_shared_layers": shared,
    "use_double_wide_mlp": text.boolean("use_double_wide_mlp", False) and shared > 0,
    "hidden_size_per_layer_input": width,
    "vocab_size_per_layer_input": rows if width else None,
    "use_bidirectional_image_attn": text.values.get("use_bidirectional_attention") == "vision",
    "rope_max_timescale": full.number("rope_theta", 1e6 if not full.values else 1e4),
    "local_rope_max_timescale": sliding.number("rope_theta", 1e4),
    "global_rope_proportion": proportion,
  }


def _heads(text: Fields, values: dict[str, Any]) -> dict[str, Any]:
  """Return the heads of the global layers, from the Hub's fields or from ``per_layer_config``, which transformers 5 writes."""
  shared = text.boolean("attention_k_eq_v", False)
  if "per_layer_config" not in text.values:
    return {
      "share_kv_projections": shared,
      "global_head_dim": text.integer("global_head_dim", 512),
      "global_num_kv_heads": text.integer("num_global_key_value_heads", 0, null=None) or None if shared else None,
    }
  layers, per_layer = values["num_decoder_layers"], text.section("per_layer_config")
  every = values["inhomogeneous_layer_cycle_interval"]
  types = values["layer_types"] or ["sliding" if (i + 1) % every else "global" for i in range(layers)]
  overrides: dict[int, Fields] = {}
  for key in per_layer.values:
    if not key.isdecimal() or int(key) >= layers:
      raise per_layer.error(key, f"is not the number of a layer, 0 to {layers - 1}")
    overrides[int(key)] = per_layer.section(key)
    if unknown := sorted(set(overrides[int(key)].values) - {"head_dim", "num_key_value_heads"}):
      raise per_layer.error(key, f"'{unknown[0]}' cannot differ between layers here")
  found = set()
  for i, kind in enumerate(types):
    own = overrides.get(i, Fields({}, per_layer.where))
    sizes = own.integer("head_dim", values["head_dim"]), own.integer("num_key_value_heads", values["num_kv_heads"])
    if kind == "global":
      found.add(sizes)
    elif sizes != (values["head_dim"], values["num_kv_heads"]):
      raise per_layer.error(str(i), "a sliding layer with different sizes is not supported")
  if len(found) > 1:
    raise per_layer.error("head_dim", f"global layers differ from each other: {sorted(found)}; not supported")
  head_dim, kv_heads = found.pop() if found else (values["head_dim"], values["num_kv_heads"])
  if not shared and kv_heads != values["num_kv_heads"]:
    raise per_layer.error("num_key_value_heads", "global layers can have another number only with attention_k_eq_v")
  return {
    "share_kv_projections": shared,
    "global_head_dim": head_dim,
    "global_num_kv_heads": kv_heads if shared and kv_heads != values["num_kv_heads"] else None,
  }


def _experts(text: Fields) -> dict[str, Any]:
  if not text.boolean("enable_moe_block", False):
    return {}
  sizes = {}
  for ours, theirs in [
    ("num_experts", ("num_experts",)),
    ("num_experts_per_tok", ("top_k_experts",)),
    ("moe_mlp_dim", ("moe_intermediate_size", "expert_intermediate_size")),
  ]:
    key = next((key for key in theirs if key in text), None)
    if key is None:
      raise text.error(theirs[0], "is missing; enable_moe_block needs it", fix="download config.json of the model again")
    sizes[ours] = text.integer(key, 0)
  return sizes | {"norm_topk_prob": True}


def _write(model: Config) -> dict[str, Any]:
  moe = model.num_experts > 0
  return write_common(model) | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_k_eq_v": model.share_kv_projections,
    "global_head_dim": model.global_head_dim or model.head_dim,
    "num_global_key_value_heads": model.global_num_kv_heads if model.share_kv_projections else None,
    "num_kv_shared_layers": model.num_kv_shared_layers,
    "use_double_wide_mlp": model.use_double_wide_mlp,
    "hidden_size_per_layer_input": model.hidden_size_per_layer_input,
    "vocab_size_per_layer_input": model.vocab_size_per_layer_input or model.vocab_size,
    "use_bidirectional_attention": "vision" if model.use_bidirectional_image_attn else None,
    "enable_moe_block": moe,
    "num_experts": model.num_experts if moe else None,
    "top_k_experts": model.num_experts_per_tok if moe else None,
    "moe_intermediate_size": model.moe_mlp_dim if moe else None,
    "rope_parameters": {
      "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": model.global_rope_proportion,
        "rope_theta": model.rope_max_timescale,
      },
      "sliding_attention": {"rope_type": "default", "rope_theta": model.local_rope_max_timescale},
    },
  }


def _read_tower(top: Fields) -> dict[str, Any]:
  """Return the vision section. Without a tower it has only the placeholder tokens; null means that a token does not exist."""
  if top.values["model_type"] != "gemma4":
    return {}
  placeholders = {key: top.token(key, default) for key, default in _PLACEHOLDERS.items()}
  if "vision_config" not in top:
    return placeholders
  vision = top.section("vision_config")
  vision.only("model_type", "gemma4_vision", "the tower of Gemma 4")
  vision.only("hidden_activation", "gelu_pytorch_tanh", "no other activation is trained here")
  vision.only("attention_bias", False, "the tower has no biases here", nullable=True)
  heads = vision.integer("num_attention_heads", 12)
  if vision.integer("num_key_value_heads", 12) != heads:
    raise vision.error("num_key_value_heads", f"differs from num_attention_heads, {heads}; not supported")
  rope = vision.section("rope_parameters")
  if rope.text("rope_type", "axial") not in ("axial", "default"):
    raise rope.error("rope_type", f"'{rope.values['rope_type']}' is not supported; supported: 'axial', 'default'")
  pooling, rows = vision.integer("pooling_kernel_size", 3), vision.integer("position_embedding_size", 10240)
  return placeholders | {
    "patch_size_for_vit": vision.integer("patch_size", 16),
    "hidden_size_for_vit": vision.integer("hidden_size", 768),
    "intermediate_size_for_vit": vision.integer("intermediate_size", 3072),
    "num_hidden_layers_for_vit": vision.integer("num_hidden_layers", 16),
    "num_attention_heads_for_vit": heads,
    "head_dim_for_vit": vision.integer("head_dim", 64),
    "normalization_layer_epsilon_for_vit": vision.number("rms_norm_eps", 1e-6),
    "rope_theta_for_vit": rope.number("rope_theta", 100.0),
    "num_position_embeddings_for_vit": rows,
    "pooling_size_for_vit": pooling,
    "standardize_for_vit": vision.boolean("standardize", False),
    "use_clipped_linears_for_vit": vision.boolean("use_clipped_linears", False),
    # A position table that is too short for this many tokens in a line belongs to a smaller model.
    "vision_output_length": min(vision.integer("default_output_length", _SOFT_TOKENS), max(rows // pooling, 1)),
    "boi_token_id": top.token("boi_token_id", 255999, null=255999),
    "eoi_token_id": top.token("eoi_token_id", 258882, null=258882),
  }


def _write_tower(text: dict[str, Any], model: Config, v: Vision) -> dict[str, Any]:
  tower = {
    "model_type": "gemma4_vision",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": v.hidden_size_for_vit,
    "intermediate_size": v.intermediate_size_for_vit,
    "num_hidden_layers": v.num_hidden_layers_for_vit,
    "num_attention_heads": v.num_attention_heads_for_vit,
    "num_key_value_heads": v.num_attention_heads_for_vit,
    "head_dim": v.head_dim,
    "rms_norm_eps": v.normalization_layer_epsilon_for_vit,
    "rope_parameters": {"rope_type": "default", "rope_theta": v.rope_theta_for_vit},
    "position_embedding_size": v.num_position_embeddings_for_vit,
    "pooling_kernel_size": v.pooling_size_for_vit,
    "patch_size": v.patch_size_for_vit,
    "standardize": v.standardize_for_vit,
    "use_clipped_linears": v.use_clipped_linears_for_vit,
    "default_output_length": v.vision_output_length,
  }
  return write_with_tower(text, model, tower) | {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "image_token_id": v.image_token_id,
    "boi_token_id": v.boi_token_id,
    "eoi_token_id": v.eoi_token_id,
    "video_token_id": v.video_token_id,
    "audio_token_id": v.audio_token_id,
    "audio_config": None,
  }


def _write_nested(text: dict[str, Any]) -> dict[str, Any]:
  """Return config.json of a model without a tower, in nested form. ``text``: config.json of the text-only class."""
  return {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "dtype": text["dtype"],
    "tie_word_embeddings": text["tie_word_embeddings"],
    "text_config": {key: value for key, value in text.items() if key != "architectures"},
    "vision_config": None,
    "audio_config": None,
  }


def _unused(values: Mapping[str, Any], count: int, layer: int, rest: str) -> str | None:
  shared = rest in ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")
  if shared and count - values["num_kv_shared_layers"] <= layer < count:
    return "key and value tensors of layers that reuse those of an earlier layer are not used"
  return None


_NAMES = {
  **GEMMA_NAMES,
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
}

_LAYER = {
  **LAYER,
  "post_dense_norm.scale": Rule("post_feedforward_layernorm_1.weight"),
  "pre_moe_norm.scale": Rule("pre_feedforward_layernorm_2.weight"),
  "post_moe_norm.scale": Rule("post_feedforward_layernorm_2.weight"),
  "moe.router.kernel": Rule("router.proj.weight", "linear"),
  "moe.router.scale": Rule("router.scale"),
  "moe.router.per_expert_scale": Rule("router.per_expert_scale"),
  "moe.experts.gate": Rule("experts.gate_up_proj", "experts", 0),
  "moe.experts.up": Rule("experts.gate_up_proj", "experts", 1),
  "moe.experts.down": Rule("experts.down_proj", "experts"),
  "ple.gate": Rule("per_layer_input_gate.weight", "linear"),
  "ple.projection": Rule("per_layer_projection.weight", "linear"),
  "ple.norm.scale": Rule("post_per_layer_input_norm.weight"),
  "layer_scalar": Rule("layer_scalar", "scalar", buffer=True),
}

_CLIPPED = {"attention": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}
_PART = {"attention": "self_attn", "mlp": "mlp"}
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")

_TOWER_LAYER = {
  "pre_attention_norm.scale": Rule("input_layernorm.weight"),
  "attention.q": Rule("self_attn.q_proj.linear.weight", "linear"),
  "attention.k": Rule("self_attn.k_proj.linear.weight", "linear"),
  "attention.v": Rule("self_attn.v_proj.linear.weight", "linear"),
  "attention.o": Rule("self_attn.o_proj.linear.weight", "linear2"),
  "attention.q_norm.scale": Rule("self_attn.q_norm.weight"),
  "attention.k_norm.scale": Rule("self_attn.k_norm.weight"),
  "post_attention_norm.scale": Rule("post_attention_layernorm.weight"),
  "pre_mlp_norm.scale": Rule("pre_feedforward_layernorm.weight"),
  **{f"mlp.{name}": Rule(f"mlp.{name}_proj.linear.weight", "linear") for name in ("gate", "up", "down")},
  "post_mlp_norm.scale": Rule("post_feedforward_layernorm.weight"),
  **{
    f"{part}.clip.{name}.{bound}": Rule(f"{_PART[part]}.{name}_proj.{bound}", buffer=True)
    for part, names in _CLIPPED.items()
    for name in names
    for bound in _BOUNDS
  },
}

_TOWER_RULES = {
  "patch": Rule("vision_tower.patch_embedder.input_proj.weight", "linear"),
  "positions": Rule("vision_tower.patch_embedder.position_embedding_table"),
  "projector": Rule("embed_vision.embedding_projection.weight", "linear"),
  "std_bias": Rule("vision_tower.std_bias", buffer=True),
  "std_scale": Rule("vision_tower.std_scale", buffer=True),
}


HUGGING_FACE = HuggingFace(
  model_types=("gemma4", "gemma4_text"),
  read=_read,
  write=_write,
  names=_NAMES,
  layer=_LAYER,
  unchecked=lambda tower: ("use_bidirectional_image_attn",),
  unused=_unused,
  tower=Tower(
    model_type="gemma4",
    read=_read_tower,
    write=_write_tower,
    write_nested=_write_nested,
    layer=_TOWER_LAYER,
    rules=_TOWER_RULES,
    layers=TOWER_LAYERS,
    spellings=spelled_as,
    prefix="model.language_model.",
    head_prefix="",
    unused=unused_of_towers,
  ),
)
