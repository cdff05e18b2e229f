"""Settings of adapter_config.json (``LoraConfig`` of peft 0.21): which are refused, and what they say about a module.

peft does not validate all of them: it takes the text "false" as true, and drops tensors of modules that the settings exclude.
"""

import math
import re
from typing import Any

from maxtext_like.errors import UserError
from maxtext_like.strict_json import printable

_UNSUPPORTED = (
  *("lora_bias", "trainable_token_indices", "fan_in_fan_out", "alora_invocation_tokens", "arrow_config"),
  *("kasa_config", "layer_replication", "monteclora_config", "use_bdlora", "use_qalora"),
)
"""Settings of peft with which an adapter is more than a low-rank update of weights."""
_KNOWN = {*_UNSUPPORTED} | set(
  "alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config exclude_modules "
  "inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_dropout lora_ga_config "
  "megatron_config megatron_core modules_to_save peft_type peft_version qalora_group_size r rank_pattern revision "
  "runtime_config target_modules target_parameters task_type use_dora use_rslora velora_config".split()
)
"""All settings of peft 0.21, read or without effect on a saved adapter."""
_OF_THE_MODEL = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""Values of ``init_lora_weights`` that leave the base weights unchanged. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change them."""

_FLAGS = ("use_rslora", "use_dora", "ensure_weight_tying", *("fan_in_fan_out", "lora_bias", "use_bdlora", "use_qalora"))
_OUTER = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
"""Prefixes of a text model's modules in the classes of transformers. Tensors and settings of a file may differ in them."""
_LAYER = r"(?:^|.*?\.)(?:{})\.(\d+)\."


def require_valid(config: dict[str, Any], where: str) -> None:
  """Refuses values that are not of the type of a setting.

  Args:
    config: the contents of the file.
    where: name of the file.

  Raises:
    UserError: names the setting.
  """
  for key in _FLAGS:
    if not isinstance(value := config.get(key), bool | None):
      raise UserError(
        f"{where}: {key} = {printable(repr(value))} is not true or false",
        fix=f"write {key} as true or false, as in the LoraConfig of the training",
      )
  share = config.get("lora_dropout")
  if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1):
    raise UserError(
      f"{where}: lora_dropout = {printable(repr(share))} is not a number from 0 to below 1",
      fix="write lora_dropout as in the LoraConfig of the training; it has no effect on a trained adapter",
    )
  for key in ("target_modules", "exclude_modules", "layers_pattern"):
    value = config.get(key)
    texts = value if isinstance(value, list) else [value]
    if value is not None and not all(isinstance(text, str) for text in texts):
      raise UserError(
        f"{where}: {key} = {printable(value)} is neither a text nor a list of texts", fix=f"write {key} as [NAME, ...]"
      )
  layers = config.get("layers_to_transform")
  numbers = layers if isinstance(layers, list) else [layers]
  if layers is not None and not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
    raise UserError(
      f"{where}: layers_to_transform = {printable(layers)} is neither a layer nor a list of layers",
      fix="write layers_to_transform as [NUMBER, ...], or null for all layers",
    )


def require_supported(config: dict[str, Any], where: str) -> None:
  """Refuses settings with which an adapter is more than an update of weights. ``config`` and ``where``: see above."""
  for key in _UNSUPPORTED:
    if config.get(key):
      raise UserError(f"{where}: {key} = {printable(config[key])} is not supported\n  fix: use a LoRA, rsLoRA or DoRA adapter")
  begun = config.get("init_lora_weights")
  if begun not in _OF_THE_MODEL:
    raise UserError(
      f"{where}: init_lora_weights = {printable(begun)} is not supported\n"
      "  why: this initialization changes the base weights, and the adapter only fits the changed weights\n"
      "  fix: convert the adapter with peft: save_pretrained(DIR, path_initial_model_for_weight_conversion=INITIAL_ADAPTER)"
    )


def unread(config: dict[str, Any]) -> list[str]:
  """Returns the names of settings that this version does not know and that have a value."""
  return [printable(key) for key in config if key not in _KNOWN and config[key] not in (None, False, [], {})]


def require_target(config: dict[str, Any], module: str, where: str) -> None:
  """Refuses the tensors of a module that the settings do not adapt. peft would drop them, and the base model would answer.

  Args:
    config: the contents of the file.
    module: name of a linear map with tensors in the adapter, such as ``model.layers.0.self_attn.q_proj``.
    where: name of the file.

  Raises:
    UserError: names the setting that contradicts the tensors.
  """
  bare = re.sub(r"^(?:(?:model|language_model)\.)+", "", module)
  names = (module, *(outer + bare for outer in _OUTER))
  targets, excluded = config.get("target_modules"), config.get("exclude_modules")
  layers, pattern = config.get("layers_to_transform"), config.get("layers_pattern")
  contradicting = None
  if excluded and _matches(excluded, module, "exclude_modules", where):
    contradicting = "exclude_modules", excluded
  # Without the setting, peft takes the modules that it knows for the model.
  elif targets is not None and not any(_matches(targets, name, "target_modules", where) for name in names):
    contradicting = "target_modules", targets
  elif layers not in (None, []) and _layer(module, pattern, where) not in (layers if isinstance(layers, list) else [layers]):
    contradicting = "layers_to_transform", layers
  if contradicting is not None:
    key, value = contradicting
    shown = printable(value)
    raise UserError(
      f"{where}: {key} = {shown[:80]}{'...' if len(shown) > 80 else ''} leaves out '{printable(module)}', which has tensors in "
      "the adapter\n"
      "  why: peft would ignore these tensors, so it is unclear which of the two is meant\n"
      f"  fix: correct {key}, or save the adapter again with peft"
    )


def _matches(entries: str | list[str], module: str, key: str, where: str) -> bool:
  """Returns True if a list of names, or a regular expression for the complete name, matches a module, as in peft."""
  if entries == "all-linear":
    return True
  if not isinstance(entries, str):
    return any(module == entry or module.endswith(f".{entry}") for entry in entries)
  return _expression(entries, key, where).fullmatch(module) is not None


def _layer(module: str, patterns: str | list[str] | None, where: str) -> int | None:
  """Returns the number of a module's layer, as peft finds it; None if there is none."""
  several = [patterns] if isinstance(patterns, str) and patterns else patterns
  for pattern in several or [r"[^.]*"]:
    if found := _expression(_LAYER.format(pattern), "layers_pattern", where).match(module):
      return int(found[1])
  return None


def _expression(text: str, key: str, where: str) -> re.Pattern[str]:
  try:
    return re.compile(text)
  except re.error as error:
    raise UserError(f"{where}: {key} '{printable(text)}': {error}", fix=f"correct this regular expression in {key}") from None


def _setting(config: dict[str, Any], patterns: str, key: str, target: str, where: str) -> Any:
  """Returns ``key`` for a target: the first entry of ``patterns`` that matches its end, else the common value, as in peft."""
  by_pattern = config.get(patterns) or {}
  if not isinstance(by_pattern, dict):
    raise UserError(
      f"{where}: {patterns} = {printable(by_pattern)} is not a JSON object",
      fix=f"write {patterns} as an object, {{}} for no exceptions",
    )
  for pattern, value in by_pattern.items():
    try:
      if re.match(rf"(?:.*\.)?({pattern})$", target):
        return value
    except re.error as error:
      raise UserError(
        f"{where}: {patterns} '{printable(pattern)}': {error}", fix=f"correct this regular expression in {patterns}"
      ) from None
  return config.get(key, 8)  # 8 is peft's default of both r and lora_alpha


def rank(config: dict[str, Any], target: str, where: str) -> int:
  """Returns the rank that the settings give to a target."""
  found = _setting(config, "rank_pattern", "r", target, where)
  if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 2**31:
    raise UserError(f"{where}: r = {printable(found)} is not a rank\n  fix: write the first dimension of every lora_A")
  return found


def scale(config: dict[str, Any], target: str, rank: int, where: str) -> float:
  """Returns the factor of B A."""
  alpha = _setting(config, "alpha_pattern", "lora_alpha", target, where)
  if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
    raise UserError(
      f"{where}: lora_alpha = {printable(alpha)} is not a finite number",
      fix="write lora_alpha as in the LoraConfig of the training",
    )
  return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
