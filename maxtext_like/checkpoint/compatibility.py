"""Whether a run may go on from a stored step: configuration and leaves are compared before a single array is read.

Orbax refuses other shapes but casts dtypes silently (float32 to int8 included) and cannot see that the number of heads
or the rope base changed when all shapes agree. So the configuration is stored with each step and compared key by key.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from maxtext_like.errors import UserError

# Labels, not dimensions: a renamed model file, or one that lists the tokens that end an answer, is the same model.
_MODEL_LABELS = frozenset({"model_name", "bos_token_id", "eos_token_id"})
# Mappings that are one value: another entry is another value, not a key of another version.
_MAPPINGS = frozenset({"adapter.lora_rank_pattern", "adapter.lora_alpha_pattern"})
# What decides which arrays a state has, beside the model.
_STATE_KEYS = frozenset(
  {
    f"training.{key}"
    for key in (
      "opt_type",
      "mu_dtype",
      "nu_dtype",
      "sgd_momentum",
      "adafactor_momentum_rank",
      "optimizer_in_backward",
      "trainable_parameters_mask",
      "vision_tower",
    )
  }
  | {"vision.use_multimodal", *_MAPPINGS}
  | {
    f"adapter.{key}"
    for key in (
      "lora_rank",
      "lora_alpha",
      "lora_rslora",
      "lora_dora",
      "lora_modules",
      "modules_to_save",
      "base_weights",
      "base_weights_modules",
    )
  }
)
GRADIENT_SHARES, LOSS_SCALE = "gradient_shares", "loss_scale"
# What decides what the numbers of a state are stored in.
_DTYPE_KEYS = frozenset({"precision.weight_dtype", "training.mu_dtype", "training.nu_dtype"})
# Parts of a state that a run may want and a checkpoint lack, or the other way round: they begin anew.
BEGUN_ANEW = frozenset({GRADIENT_SHARES, LOSS_SCALE})
# What says how long a run is.
_LENGTH_KEYS = frozenset(
  {"training.steps", "training.epochs", "training.early_stopping_patience", "training.early_stopping_threshold"}
)
# What ``vision:`` says about the data, not about the tower.
_VISION_DATA = frozenset({"image_placeholder", "images_field", "max_images_per_row"})
_SHOWN = 12


def record(config: Any) -> dict[str, Any]:
  """Returns a configuration (dataclass or mapping) or other data as the JSON values that a manifest stores.

  Raises:
    ValueError: a value that JSON has no form for.
  """
  values = dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else config
  try:
    return json.loads(json.dumps(values, allow_nan=False))
  except (TypeError, ValueError) as error:
    raise ValueError(f"cannot be stored in a checkpoint, which keeps JSON values: {error}") from error


def flat_keys(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns nested sections as ``section.key`` -> value."""
  flat: dict[str, Any] = {}
  for key, value in values.items():
    if isinstance(value, dict) and value and prefix + key not in _MAPPINGS:
      flat.update(flat_keys(value, f"{prefix}{key}."))
    else:
      flat[prefix + key] = value
  return flat


def differences(saved: dict[str, Any], current: dict[str, Any]) -> list[tuple[str, Any, Any]]:
  """Returns ``(section.key, saved value, current value)`` of every key that both have with different values.

  A key that only one of them has was added or dropped by another version of the program; it is no change of the user's.
  """
  old, new = flat_keys(saved), flat_keys(current)
  return [(key, old[key], new[key]) for key in old if key in new and old[key] != new[key]]


def part_of(name: str) -> str:
  """The part of a state that a leaf is in."""
  return name.split(".", 1)[0]


def surely_same_arrays(saved: dict[str, Any], current: dict[str, Any]) -> bool:
  """Whether no key differs that could make other arrays; where one does, the arrays themselves have to be compared."""
  parts = [
    {name: values.get(name, {}) for name in ("model", "vision", "precision", "training", "adapter")}
    for values in (saved, current)
  ]
  return all(key in _LENGTH_KEYS for key, _, _ in differences(*parts))


def _table(changes: Iterable[tuple[str, Any, Any]]) -> str:
  return "\n".join(f"  {key}: checkpoint {json.dumps(old)}, this run {json.dumps(new)}" for key, old, new in changes)


def _of_the_model(sections: dict[str, Any]) -> dict[str, Any]:
  """The sections that say which model it is; a vision tower that is not built is no part of it."""
  vision = sections.get("vision", {})
  tower = {k: v for k, v in vision.items() if k not in _VISION_DATA} if vision.get("use_multimodal") else {}
  return {"model": sections.get("model", {}), "vision": tower}


def require_same_model(where: str, saved: dict[str, Any], current: dict[str, Any]) -> None:
  """The part of ``check_state`` that needs no arrays. Raises UserError."""
  check_state(where, saved, current, {}, {}, allow_dtype_change=True)


def check_state(
  where: str,
  saved: dict[str, Any],
  current: dict[str, Any] | None,
  saved_leaves: dict[str, dict[str, Any]],
  wanted_leaves: dict[str, dict[str, Any]],
  *,
  allow_dtype_change: bool,
  subset: bool = False,
) -> None:
  """Refuses a checkpoint of another model, even when every shape agrees, and one with other arrays.

  Args:
    where: the step's directory, for the message.
    saved: configuration of the checkpoint, by section.
    current: configuration of this run, by section; None leaves the configurations uncompared.
    saved_leaves: shape and dtype of every stored leaf by name.
    wanted_leaves: the same of this run's state; of what is ``BEGUN_ANEW`` either may lack some.
    allow_dtype_change: the key of that name; a float may then become another float.
    subset: the checkpoint may hold more leaves than are wanted.

  Raises:
    UserError: lists the configuration keys and the leaves that differ.
  """
  current = current or {}
  models = [
    change
    for change in differences(_of_the_model(saved), _of_the_model(current))
    if change[0].removeprefix("model.") not in _MODEL_LABELS
  ]
  leaves = _leaf_complaints(saved_leaves, wanted_leaves, subset=subset)
  if models:
    names = [sections.get("model", {}).get("model_name", "unnamed") for sections in (saved, current)]
    whose = f" ({names[0]}; this run trains {names[1]})" if names[0] != names[1] else ""
    problem = [f"checkpoint of another model configuration{whose}:\n{_table(models)}", *leaves]
  elif leaves:
    causes = [change for change in differences(saved, current) if change[0] in _STATE_KEYS]
    because = [f"  configuration keys that differ:\n{_table(causes)}"] if causes else []
    problem = ["the checkpoint's arrays are not this run's:", *because, *leaves]
  else:
    keys = [change for change in differences(saved, current) if change[0] in _DTYPE_KEYS]
    _check_dtypes(where, saved_leaves, wanted_leaves, keys, allow=allow_dtype_change)
    return
  text = "\n".join(problem)
  raise UserError(f"{where}: {text}\n  use the checkpoint's values, or start a new run with another run_name")


def _listed(names: list[str]) -> str:
  shown = "\n".join(f"    {name}" for name in names[:_SHOWN])
  return shown + (f"\n    ... and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _leaf_complaints(saved: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]], *, subset: bool) -> list[str]:
  complaints = []
  if absent := [name for name in wanted if name not in saved and part_of(name) not in BEGUN_ANEW]:
    complaints.append(f"  arrays that are not in the checkpoint:\n{_listed(absent)}")
  if not subset and (unknown := [name for name in saved if name not in wanted and part_of(name) not in BEGUN_ANEW]):
    complaints.append(f"  arrays that are only in the checkpoint:\n{_listed(unknown)}")
  shapes = [
    f"{name}: checkpoint {tuple(saved[name]['shape'])}, this run {tuple(leaf['shape'])}"
    for name, leaf in wanted.items()
    if name in saved and list(saved[name]["shape"]) != list(leaf["shape"])
  ]
  if shapes:
    complaints.append(f"  arrays of other shapes:\n{_listed(shapes)}")
  return complaints


def _check_dtypes(
  where: str,
  saved: dict[str, dict[str, Any]],
  wanted: dict[str, dict[str, Any]],
  keys: Sequence[tuple[str, Any, Any]],
  *,
  allow: bool,
) -> None:
  changed = [(name, saved[name]["dtype"], leaf["dtype"]) for name, leaf in wanted.items() if name in saved]
  changed = [change for change in changed if change[1] != change[2]]
  fixed = [change for change in changed if not (_is_float(change[1]) and _is_float(change[2]))]
  if changed and (fixed or not allow):
    lines = [f"{name}: checkpoint {old}, this run {new}" for name, old, new in fixed or changed]
    if fixed:
      remedy = "integers and floats are never cast into each other"
    else:
      values = ", ".join(f"{key.split('.')[-1]}={'null' if old is None else old}" for key, old, _ in keys)
      own = f"use the checkpoint's {values}" if keys else "use the dtypes of the checkpoint"
      remedy = f"{own}, or allow_dtype_change=true to cast, checking the range"
    raise UserError(f"{where}: the checkpoint stores other dtypes:\n{_listed(lines)}\n  {remedy}")


def _is_float(dtype: str) -> bool:
  return dtype.startswith(("float", "bfloat"))
