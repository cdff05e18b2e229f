"""Translates our keys to the names in config.json, so that a message about a file uses the file's names."""

import re
from collections.abc import Collection, Mapping

COMMON = {
  "decoder_block": "model_type",
  "emb_dim": "hidden_size",
  "mlp_dim": "intermediate_size",
  "num_decoder_layers": "num_hidden_layers",
  "num_query_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "normalization_layer_epsilon": "rms_norm_eps",
  "logits_via_embedding": "tie_word_embeddings",
  "rope_max_timescale": "rope_theta",
}
"""Our key -> config.json's key, for keys that most families share."""


def in_config_json(text: str, names: Mapping[str, str], own: Collection[str] = ()) -> str:
  """Replaces our keys in a message by config.json's.

  Args:
    text: the message.
    names: our key -> config.json's key for the family.
    own: keys that stay unchanged because the user typed them.
  """
  return re.sub(r"\b\w+\b", lambda word: word[0] if word[0] in own else names.get(word[0], word[0]), text)
