"""Gemma 3 and 4: config.json to the ``model:`` section and back.

Defaults are those of the transformers 5.23 classes, which Hub files rely on: they leave out what equals them.
"""

from typing import Any

from maxtext_like.checkpoint.huggingface.fields import REFUSED, Fields, rope_type

_KINDS = {"sliding_attention": "sliding", "full_attention": "global"}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def _text(top: Fields) -> Fields:
  """The text model's fields: nested in ``text_config`` beside a vision tower, or the file itself."""
  return top.section("text_config") if top.values["model_type"] in ("gemma3", "gemma4") else top


def _null_is_untied(top: Fields) -> Any:
  """The meaning of ``tie_word_embeddings: null``: false for Gemma 3's class with a tower; the others refuse it."""
  return False if top.values["model_type"] == "gemma3" else REFUSED


def _common(top: Fields, text: Fields, **defaults: int) -> dict[str, Any]:
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
    # The class with the head decides: what text_config says is not read. Gemma 3's, with a tower, takes null for false.
    "logits_via_embedding": top.boolean("tie_word_embeddings", True, null=_null_is_untied(top)),
    "max_position_embeddings": text.integer("max_position_embeddings", 131072),
    "final_logits_soft_cap": cap or None,
    "sliding_window_size": text.integer("sliding_window", defaults["sliding_window"]),
    "pad_token_id": text.token("pad_token_id", 0),
    "bos_token_id": text.token("bos_token_id", 2),
    # The Hub's nested files list the tokens that end an answer at the top.
    "eos_token_id": (top if "eos_token_id" in top else text).tokens("eos_token_id", 1),
  }


def _layer_types(text: Fields, layers: int, every: int, *, last_is_global: bool) -> dict[str, Any]:
  """The layer pattern in one canonical form: the interval where there is one, so that equal models compare equal."""
  listed = text.texts("layer_types", layers)
  if listed is None:
    types = ["sliding" if (i + 1) % every else "global" for i in range(layers)]
  else:
    if unknown := sorted(set(listed) - set(_KINDS)):
      raise text.error("layer_types", f"{unknown[0]!r} is not one of {', '.join(_KINDS)}")
    types = [_KINDS[name] for name in listed]
  if last_is_global:
    types[-1] = "global"
  first = types.index("global") + 1 if "global" in types else 0
  if first and types == ["sliding" if (i + 1) % first else "global" for i in range(layers)]:
    return {"layer_types": None, "inhomogeneous_layer_cycle_interval": first}
  return {"layer_types": tuple(types), "inhomogeneous_layer_cycle_interval": 6}  # has no say beside a list


def _plain(rope: Fields) -> None:
  kind = rope_type(rope, "default")
  if kind != "default":
    raise rope.error("rope_type", f"'{kind}' is not supported for sliding layers; supported: 'default'")


def read_gemma3(top: Fields) -> dict[str, Any]:
  """The model section of a ``gemma3`` or ``gemma3_text`` config.json."""
  text = _text(top)
  values = _common(top, text, vocab_size=262208, num_hidden_layers=26, sliding_window=4096)
  text.only("use_bidirectional_attention", False, "an embedding model, not a language model", nullable=True)
  if top is not text:
    values["final_logits_soft_cap"] = None  # transformers applies it in the text-only class alone
  every = 6 if "layer_types" in text else text.integer("sliding_window_pattern", 6)
  values |= _layer_types(text, values["num_decoder_layers"], every, last_is_global=False)
  # Hub files: rope_theta, rope_local_base_freq and rope_scaling; transformers 5: rope_parameters by layer type.
  nested = text.section("rope_parameters")
  sliding, full = nested.section("sliding_attention"), nested.section("full_attention")
  if "rope_scaling" in text:
    scaling = text.section("rope_scaling")
    if not full.values and "rope_type" not in scaling.values and rope_type(scaling, "default") != "default":
      raise scaling.error("type", "transformers 5 reads rope_type alone here and would not scale; write rope_type")
    full = Fields({**full.values, **scaling.values}, scaling.where)
  _plain(sliding)
  for section in (text, full):
    section.only("partial_rotary_factor", 1.0, "every dimension of a head is rotated", nullable=section is text)
  kind = rope_type(full, "default")
  if kind not in ("default", "linear"):
    raise full.error("rope_type", f"'{kind}' is not supported for Gemma 3; supported: 'default', 'linear'")
  if kind == "linear" and "factor" not in full:
    raise full.error("factor", "is missing; a linear scaling needs it")
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


def read_gemma4(top: Fields) -> dict[str, Any]:
  """The model section of a ``gemma4`` or ``gemma4_text`` config.json."""
  text = _text(top)
  values = _common(top, text, vocab_size=262144, num_hidden_layers=30, sliding_window=512)
  if text.values.get("use_bidirectional_attention") not in (None, "vision"):
    raise text.error("use_bidirectional_attention", "only null and 'vision' are supported, for language models")
  values |= _layer_types(text, values["num_decoder_layers"], 6, last_is_global=True)
  values |= _gemma4_heads(text, values)
  values |= _gemma4_experts(text)
  width = text.integer("hidden_size_per_layer_input", 256, least=0)
  rows = text.integer("vocab_size_per_layer_input", 262144)
  shared = text.integer("num_kv_shared_layers", 0, least=0)
  if shared >= values["num_decoder_layers"]:
    raise text.error("num_kv_shared_layers", f"{shared} of {values['num_decoder_layers']}: no layer is left to share from")
  rope = text.section("rope_parameters")
  full, sliding = rope.section("full_attention"), rope.section("sliding_attention")
  _plain(sliding)
  kind = rope_type(full, "proportional" if not full.values else "default")
  if kind not in ("default", "proportional"):
    raise full.error("rope_type", f"'{kind}' is not supported for Gemma 4; supported: 'default', 'proportional'")
  if "rope_parameters" in text:
    for name in _KINDS:
      if name not in rope:
        raise rope.error(name, "is missing")
      if "rope_theta" not in rope.section(name).values:
        raise rope.section(name).error("rope_theta", "is missing")
  full.only("factor", 1.0, "no released Gemma 4 stretches its positions")
  default = 1.0 if full.values else 0.25
  proportion = full.number("partial_rotary_factor", default) if kind == "proportional" else 1.0
  if proportion > 1:
    raise full.error("partial_rotary_factor", f"{proportion} is more than the whole head")
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


def _gemma4_heads(text: Fields, values: dict[str, Any]) -> dict[str, Any]:
  """Heads of the global layers: Hub fields, or ``per_layer_config`` as transformers 5 writes it."""
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
      raise per_layer.error(str(i), "a sliding layer with sizes of its own is not supported")
  if len(found) > 1:
    raise per_layer.error("head_dim", f"global layers differ from each other: {sorted(found)}; not supported")
  head_dim, kv_heads = found.pop() if found else (values["head_dim"], values["num_kv_heads"])
  if not shared and kv_heads != values["num_kv_heads"]:
    raise per_layer.error("num_key_value_heads", "global layers have their own only together with attention_k_eq_v")
  return {
    "share_kv_projections": shared,
    "global_head_dim": head_dim,
    "global_num_kv_heads": kv_heads if shared and kv_heads != values["num_kv_heads"] else None,
  }


def _gemma4_experts(text: Fields) -> dict[str, Any]:
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
      raise text.error(theirs[0], "is missing; enable_moe_block needs it")
    sizes[ours] = text.integer(key, 0)
  return sizes | {"norm_topk_prob": True}


def write_gemma(model: Any) -> dict[str, Any]:
  """config.json, in the Hub's form, of a text-only Gemma 3 or 4."""
  gemma4 = model.decoder_block == "gemma4"
  config = {
    "architectures": ["Gemma4ForCausalLM" if gemma4 else "Gemma3ForCausalLM"],
    "model_type": "gemma4_text" if gemma4 else "gemma3_text",
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
    "layer_types": [_NAMES[kind] for kind in model.attention_types()],
    "sliding_window": model.sliding_window_size,
    "max_position_embeddings": model.max_position_embeddings,
    "rms_norm_eps": model.normalization_layer_epsilon,
    "final_logit_softcapping": model.final_logits_soft_cap,
    "tie_word_embeddings": model.logits_via_embedding,
    "pad_token_id": model.pad_token_id,
    "bos_token_id": model.bos_token_id,
    "eos_token_id": model.eos_token_id,
  }
  return config | (_write_gemma4(model) if gemma4 else _write_gemma3(model))


def _write_gemma3(model: Any) -> dict[str, Any]:
  factor = model.rope_linear_scaling_factor
  scalar = model.head_dim if model.query_pre_attn_scalar is None else model.query_pre_attn_scalar
  return {
    "attn_logit_softcapping": None,
    # transformers reads an integer here, and refuses 168.0.
    "query_pre_attn_scalar": int(scalar) if float(scalar).is_integer() else scalar,
    "rope_theta": model.rope_max_timescale,
    "rope_local_base_freq": model.local_rope_max_timescale,
    "rope_scaling": None if factor == 1.0 else {"rope_type": "linear", "factor": factor},
    "use_bidirectional_attention": False,
  }


def _write_gemma4(model: Any) -> dict[str, Any]:
  moe = model.num_experts > 0
  return {
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
