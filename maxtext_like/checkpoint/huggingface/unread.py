"""Classifies the keys of a config.json that nothing reads: harmless, reported, or refused because they make another model.

Open this file when an import reports or refuses a key, or when a release adds one.
"""

from collections.abc import Iterator
from typing import Any

from maxtext_like.checkpoint.huggingface.fields import Fields
from maxtext_like.strict_json import printable

HARMLESS = frozenset(
  (
    # Information about the file, the repository and the program that wrote it.
    "_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attn_implementation auto_map "
    "base_model_name_or_path custom_pipelines dtype license model_type name_or_path tags text_model_id torch_dtype "
    "torchscript transformers_version transformers.js_config unsloth_fixed unsloth_version "
    # Outputs, caches and text generation.
    "bad_words_ids begin_suppress_tokens cache_implementation cross_attention_hidden_size decoder_start_token_id "
    "diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty "
    "forced_bos_token_id forced_eos_token_id generation_config keys_to_ignore_at_inference length_penalty max_length "
    "max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions "
    "output_hidden_states output_router_logits output_scores prefix remove_invalid_values repetition_penalty return_dict "
    "return_dict_in_generate sep_token_id suppress_tokens temperature top_k top_p typical_p use_cache use_return_dict "
    # Classifiers, and parts of encoder-decoder models.
    "add_cross_attention chunk_size_feed_forward finetuning_task id2label is_decoder is_encoder_decoder label2id num_labels "
    "problem_type pruned_heads task_specific_params tie_encoder_decoder tokenizer_class "
    # Initialization and distribution of weights.
    "ep_size init_std initializer_factor initializer_range pretraining_tp tf_legacy_loss use_bfloat16 "
    # Sizes that follow from other keys, and alternative spellings of keys that are read.
    "_sliding_window_pattern sliding_window_pattern global_head_dim head_dim max_position_embeddings max_window_layers "
    "num_global_key_value_heads qk_head_dim tie_word_embeddings type "
    # Tokens that are read elsewhere in the file, and parts of unsupported inputs: audio and video.
    "audio_token_id bos_token_id eos_token_id image_token_id pad_token_id video_token_id "
    "boi_token_id boi_token_index eoi_token_id eoi_token_index image_token_index "
    "audio_config audio_seq_length audio_soft_tokens_per_image audio_ms_per_token boa_token_id boa_token_index eoa_token_id "
    "eoa_token_index vision_soft_tokens_per_image "
    # How float8 weights were quantized; their scales are read.
    "activation_scheme fmt modules_to_not_convert scale_fmt"
  ).split()
)
"""Keys that never change the result of a forward pass."""

WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
  "num_nextn_predict_layers": ((0,), "the layers that predict further tokens are ignored"),
  "attention_dropout": ((0,), "this project trains without dropout"),
  "attn_logit_softcapping": ((0,), "transformers' class ignores it too"),
  "embd_pdrop": ((0,), "this project trains without dropout"),
  "hidden_dropout": ((0,), "this project trains without dropout"),
  "hidden_dropout_prob": ((0,), "this project trains without dropout"),
  "resid_pdrop": ((0,), "this project trains without dropout"),
  "router_jitter_noise": ((0,), "this project trains without router noise"),
}
"""Keys that do not change the evaluation logits of transformers: neutral values, and the reason to report for all others."""

OTHER_MODEL: dict[str, tuple[tuple[Any, ...], str]] = {
  "attention_chunk_size": ((), "attention is not divided into chunks here"),
  "attention_multiplier": ((), "attention scores have the scale of the family"),
  "attention_output_gate": ((), "attention has no output gate here"),
  "attn_output_gate": ((), "attention has no output gate here"),
  "clip_qkv": ((), "queries, keys and values are not clipped here"),
  "dual_chunk_attention_config": ((), "attention is not divided into chunks here"),
  "embedding_multiplier": ((1,), "embeddings have the scale of the family"),
  "hc_mult": ((1,), "there are no hyper-connections here"),
  "index_skip_topk_offset": ((), "the indexer of every layer selects its own keys here"),
  "index_topk_freq": ((1,), "the indexer of every layer selects its own keys here"),
  "index_topk_pattern": ((), "the indexer of every layer selects its own keys here"),
  "indexer_types": ((), "the indexer of every layer selects its own keys here"),
  "linear_num_value_heads": ((), "there is no linear attention here"),
  "logit_scale": ((1,), "logits are not scaled here"),
  "logits_scaling": ((1,), "logits are not scaled here"),
  "no_rope_layers": ((), "every layer has a rotary embedding here"),
  "qkv_bias": ((), "the projections have no biases here"),
  "residual_multiplier": ((1,), "the residual stream is not scaled here"),
  "swiglu_limit": ((), "the MLP is not clipped here"),
  "use_attention_sinks": ((), "attention has no sinks here"),
}
"""Keys that make another model, which is refused: neutral values, and why no other value is supported."""


def unread_notes(top: Fields) -> tuple[str, ...]:
  """Returns a sentence for every unread key that may matter.

  Raises:
    UserError: a key makes another model.
  """
  notes = []
  for fields, key, value in _unread(top):
    if key in OTHER_MODEL:
      neutral, reason = OTHER_MODEL[key]
      if not (_off(value) or value in neutral):
        raise fields.error(key, f"{printable(repr(value))[:80]} is not supported: {reason}")
    elif key in WITHOUT_EFFECT:
      neutral, reason = WITHOUT_EFFECT[key]
      if not (_off(value) or value in neutral):
        notes.append(f"{fields.where}: {key} = {printable(repr(value))[:80]} has no effect: {reason}")
    elif key not in HARMLESS and not _off(value):
      shown = printable(repr(value))
      notes.append(
        f"{fields.where}: {printable(key)} = {shown[:80]}{'...' if len(shown) > 80 else ''} is not read; "
        "if it changes the equations of the model, the results will differ"
      )
  return tuple(notes)


def _off(value: Any) -> bool:
  """Returns True if a value turns a feature off: null, false, 0 or empty."""
  return not value


def _unread(fields: Fields) -> Iterator[tuple[Fields, str, Any]]:
  """Yields the keys of an object, and of its nested objects that were read, that nothing has read."""
  for key, value in fields.values.items():
    if key in fields.sections:
      yield from _unread(fields.sections[key])
    elif key not in fields.read:
      yield fields, key, value
