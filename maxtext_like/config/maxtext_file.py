"""Reads model files of MaxText, and lists where the defaults of this project differ from MaxText's.

A model file of MaxText defines the same model here as in MaxText. ``translate_file`` adds the choices that MaxText makes in its
code, by the model's name or in its base.yml. Training settings are not part of such a file: the defaults of this project apply,
and ``differences`` lists those that differ from MaxText's.
"""

from collections.abc import Mapping

from maxtext_like.config.families import FAMILIES
from maxtext_like.config.maxtext import CONVERTED, RENAMED, translate_keys
from maxtext_like.config.maxtext_family import ModelFile, entry_of
from maxtext_like.config.problems import Problem
from maxtext_like.config.schema import LEAVES
from maxtext_like.config.yaml_file import Entry, to_text

MODEL_KEYS = frozenset(key for key in (*RENAMED, *CONVERTED) if key.startswith("base_") and key != "base_output_directory")
"""Keys by which a model file of MaxText is recognized: each has one of them, and no file of this project does."""

RUN_KEYS = frozenset(("base_config", "override_model_config"))
"""Keys by which a run configuration of MaxText, such as its base.yml, is recognized. It is not a model file."""

_MODEL_DEFAULTS = {"normalization_layer_epsilon": 1e-5, "logits_via_embedding": False}
"""Defaults of MaxText's base.yml for keys of the model, for all families."""

DEFAULTS: dict[str, object] = {
  "max_position_embeddings": 163840,
  "dtype": "bfloat16",
  "weight_dtype": "float32",
  "grad_dtype": "float32",
  "float32_qk_product": False,
  "float32_logits": False,
  "float32_gate_logits": False,
  "float32_weight_sum": True,
  "cast_logits_to_fp32": True,
  "logits_dot_in_fp32": False,
  "matmul_precision": "default",
  "steps": 150001,
  "scan_layers": True,
  "remat_policy": "full",
  "per_device_batch_size": 12,
  "max_target_length": 2048,
  "gradient_accumulation_steps": 1,
  "opt_type": "adamw",
  "learning_rate": 3e-5,
  "lr_schedule_type": "cosine",
  "warmup_steps_fraction": 0.1,
  "learning_rate_final_fraction": 0.1,
  "adam_b1": 0.9,
  "adam_b2": 0.95,
  "adam_eps": 1e-8,
  "adam_weight_decay": 0.1,
  "gradient_clipping_threshold": 1.0,
  "z_loss_multiplier": 0.0,
  "num_vocab_tiling": 1,
  "packing": True,
  "shuffle": True,
  "checkpoint_interval": 10000,
  "max_to_keep": "all",
  "dataset": "tfds (c4/en:3.1.0)",
  "tokenizer": "the model's, from the Hub",
}
"""MaxText's defaults by our key name. Equal defaults are included, because a model file may change ours."""

OTHER_RULES = (
  ("weight decay", "not on norms, scalars, biases", "on every parameter"),
  ("first step", "learning_rate / warm-up steps", "learning rate 0"),
)
"""Differences without a key: (subject, here, in MaxText)."""


def is_maxtext_file(entries: list[Entry]) -> bool:
  """Return True if the entries are those of a model file of MaxText."""
  return any(e.key in MODEL_KEYS for e in entries)


def translate_file(entries: list[Entry], stem: str) -> tuple[list[Entry], list[str], list[Problem]]:
  """Translate a model file of MaxText.

  Args:
    entries: keys of the file.
    stem: file name without ``.yml``, which is the model's name in MaxText.

  Returns:
    The translated entries, notes on keys without effect or with another meaning, and problems.
  """
  given = {e.key: e for e in entries}
  file = ModelFile(given, "")
  block, file.name = file.text("decoder_block"), file.text("model_name") or stem
  family = next((name for name, f in FAMILIES.items() if block in (name, *f.maxtext.decoder_blocks)), block)
  return translate_keys(_completed(entries, file, family), family)


def differences(values: Mapping[str, object], said: frozenset[str], *, decoder: bool = True) -> list[tuple[str, str, str]]:
  """Return defaults that differ from MaxText's, as rows (subject, here, in MaxText).

  Args:
    values: resolved values by key.
    said: keys that MaxText's file, an overlay or the command line sets; they are left out.
    decoder: include keys of the model. False for a model file of this project, which is not the same file as MaxText's.
  """
  family = FAMILIES[str(values["decoder_block"])].maxtext
  idle = set() if values["num_experts"] else {"float32_gate_logits"}
  rows = [] if decoder else [("model", "this project's file, as released", "MaxText's file")]
  for key, theirs in {**DEFAULTS, **family.differing(values)}.items():
    if key in said or key in idle or values[key] == theirs or (LEAVES[key][0] == "model" and not decoder):
      continue
    rows.append((key, to_text(values[key]), theirs if isinstance(theirs, str) else to_text(theirs)))
  definition = values["load_balance_loss"]
  if values["load_balance_loss_weight"] and definition != "maxtext" and "load_balance_loss" not in said:
    rows.append(("load_balance_loss", str(definition), "maxtext"))
  if values["use_multimodal"]:
    if not values["trainable_parameters_mask"] and values["vision_tower"] is None:
      rows.append(("vision_tower", "trained", "projector (freeze_vision_encoder_params)"))
    rows += family.image_rows
  return [*rows, *OTHER_RULES]


def table(of: str, rows: list[tuple[str, str, str]]) -> str:
  """Return the differences as a table of text lines."""
  rows = [("", "here", "MaxText"), *rows]
  widths = [max(len(row[i]) for row in rows) for i in range(2)]
  lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
  return "\n".join([f"{of}: these defaults differ from MaxText's:", *lines])


def _completed(entries: list[Entry], file: ModelFile, family: str) -> list[Entry]:
  """Return the entries of a file with the values that MaxText adds, and without those that it ignores."""
  if family in FAMILIES:
    file.assumed |= {**_MODEL_DEFAULTS, **FAMILIES[family].maxtext.defaults}
  if "num_experts" in file.given and file.number("num_experts") == 1:
    file.dropped.add("num_experts")  # MaxText's number for a dense model
    file.assumed["num_experts"] = 0
  if file.number("num_experts") > 1:
    file.assumed["load_balance_loss"] = "maxtext"  # the definition that load_balance_loss_weight has in MaxText
  if family in FAMILIES:
    FAMILIES[family].maxtext.complete(file)
  said = {RENAMED.get(key, key) for key in file.given} - file.dropped
  kept = [e for e in entries if e.key not in file.dropped]
  return kept + file.extra + [entry_of(key, value, file.source) for key, value in file.assumed.items() if key not in said]


def notes(values: Mapping[str, object], of: str) -> list[str]:
  """Return notes on a file for the resolved values, about differences between MaxText and the released models."""
  return [f"{of}: {note}" for note in FAMILIES[str(values["decoder_block"])].maxtext.notes(values)]
