"""How config.json calls what our keys call otherwise, so that a message about a file speaks the file's language."""

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
"""What files of most families say; our key to config.json's."""


def in_config_json(text: str, names: Mapping[str, str], own: Collection[str] = ()) -> str:
  """A message with config.json's names for ours.

  Args:
    text: the message.
    names: of the family.
    own: keys that stay, because someone wrote them: on the command line, say.
  """
  return re.sub(r"\b\w+\b", lambda word: word[0] if word[0] in own else names.get(word[0], word[0]), text)
