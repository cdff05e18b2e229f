"""Converts a checkpoint's config.json to the ``model:`` and ``vision:`` sections and back, for every family.

Two formats are read: the Hub's, which omits values that equal the defaults, and the one that transformers 5 writes
(``layer_types``, ``rope_parameters``, ``per_layer_config``). Equal models give equal sections. Code that a repository names in
``auto_map`` is never run.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext_like.checkpoint.huggingface.fields import Fields
from maxtext_like.checkpoint.huggingface.tied import other_head
from maxtext_like.checkpoint.huggingface.unread import unread_notes
from maxtext_like.checkpoint.model_changes import Change, Comparison, compared, require_same
from maxtext_like.config import hub
from maxtext_like.config.key_class import KeyClass, marks
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.vision import VisionConfig
from maxtext_like.errors import UserError
from maxtext_like.models.registry import FAMILIES
from maxtext_like.strict_json import parse_file, printable

_LIMIT = 4 << 20  # maximum bytes of a config.json
_DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class HuggingFaceConfig:
  """The contents of a config.json.

  Attributes:
    model_type: as in the file.
    model: values of the ``model:`` section by leaf name; missing keys keep the defaults of configs/base.yml.
    vision: values of the ``vision:`` section in the same way.
    multimodal: True if the text model is nested next to a vision tower, which affects the names of its parameters.
    float8_block: rows and columns that share a ``_scale_inv``.
    dtype: dtype that the file gives for its weights, if any.
    notes: remarks about the file, one sentence each.
    untied: True if config.json ties the output head to the embedding, but the tensors contain a different head.
  """

  model_type: str
  model: dict[str, Any]
  vision: dict[str, Any]
  multimodal: bool
  float8_block: tuple[int, int]
  dtype: str | None
  notes: tuple[str, ...] = ()
  untied: bool = False

  @property
  def has_tower(self) -> bool:
    """True if the file describes a vision tower."""
    return "hidden_size_for_vit" in self.vision


def read_config(directory: Path) -> HuggingFaceConfig:
  """Reads ``directory``/config.json, and checks the tensors next to it for a separate output head.

  Raises:
    UserError: the file is missing or malformed, or the model is not supported.
  """
  path = directory / "config.json"
  if not path.is_file():
    missing = "has no config.json" if directory.is_dir() else f"no such directory{hub.advice(str(directory))}"
    fix = "name such a directory; maxtext-like export writes one from a run"
    raise UserError(
      f"{printable(directory)}: {missing}; expected a Hugging Face checkpoint directory",
      fix=hub.fix(str(directory), fix),
    )
  config = interpret(parse_file(path, limit=_LIMIT), printable(path))
  if config.model["logits_via_embedding"] and (head := other_head(directory, config.float8_block)):
    untied = config.model | {"logits_via_embedding": False}
    note = f"{printable(head)} differs from the embedding, so the head is separate, although config.json ties them"
    return dataclasses.replace(config, model=untied, notes=(*config.notes, note), untied=True)
  return config


def interpret(values: Any, where: str) -> HuggingFaceConfig:
  """Interprets the parsed contents of a config.json. ``where`` names the file in errors."""
  if not isinstance(values, dict):
    raise UserError(f"{where}: not a JSON object", fix="download config.json of the model again")
  top = Fields(values, where)
  model_type = top.text("model_type", "", null="")
  family = next((f.huggingface for f in FAMILIES.values() if model_type in f.huggingface.model_types), None)
  if family is None:
    found = f"'{printable(model_type)}'" if model_type else "missing"
    supported = ", ".join(name for f in FAMILIES.values() for name in f.huggingface.model_types)
    raise UserError(
      f"{where}: model_type {found} is not supported; supported are {supported}",
      fix="use a checkpoint of one of these model types",
    )
  multimodal = family.tower is not None and model_type == family.tower.model_type
  if multimodal and not isinstance(values.get("text_config"), dict):
    raise UserError(
      f"{where}: text_config is missing; model_type '{model_type}' needs it", fix="download config.json of the model again"
    )
  model = family.read(top)
  found = HuggingFaceConfig(
    model_type=model_type,
    model={"model_name": model_type} | model,
    vision=family.tower.read(top) if family.tower else {},
    multimodal=multimodal,
    float8_block=_float8_block(top),
    dtype=top.text("dtype", "", null="") or top.text("torch_dtype", "", null="") or None,
  )
  return dataclasses.replace(found, notes=(*unread_notes(top), *_absent_tokens(model, where)))


def compared_with_file(config: HuggingFaceConfig, model: ModelConfig, vision: VisionConfig | None = None) -> Comparison:
  """Returns the differences between the model that a config.json describes and that of a run.

  Args:
    config: the contents of the file.
    model: the ``model:`` section of the run.
    vision: the ``vision:`` section of the run. Its image tokens are compared even without a tower; None compares none.
  """
  family = FAMILIES[model.decoder_block].huggingface
  known, here = marks(type(model)), {"model": vars(model)}
  unchecked = set(family.unchecked(config.has_tower))
  # Labels, and numbers that a model file may choose freely: a different value in the file is not a change by the user.
  labels = {key for key in config.model if key in known and known[key].kind is KeyClass.TRAINING}
  found = compared({"model": {key: x for key, x in config.model.items() if key not in unchecked | labels}}, here)
  untied = "logits_via_embedding" if config.untied else None
  changes = [
    dataclasses.replace(c, label=_label(c.key, family.names), source="tensors" if c.key == untied else "config.json")
    for c in found.changes
  ]
  if vision is not None and config.vision:
    # Ids beyond the vocabulary never occur, so they count as absent.
    ids = range(model.vocab_size)
    for key in vision.placeholder_keys:
      was, now = (token if token in ids else None for token in (config.vision[key], getattr(vision, key)))
      if was != now:
        changes.append(Change("vision", key, was, now, config.vision[key], marks(type(vision))[key], key, "config.json"))
  return dataclasses.replace(found, changes=tuple(changes), names=("", model.model_name))


def _label(key: str, names: Mapping[str, str]) -> str:
  """Returns the label of a key in the table of an error."""
  return f"{names[key]} ({key})" if names.get(key, key) != key else key


def require_same_model(
  config: HuggingFaceConfig,
  model: ModelConfig,
  directory: Path,
  vision: VisionConfig | None = None,
  *,
  allow_model_change: bool = False,
  adds: bool = False,
) -> None:
  """Refuses a checkpoint whose config.json describes another model, even if every shape agrees.

  Args:
    config, model, vision: as for ``compared_with_file``.
    directory: directory of the checkpoint.
    allow_model_change: the key of that name.
    adds: the parameters of a part that the checkpoint lacks are initialized.

  Raises:
    UserError: lists the keys that differ, and what to type.
  """
  found = compared_with_file(config, model, vision)
  if adds:
    found = found.without_added()
  require_same(printable(directory), found, allow=allow_model_change, notes=config.notes)


def _float8_block(top: Fields) -> tuple[int, int]:
  """Checks that the quantization of the weights is supported, and returns the size of a block."""
  quantization = top.section("quantization_config")
  if not quantization.values:
    return _DEFAULT_BLOCK
  quantization.only("quant_method", "fp8", "weights must be unquantized or float8 with scales", default="missing")
  sizes = quantization.values.get("weight_block_size")
  if sizes is None:
    return _DEFAULT_BLOCK
  if not isinstance(sizes, list) or len(sizes) != 2:
    raise quantization.error(
      "weight_block_size", "is not a list of two sizes", fix="write [128, 128], as the published models have"
    )
  rows, columns = (Fields({"weight_block_size": size}, quantization.where) for size in sizes)
  return rows.integer("weight_block_size", 128), columns.integer("weight_block_size", 128)


def require_counterpart(model: ModelConfig) -> None:
  """Raises UserError for a model that no class of transformers computes."""
  if model.attn_logits_soft_cap is not None:
    raise UserError(
      f"attn_logits_soft_cap = {model.attn_logits_soft_cap:g}: transformers' classes of {model.decoder_block} do not cap "
      "attention scores (Gemma 3's ignores attn_logit_softcapping), so an exported model would give other results\n"
      "  fix: train with attn_logits_soft_cap=null before exporting"
    )


def export_config(model: ModelConfig, dtype: str, vision: VisionConfig | None = None) -> dict[str, Any]:
  """Returns the config.json of a model, in the Hub's format.

  Args:
    model: the ``model:`` section.
    dtype: dtype of the written weights.
    vision: the ``vision:`` section, if the model may have a tower.

  Raises:
    UserError: transformers has no such model.
  """
  require_counterpart(model)
  family = FAMILIES[model.decoder_block].huggingface
  config = family.write(model)
  if vision is not None and vision.use_multimodal and family.tower:
    config = family.tower.write(config, model, vision)
  return config | {"dtype": dtype, "torch_dtype": dtype, "use_cache": True}


_LOSSES = ("load_balance_loss", "load_balance_loss_weight", "router_z_loss_weight")


def lost_losses(model: ModelConfig) -> str | None:
  """Returns a note if an import of an exported config.json would train with other losses of the routers; else None.

  Args:
    model: the ``model:`` section that is exported.
  """
  own = {key: getattr(model, key, 0) for key in _LOSSES} if model.has("experts") else {}
  if not own.get("load_balance_loss_weight"):
    own.pop("load_balance_loss", None)  # a definition without a weight has no effect
  if not any(own.values()):
    return None
  written = json.loads(json.dumps(export_config(model, "bfloat16")))  # lists instead of tuples, as in the file
  read = interpret(written, "config.json").model
  lost = {key: value for key, value in own.items() if value and value != read.get(key)}
  if "load_balance_loss" in lost:  # the weight of another definition would be another loss
    lost["load_balance_loss_weight"] = own["load_balance_loss_weight"]
  if not lost:
    return None
  words = " ".join(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in lost.items())
  return (
    f"config.json of {model.decoder_block} has no field for {words}; a training that starts from this export needs these keys"
  )


_TOKENS = ("bos_token_id", "eos_token_id")


def _absent_tokens(model: Mapping[str, Any], where: str) -> Iterator[str]:
  """Yields a note for each special token that the vocabulary of a file does not have."""
  rows = model["vocab_size"]
  for key in _TOKENS:
    ids = model.get(key)
    for token in ids if isinstance(ids, tuple) else () if ids is None else (ids,):
      if token >= rows:
        yield f"{where}: {key} {token} never occurs: the vocabulary has the ids 0 to {rows - 1}"
