"""The vision tower in a config.json (``vision_config`` and the image tokens) to the ``vision:`` section and back.

Defaults are those of the transformers 5.23 classes, which Hub files rely on.
"""

from typing import Any

from maxtext_like.checkpoint.huggingface.fields import REFUSED, Fields
from maxtext_like.config.model import ModelConfig

PLACEHOLDERS = {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881}
"""Gemma 4's tokens that are looked up as padding, whether there is a tower or not, and the class's defaults."""
_SOFT_TOKENS = 280  # of Gemma 4's image processor; config.json does not say


def read_vision(top: Fields) -> dict[str, Any]:
  """The vision section of a ``gemma3`` or ``gemma4`` config.json; without a tower nothing but Gemma 4's placeholders."""
  model_type = top.values["model_type"]
  placeholders = _placeholders(top) if model_type == "gemma4" else {}
  if "vision_config" not in top or model_type not in ("gemma3", "gemma4"):
    return placeholders
  vision = top.section("vision_config")
  return _read_gemma3(top, vision) if model_type == "gemma3" else _read_gemma4(top, vision) | placeholders


def _placeholders(top: Fields) -> dict[str, Any]:
  """Null: there is no such token."""
  return {key: top.token(key, default) for key, default in PLACEHOLDERS.items()}


def _read_gemma3(top: Fields, vision: Fields) -> dict[str, Any]:
  vision.only("model_type", "siglip_vision_model", "the tower of Gemma 3")
  vision.only("hidden_act", "gelu_pytorch_tanh", "no other activation is trained here")
  vision.only("num_channels", 3, "images have three colours")
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
  """Gemma 3 writes ``image_token_index``, and reads ``image_token_id`` as well."""
  key = f"{which}_token_index" if f"{which}_token_index" in top.values else f"{which}_token_id"
  # The model reads the image's token alone.
  return top.integer(key, default, least=0, null=REFUSED if which == "image" else default)


def _read_gemma4(top: Fields, vision: Fields) -> dict[str, Any]:
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
  return {
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
    # A table too short for a line of so many tokens is that of a smaller model.
    "vision_output_length": min(vision.integer("default_output_length", _SOFT_TOKENS), max(rows // pooling, 1)),
    "boi_token_id": top.token("boi_token_id", 255999, null=255999),
    "eoi_token_id": top.token("eoi_token_id", 258882, null=258882),
  }


def with_tower(text: dict[str, Any], model: ModelConfig, vision: Any) -> dict[str, Any]:
  """config.json, in the Hub's form, of a model with a tower. ``text``: that of its text model alone."""
  gemma4 = model.decoder_block == "gemma4"
  nested = {key: value for key, value in text.items() if key != "architectures"}
  tokens = {"image": vision.image_token_id, "boi": vision.boi_token_id, "eoi": vision.eoi_token_id}
  if gemma4:
    tokens |= {"video": vision.video_token_id, "audio": vision.audio_token_id}
  config: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration" if gemma4 else "Gemma3ForConditionalGeneration"],
    "model_type": model.decoder_block,
    "tie_word_embeddings": model.logits_via_embedding,
    "text_config": nested,
    "vision_config": _write_gemma4(vision) if gemma4 else _write_gemma3(vision),
    **{f"{which}_token_{'id' if gemma4 else 'index'}": token for which, token in tokens.items()},
  }
  return config | ({"audio_config": None} if gemma4 else {"mm_tokens_per_image": vision.vision_output_length})


def _write_gemma3(vision: Any) -> dict[str, Any]:
  return {
    "model_type": "siglip_vision_model",
    "attention_dropout": 0.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": vision.hidden_size_for_vit,
    "image_size": vision.image_size_for_vit,
    "intermediate_size": vision.intermediate_size_for_vit,
    "layer_norm_eps": vision.normalization_layer_epsilon_for_vit,
    "num_attention_heads": vision.num_attention_heads_for_vit,
    "num_channels": 3,
    "num_hidden_layers": vision.num_hidden_layers_for_vit,
    "patch_size": vision.patch_size_for_vit,
    "vision_use_head": False,
  }


def _write_gemma4(vision: Any) -> dict[str, Any]:
  return {
    "model_type": "gemma4_vision",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": vision.hidden_size_for_vit,
    "intermediate_size": vision.intermediate_size_for_vit,
    "num_hidden_layers": vision.num_hidden_layers_for_vit,
    "num_attention_heads": vision.num_attention_heads_for_vit,
    "num_key_value_heads": vision.num_attention_heads_for_vit,
    "head_dim": vision.head_dim,
    "rms_norm_eps": vision.normalization_layer_epsilon_for_vit,
    "rope_parameters": {"rope_type": "default", "rope_theta": vision.rope_theta_for_vit},
    "position_embedding_size": vision.num_position_embeddings_for_vit,
    "pooling_kernel_size": vision.pooling_size_for_vit,
    "patch_size": vision.patch_size_for_vit,
    "standardize": vision.standardize_for_vit,
    "use_clipped_linears": vision.use_clipped_linears_for_vit,
    "default_output_length": vision.vision_output_length,
  }
