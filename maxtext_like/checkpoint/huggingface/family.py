"""Types in which a model family declares its Hugging Face format (``HUGGING_FACE`` in ``models/<family>/huggingface.py``).

Also translates our keys to the names in config.json, so that a message about a file uses the file's names.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from maxtext_like.checkpoint.huggingface.fields import Fields

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
Kind = Literal["same", "scalar", "flat", "linear", "linear2", "conv", "experts"]


@dataclass(frozen=True)
class Rule:
  """How one of our parameters is stored in a file.

  Attributes:
    name: tensor name after the prefix of the layer; ``{e}`` is the index of an expert if each expert has its own tensor.
    kind: layout of the tensor. "same": as ours. "scalar": [1]. "linear": [out, in], with one input axis on our side.
      "linear2": the same with two input axes. "experts": [E, out, in]. "flat": all axes flattened. "conv": [out, 3, side, side]
      of a patch; ours has the flattened input axes first.
    half: 0 or 1 if the tensor contains two parameters concatenated along its output axis, and this is the first or second.
    buffer: True if it is not a parameter in transformers, so that it has no gradient there.
    float32: True if it is always written in float32.
  """

  name: str
  kind: Kind = "same"
  half: int | None = None
  buffer: bool = False
  float32: bool = False


def gated(ours: str, theirs: str) -> dict[str, Rule]:
  """Returns the rules of the three weights of a gated MLP."""
  return {f"{ours}.{part}": Rule(f"{theirs}.{part}_proj.weight", "linear") for part in ("gate", "up", "down")}


GROUPED_ATTENTION = {
  **{f"attention.{name}": Rule(f"self_attn.{name}_proj.weight", "linear") for name in "qkv"},
  "attention.o": Rule("self_attn.o_proj.weight", "linear2"),
  "attention.q_norm.scale": Rule("self_attn.q_norm.weight"),
  "attention.k_norm.scale": Rule("self_attn.k_norm.weight"),
}
STACKED_EXPERTS = {
  "moe.experts.gate": Rule("mlp.experts.gate_up_proj", "experts", 0),
  "moe.experts.up": Rule("mlp.experts.gate_up_proj", "experts", 1),
  "moe.experts.down": Rule("mlp.experts.down_proj", "experts"),
}


@dataclass(frozen=True, kw_only=True)
class Tower:
  """Additional declarations of a family with a vision tower.

  Tensors have the names that transformers uses in memory, without the leading ``model.``.

  Attributes:
    model_type: ``model_type`` of a config.json whose text model is nested in ``text_config``.
    read: config.json -> values of the ``vision:`` section by leaf name; some are set even without a tower.
    write: (config.json of the text model alone, ``model:``, ``vision:``) -> config.json of both.
    write_nested: config.json of the text model -> config.json of a nested text model without a tower; None if the family has
      no such format.
    layer: rules of our parameters in a layer of the tower, relative to ``layers``.
    rules: rules of the other parameters of tower and projector.
    layers: prefix of the tower's layers.
    spellings: tensor name -> possible names in files; the first is that of released checkpoints.
    prefix, head_prefix: prefixes of the text model and its head next to a tower in released checkpoints.
    unused: (name of an unexpected tensor, whether there is a tower) -> why it is not needed; None if it is needed.
  """

  model_type: str
  read: Callable[[Fields], dict[str, Any]]
  write: Callable[[dict[str, Any], Any, Any], dict[str, Any]]
  write_nested: Callable[[dict[str, Any]], dict[str, Any]] | None = None
  layer: Mapping[str, Rule]
  rules: Mapping[str, Rule]
  layers: str
  spellings: Callable[[str], tuple[str, ...]]
  prefix: str
  head_prefix: str
  unused: Callable[[str, bool], str | None]


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
  """Declarations of a family.

  Attributes:
    model_types: supported ``model_type`` values in config.json.
    read: config.json -> values of the ``model:`` section by leaf name; missing keys keep the defaults of base.yml.
    write: ``model:`` -> config.json of the text model in the Hub's format.
    names: our key -> key in config.json, where they differ.
    layer: our parameter of a layer, such as ``mlp.down`` -> its rule.
    stacked: rules that differ in transformers' memory, which has one array for all experts and splits it on saving.
    dense_is_moe: True if a model without experts has the same model_type as one with experts.
    unchecked: (whether the checkpoint has a tower) -> keys whose difference does not make another model.
    unused: (values of the file, number of layers, layer index, rest of the name) -> why an unexpected tensor is not needed;
      None if it is needed.
    tower: declarations of a family that accepts images.
  """

  model_types: tuple[str, ...]
  read: Callable[[Fields], dict[str, Any]]
  write: Callable[[Any], dict[str, Any]]
  names: Mapping[str, str]
  layer: Mapping[str, Rule]
  stacked: Mapping[str, Rule] = field(default_factory=dict)
  dense_is_moe: bool = False
  unchecked: Callable[[bool], tuple[str, ...]] = lambda tower: ()
  unused: Callable[[Mapping[str, Any], int, int, str], str | None] = lambda values, count, layer, rest: None
  tower: Tower | None = None


def in_config_json(text: str, names: Mapping[str, str], own: Collection[str] = ()) -> str:
  """Replaces our keys in a message by config.json's.

  Args:
    text: the message.
    names: our key -> config.json's key for the family.
    own: keys that stay unchanged because the user typed them.
  """
  return re.sub(r"\b\w+\b", lambda word: word[0] if word[0] in own else names.get(word[0], word[0]), text)
