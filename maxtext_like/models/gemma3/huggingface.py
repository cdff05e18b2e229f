"""Gemma 3 at Hugging Face, and the parts that Gemma 3 and 4 share: converts config.json to the sections and back; tensor names.

Defaults are those of the transformers 5.23 classes. Files on the Hub leave out values that equal them.
"""

import re
from typing import Any

from maxtext_like.checkpoint.huggingface.family import COMMON, GROUPED_ATTENTION, HuggingFace, Rule, Tower, gated
from maxtext_like.checkpoint.huggingface.fields import REFUSED, Fields, rope_type
from maxtext_like.models.gemma3.config import Config, GemmaConfig, Vision

KINDS = {"sliding_attention": "sliding", "full_attention": "global"}
_KIND_NAMES = {kind: name for name, kind in KINDS.items()}


def text_of(top: Fields) -> Fields:
  """Return the fields of the text model: nested in ``text_config`` if there is a vision tower, or the file itself."""
  return top.section("text_config") if top.values["model_type"] in ("gemma3", "gemma4") else top


def _null_is_untied(top: Fields) -> Any:
  """Return the meaning of ``tie_word_embeddings: null``: false for Gemma 3's class with a vision tower; others refuse it."""
  return False if top.values["model_type"] == "gemma3" else REFUSED


def common(top: Fields, text: Fields, **defaults: int) -> dict[str, Any]:
  """Return the values that Gemma 3 and 4 have in common. ``defaults`` are those in which the classes differ."""
  text.only("hidden_activation", "gelu_pytorch_tanh", "no other activation is trained here")
  text.only("attention_bias", False, "Gemma attention has no biases here")
  cap = text.number("final_logit_softcapping", 0.0, null=0.0)
  return {
    "vocab_size": text.integer("vocab_size", defaults["vocab_size"]),
    "emb_dim": text.integer("hidden_size", 2304),
    "mlp_dim": text.integer("intermediate_size", 9216),
    "num_decoder_layers": text.integer("num_hidden_layers", defaults["num_hidden_layers"]),
    "num_query_heads": text.integer("num_attention_heads", 8),
    "num_kv_heads": text.integer("num_key_value_heads", 4),
    "head_dim": text.integer("head_dim", 256),
    "mlp_activation": "gelu",
    "normalization_layer_epsilon": text.number("rms_norm_eps", 1e-6),
    # The class with the head decides, so the value in text_config is not read. Gemma 3's class with a tower reads null as
    # false.
    "logits_via_embedding": top.boolean("tie_word_embeddings", True, null=_null_is_untied(top)),
    "max_position_embeddings": text.integer("max_position_embeddings", 131072, least=2),
    "final_logits_soft_cap": cap or None,
    "sliding_window_size": text.integer("sliding_window", defaults["sliding_window"]),
    "pad_token_id": text.token("pad_token_id", 0),
    "bos_token_id": text.token("bos_token_id", 2),
    # Nested files on the Hub list the tokens that end an answer at the top level.
    "eos_token_id": (top if "eos_token_id" in top else text).tokens("eos_token_id", 1),
  }


def layer_types(text: Fields, layers: int, every: int, *, last_is_global: bool) -> dict[str, Any]:
  """Return the layer pattern in one canonical form, the interval if there is one, so that equal models compare equal."""
  listed = text.texts("layer_types", layers)
  if listed is None:
    types = ["sliding" if (i + 1) % every else "global" for i in range(layers)]
  else:
    if unknown := sorted(set(listed) - set(KINDS)):
      raise text.error("layer_types", f"{unknown[0]!r} is not one of {', '.join(KINDS)}")
    types = [KINDS[name] for name in listed]
  if last_is_global:
    types[-1] = "global"
  first = types.index("global") + 1 if "global" in types else 0
  if first and types == ["sliding" if (i + 1) % first else "global" for i in range(layers)]:
    return {"layer_types": None, "inhomogeneous_layer_cycle_interval": first}
  return {"layer_types": tuple(types), "inhomogeneous_layer_cycle_interval": 6}  # the interval is not used with a list


def plain(rope: Fields) -> None:
  """Refuse a rotary table of the sliding layers other than the default one."""
  kind = rope_type(rope, "default")
  if kind != "default":
    raise rope.error("rope_type", f"'{kind}' is not supported for sliding layers; supported: 'default'")


def _read(top: Fields) -> dict[str, Any]:
  """Return the model section of a ``gemma3`` or ``gemma3_text`` config.json."""
  text = text_of(top)
  values = common(top, text, vocab_size=262208, num_hidden_layers=26, sliding_window=4096)
  text.only("use_bidirectional_attention", False, "an embedding model, not a language model", nullable=True)
  if top is not text:
    values["final_logits_soft_cap"] = None  # transformers applies it only in the text-only class
  every = 6 if "layer_types" in text else text.integer("sliding_window_pattern", 6)
  values |= layer_types(text, values["num_decoder_layers"], every, last_is_global=False)
  # Files on the Hub have rope_theta, rope_local_base_freq and rope_scaling; transformers 5 has rope_parameters by layer type.
  nested = text.section("rope_parameters")
  sliding, full = nested.section("sliding_attention"), nested.section("full_attention")
  if "rope_scaling" in text:
    scaling = text.section("rope_scaling")
    if not full.values and "rope_type" not in scaling.values and rope_type(scaling, "default") != "default":
      raise scaling.error(
        "type", "transformers 5 reads only rope_type here, so it would not scale", fix="write rope_type instead of type"
      )
    full = scaling.over(full)
  plain(sliding)
  for section in (text, full):
    section.only("partial_rotary_factor", 1.0, "every dimension of a head is rotated", nullable=section is text)
  kind = rope_type(full, "default")
  if kind not in ("default", "linear"):
    raise full.error("rope_type", f"'{kind}' is not supported for Gemma 3; supported: 'default', 'linear'")
  if kind == "linear" and "factor" not in full:
    raise full.error("factor", "is missing; a linear scaling needs it", fix="download config.json of the model again")
  factor = full.number("factor", 1.0) if kind == "linear" else 1.0
  return values | {
    "decoder_block": "gemma3",
    "query_pre_attn_scalar": text.number("query_pre_attn_scalar", 256.0),
    "rope_type": "linear" if factor != 1.0 else "default",
    "rope_linear_scaling_factor": factor,
    "rope_max_timescale": (full if "rope_theta" in full.values else text).number("rope_theta", 1e6),
    "local_rope_max_timescale": (
      sliding.number("rope_theta", 1e4) if "rope_theta" in sliding.values else text.number("rope_local_base_freq", 1e4)
    ),
    "use_bidirectional_image_attn": top is not text,
  }


def write_common(model: GemmaConfig) -> dict[str, Any]:
  """Return the entries of config.json, in the Hub's form, that the text-only classes of Gemma 3 and 4 share."""
  return {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": model.vocab_size,
    "hidden_size": model.emb_dim,
    "intermediate_size": model.mlp_dim,
    "num_hidden_layers": model.num_decoder_layers,
    "num_attention_heads": model.num_query_heads,
    "num_key_value_heads": model.num_kv_heads,
    "head_dim": model.head_dim,
    "layer_types": [_KIND_NAMES[kind] for kind in model.attention_types()],
    "sliding_window": model.sliding_window_size,
    "max_position_embeddings": model.max_position_embeddings,
    "rms_norm_eps": model.normalization_layer_epsilon,
    "final_logit_softcapping": model.final_logits_soft_cap,
    "tie_word_embeddings": model.logits_via_embedding,
    "pad_token_id": model.pad_token_id,
    "bos_token_id": model.bos_token_id,
    "eos_token_id": model.eos_token_id,
  }


def _write(model: Config) -> dict[str, Any]:
  factor = model.rope_linear_scaling_factor
  scalar = model.head_dim if model.query_pre_attn_scalar is None else model.query_pre_attn_scalar
  return write_common(model) | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    # transformers expects an integer here, and refuses 168.0.
    "query_pre_attn_scalar": int(scalar) if float(scalar).is_integer() else scalar,
    "rope_theta": model.rope_max_timescale,
    "rope_local_base_freq": model.local_rope_max_timescale,
    "rope_scaling": None if factor == 1.0 else {"rope_type": "linear", "factor": factor},
    "use_bidirectional_attention": False,
  }


def _read_tower(top: Fields) -> dict[str, Any]:
  if "vision_config" not in top or top.values["model_type"] != "gemma3":
    return {}
  vision = top.section("vision_config")
  vision.only("model_type", "siglip_vision_model", "the tower of Gemma 3")
  vision.only("hidden_act", "gelu_pytorch_tanh", "no other activation is trained here")
  vision.only("num_channels", 3, "images have three colors")
  return {
    "image_size_for_vit": vision.integer("image_size", 224),
    "patch_size_for_vit": vision.integer("patch_size", 16),
    "hidden_size_for_vit": vision.integer("hidden_size", 768),
    "intermediate_size_for_vit": vision.integer("intermediate_size", 3072),
    "num_hidden_layers_for_vit": vision.integer("num_hidden_layers", 12),
    "num_attention_heads_for_vit": vision.integer("num_attention_heads", 12),
    "normalization_layer_epsilon_for_vit": vision.number("layer_norm_eps", 1e-6),
    "vision_output_length": top.integer("mm_tokens_per_image", 256),
    "image_token_id": _token(top, "image", 262144),
    "boi_token_id": _token(top, "boi", 255999),
    "eoi_token_id": _token(top, "eoi", 256000),
  }


def _token(top: Fields, which: str, default: int) -> int:
  """Gemma 3 writes ``image_token_index``, and also reads ``image_token_id``."""
  key = f"{which}_token_index" if f"{which}_token_index" in top.values else f"{which}_token_id"
  # The model itself reads only the image's token.
  return top.integer(key, default, least=0, null=REFUSED if which == "image" else default)


def write_with_tower(text: dict[str, Any], model: GemmaConfig, tower: dict[str, Any]) -> dict[str, Any]:
  """Return config.json of a model with a tower, without its tokens.

  text: config.json of the text model. tower: that of the tower."""
  return {
    "model_type": model.decoder_block,
    "tie_word_embeddings": model.logits_via_embedding,
    "text_config": {key: value for key, value in text.items() if key != "architectures"},
    "vision_config": tower,
  }


def _write_tower(text: dict[str, Any], model: Config, v: Vision) -> dict[str, Any]:
  tower = {
    "model_type": "siglip_vision_model",
    "attention_dropout": 0.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": v.hidden_size_for_vit,
    "image_size": v.image_size_for_vit,
    "intermediate_size": v.intermediate_size_for_vit,
    "layer_norm_eps": v.normalization_layer_epsilon_for_vit,
    "num_attention_heads": v.num_attention_heads_for_vit,
    "num_channels": 3,
    "num_hidden_layers": v.num_hidden_layers_for_vit,
    "patch_size": v.patch_size_for_vit,
    "vision_use_head": False,
  }
  return write_with_tower(text, model, tower) | {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "image_token_index": v.image_token_id,
    "boi_token_index": v.boi_token_id,
    "eoi_token_index": v.eoi_token_id,
    "mm_tokens_per_image": v.vision_output_length,
  }


GEMMA_NAMES = {
  **COMMON,
  "mlp_activation": "hidden_activation",
  "final_logits_soft_cap": "final_logit_softcapping",
  "sliding_window_size": "sliding_window",
  "vision_output_length": "default_output_length",
  "patch_size_for_vit": "patch_size",
  "hidden_size_for_vit": "hidden_size",
  "intermediate_size_for_vit": "intermediate_size",
  "num_hidden_layers_for_vit": "num_hidden_layers",
  "num_attention_heads_for_vit": "num_attention_heads",
}

_NAMES = {
  **GEMMA_NAMES,
  "inhomogeneous_layer_cycle_interval": "sliding_window_pattern",
  "local_rope_max_timescale": "rope_local_base_freq",
  "rope_linear_scaling_factor": "factor",
  "image_size_for_vit": "image_size",
  "normalization_layer_epsilon_for_vit": "layer_norm_eps",
  "vision_output_length": "mm_tokens_per_image",
  "image_token_id": "image_token_index",
  "boi_token_id": "boi_token_index",
  "eoi_token_id": "eoi_token_index",
}

LAYER = {
  "pre_attention_norm.scale": Rule("input_layernorm.weight"),
  **GROUPED_ATTENTION,
  "post_attention_norm.scale": Rule("post_attention_layernorm.weight"),
  "pre_mlp_norm.scale": Rule("pre_feedforward_layernorm.weight"),
  **gated("mlp", "mlp"),
  "post_mlp_norm.scale": Rule("post_feedforward_layernorm.weight"),
}

_BIASED = {"scale": "weight", "bias": "bias"}
_TOWER_LAYER = {
  **{f"pre_attention_norm.{ours}": Rule(f"layer_norm1.{theirs}") for ours, theirs in _BIASED.items()},
  **{f"attention.{name}": Rule(f"self_attn.{name}_proj.weight", "linear") for name in "qkv"},
  **{f"attention.{name}_bias": Rule(f"self_attn.{name}_proj.bias", "flat") for name in "qkv"},
  "attention.o": Rule("self_attn.out_proj.weight", "linear2"),
  "attention.o_bias": Rule("self_attn.out_proj.bias"),
  **{f"pre_mlp_norm.{ours}": Rule(f"layer_norm2.{theirs}") for ours, theirs in _BIASED.items()},
  "mlp.up": Rule("mlp.fc1.weight", "linear"),
  "mlp.up_bias": Rule("mlp.fc1.bias"),
  "mlp.down": Rule("mlp.fc2.weight", "linear"),
  "mlp.down_bias": Rule("mlp.fc2.bias"),
}

_TOWER_RULES = {
  "patch.kernel": Rule("vision_tower.embeddings.patch_embedding.weight", "conv"),
  "patch.bias": Rule("vision_tower.embeddings.patch_embedding.bias"),
  "positions": Rule("vision_tower.embeddings.position_embedding.weight"),
  "final_norm.scale": Rule("vision_tower.post_layernorm.weight"),
  "final_norm.bias": Rule("vision_tower.post_layernorm.bias"),
  "projector.norm.scale": Rule("multi_modal_projector.mm_soft_emb_norm.weight"),
  "projector.kernel": Rule("multi_modal_projector.mm_input_projection_weight"),  # input-major in the file too
}

TOWER_LAYERS = "vision_tower.encoder.layers."
_TOWER, _OLD_TOWER = "vision_tower.", "vision_tower.vision_model."
_TOWERS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|embed_vision|vision_embedder|audio_tower|embed_audio)\.")
_SOUND = re.compile(r"(model\.)?(audio_tower|embed_audio)\.")
_IN_TOWER = re.compile(r"^(model\.)?vision_tower\.(vision_model\.)?(head\.|embeddings\.position_ids$)")


def spelled_as(name: str, *others: str) -> tuple[str, ...]:
  """Return the spellings of a tensor of a tower, with and without the prefix ``model.`` of transformers."""
  return tuple(prefix + spelling for spelling in (name, *others) for prefix in ("model.", ""))


def _spellings(name: str) -> tuple[str, ...]:
  """Released files have a segment that transformers dropped. It writes the segment again if it has read it."""
  if not name.startswith(_TOWER):
    return (name, *spelled_as(name))
  older = _OLD_TOWER + name.removeprefix(_TOWER)
  return (older, *spelled_as(name, older))


def unused_of_towers(name: str, tower: bool) -> str | None:
  """Return the reason why an unexpected tensor of a tower is not used; None if it is used, or not of a tower."""
  if tower and _IN_TOWER.search(name):
    return "tensors of the vision tower that its features do not need are not used"
  if (_SOUND if tower else _TOWERS).match(name):
    return "tensors of vision and sound are not used by the text model"
  return None


HUGGING_FACE = HuggingFace(
  model_types=("gemma3", "gemma3_text"),
  read=_read,
  write=_write,
  names=_NAMES,
  layer=LAYER,
  unchecked=lambda tower: () if tower else ("use_bidirectional_image_attn",),  # without a tower there are no images
  tower=Tower(
    model_type="gemma3",
    read=_read_tower,
    write=_write_tower,
    layer=_TOWER_LAYER,
    rules=_TOWER_RULES,
    layers=TOWER_LAYERS,
    spellings=_spellings,
    prefix="language_model.model.",
    head_prefix="language_model.",
    unused=unused_of_towers,
  ),
)
