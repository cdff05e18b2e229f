"""What a family of models says of itself at Hugging Face: the ``HUGGING_FACE`` of ``models/<family>/huggingface.py``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from maxtext_like.checkpoint.huggingface.fields import Fields

Kind = Literal["same", "scalar", "flat", "linear", "linear2", "conv", "experts"]


@dataclass(frozen=True)
class Rule:
  """How one of our parameters stands in a file.

  Attributes:
    name: after the layer's prefix; ``{e}`` is the number of an expert with a tensor of its own.
    kind: "same"; "scalar": [1]; "linear": [out, in] with one input axis on our side; "linear2": with two;
      "experts": [E, out, in]; "flat": [all axes]; "conv": [out, 3, side, side] of a patch, ours with the input axes
      flattened first.
    half: 0 or 1: the tensor holds two parameters one above the other along its output axis, and this is the first or
      second.
    buffer: no parameter in transformers: it has no gradient there.
    float32: it is written in float32, whatever the others are.
  """

  name: str
  kind: Kind = "same"
  half: int | None = None
  buffer: bool = False
  float32: bool = False


def gated(ours: str, theirs: str) -> dict[str, Rule]:
  """The three products of a gated MLP."""
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
  """What a family with a vision tower has besides. Its tensors are called here as transformers has them in memory, without its
  leading ``model.``.

  Attributes:
    model_type: of a config.json whose text model is nested in ``text_config``.
    read: config.json to values of the ``vision:`` section by leaf name; without a tower, what there is to say all the same.
    write: (config.json of the text model alone, ``model:``, ``vision:``) to that of both.
    write_nested: config.json of a text model that is nested although it has no tower, from its own; None: it is not nested.
    layer: our parameters of a layer of the tower, whose prefix is ``layers``.
    rules: the others of tower and projector.
    layers: prefix of the tower's layers.
    spellings: how files may spell a tensor; the first is how released ones do.
    prefix, head_prefix: of the text model and of its head, beside a tower in released files.
    unused: (a tensor of a file that is not expected, is there a tower) to why nothing needs it; None: something does.
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
  """A family at Hugging Face.

  Attributes:
    model_types: in config.json.
    read: config.json to values of the ``model:`` section by leaf name; what is not among them keeps the default of base.yml.
    write: ``model:`` to config.json in the Hub's form, of the text model alone.
    names: our key to config.json's; what is not here has the same name.
    layer: our parameters of a layer, as ``mlp.down``, to how they stand in a file.
    stacked: those that are others as transformers holds them in memory: one array for all experts, which it splits when it
      saves.
    dense_is_moe: a model without experts has the model_type of those with.
    unchecked: keys that do not make another model; the argument says whether the checkpoint has a tower.
    unused: (the file's values, layers of the model, number of a layer, rest of the name) to why a tensor that is not expected
      is not needed; None: it is.
    tower: of a family that takes images.
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
