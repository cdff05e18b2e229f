"""Decides whether a run may resume from a stored step. Configuration and leaves are compared before any array is read.

Orbax refuses other shapes but casts dtypes silently (float32 to int8 included), and it cannot see that the number of heads or
the RoPE base changed when all shapes agree. The configuration is therefore stored with each step and compared key by key.
"""

from collections.abc import Collection, Container, Sequence
from typing import Any

from maxtext_like.checkpoint.model_changes import Change, compared, require_same
from maxtext_like.config.key_class import KeyClass, Marks, marks
from maxtext_like.config.schema import SECTIONS, section_type
from maxtext_like.errors import UserError
from maxtext_like.models.registry import FAMILIES

# Mappings that are compared as one value: a new entry is a change of the value, not a key of another version.
_MAPPINGS = frozenset({"adapter.lora_rank_pattern", "adapter.lora_alpha_pattern"})
GRADIENT_SHARES, LOSS_SCALE, MOMENTS = "gradient_shares", "loss_scale", "opt_state"
# Optional parts of the state: they are initialized again if the checkpoint lacks them, and ignored if the run does not use
# them.
OPTIONAL_PARTS = frozenset({GRADIENT_SHARES, LOSS_SCALE})
# Keys that determine how long a run trains.
_LENGTH_KEYS = frozenset(
  {"training.steps", "training.epochs", "training.early_stopping_patience", "training.early_stopping_threshold"}
)
_SHOWN = 4


def flat_keys(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens nested sections into ``section.key`` -> value."""
  flat: dict[str, Any] = {}
  for key, value in values.items():
    if isinstance(value, dict) and value and prefix + key not in _MAPPINGS:
      flat.update(flat_keys(value, f"{prefix}{key}."))
    else:
      flat[prefix + key] = value
  return flat


def differences(saved: dict[str, Any], current: dict[str, Any]) -> list[tuple[str, Any, Any]]:
  """Returns ``(section.key, saved value, current value)`` of every key that both have with different values.

  A key that only one of them has was added or removed by another version of the program. It is not a change by the user.
  """
  old, new = flat_keys(saved), flat_keys(current)
  return [(key, old[key], new[key]) for key in old if key in new and old[key] != new[key]]


def part_of(name: str) -> str:
  """Returns the part of the state that a leaf belongs to."""
  return name.split(".", 1)[0]


def arrays_unaffected(saved: dict[str, Any], current: dict[str, Any]) -> bool:
  """Returns True if no changed key can affect the arrays. Otherwise the arrays themselves have to be compared."""
  parts = [
    {name: values.get(name, {}) for name in ("model", "vision", "precision", "training", "adapter")}
    for values in (saved, current)
  ]
  return all(key in _LENGTH_KEYS for key, _, _ in differences(*parts))


def _keys(kinds: Container[KeyClass], *, trained: bool = False) -> frozenset[str]:
  """Returns the ``section.key`` of all keys of some classes outside the model that affect a state.

  Args:
    kinds: the classes.
    trained: also include the keys that select which parameters are trained.
  """
  return frozenset(
    f"{section}.{key}"
    for section in ("precision", "training", "adapter")
    for key, found in marks(SECTIONS[section]).items()
    if found.kind in kinds or (trained and found.selects_trained)
  )


def changes_of(saved: dict[str, Any], current: dict[str, Any], keys: Container[str]) -> list[Change]:
  """Returns the changes of some keys that do not belong to the model.

  Args:
    saved, current: configurations of the checkpoint and of the run.
    keys: ``section.key`` of the keys.
  """
  none = Marks()
  pairs = ((*key.split(".", 1), old, new) for key, old, new in differences(saved, current) if key in keys)
  return [Change(section, key, old, new, old, none) for section, key, old, new in pairs]


def trains_others(saved: dict[str, Any], current: dict[str, Any]) -> bool:
  """Returns True if the same optimizer trains other parameters than the checkpoint's did, so that the moments differ."""
  block = current.get("model", {}).get("decoder_block")
  sections = {"training": SECTIONS["training"]} | ({"model": section_type("model", block)} if block in FAMILIES else {})
  selecting = {f"{name}.{key}" for name, cls in sections.items() for key, own in marks(cls).items() if own.selects_trained}
  changed = {key for key, _, _ in differences(saved, current)}
  return not changed.isdisjoint(selecting) and changed.isdisjoint(_keys({KeyClass.SHAPE, KeyClass.DTYPE}))


def require_same_model(where: str, saved: dict[str, Any], current: dict[str, Any]) -> None:
  """Does the part of ``check_state`` that needs no arrays, for a run that resumes. Raises UserError."""
  check_state(where, saved, current, {}, {}, allow_dtype_change=True, resumes=True)


def check_state(
  where: str,
  saved: dict[str, Any],
  current: dict[str, Any] | None,
  saved_leaves: dict[str, dict[str, Any]],
  wanted_leaves: dict[str, dict[str, Any]],
  *,
  allow_dtype_change: bool,
  subset: bool = False,
  resumes: bool = False,
  adds: bool = False,
) -> None:
  """Refuses a checkpoint of another model, even if every shape agrees, and a checkpoint with other arrays.

  Args:
    where: directory of the step, for the message.
    saved: configuration of the checkpoint, by section.
    current: configuration of this run, by section; None skips the comparison of configurations. With its
      ``allow_model_change`` the mathematics of the model may differ.
    saved_leaves: shape and dtype of every stored leaf by name.
    wanted_leaves: the same for this run's state. Either may lack the parts in ``OPTIONAL_PARTS``, and moments if other
      parameters are trained.
    allow_dtype_change: the key of that name; a float may then become another float.
    subset: the checkpoint may contain further leaves.
    resumes: True if the run resumes from this step; False if a new run starts with its weights.
    adds: the caller initializes the parameters of a part that this model has and the checkpoint lacks.

  Raises:
    UserError: lists the configuration keys and the leaves that differ, and what to type.
  """
  current = current or {}
  # Compare the model keys and the leaves.
  model = compared(saved, current, subset=subset)
  if adds:
    model = model.without_added()
  allow = bool(current.get("checkpoint", {}).get("allow_model_change"))
  leaves = _leaf_complaints(
    saved_leaves, wanted_leaves, subset=subset, spared={MOMENTS} if trains_others(saved, current) else ()
  )
  shapes = model.of(KeyClass.SHAPE)
  # Other arrays although the model keys agree: the cause is a key of training, precision or adapter.
  if leaves and not shapes:
    causes = changes_of(saved, current, _keys({KeyClass.SHAPE, KeyClass.DTYPE}, trained=True))
    fixes = [f"{' '.join(change.word for change in causes)} (the checkpoint's values)"] if causes else []
    fixes.append(f"run_name=NAME init_from={where} (a new run with these weights)" if resumes else "use another checkpoint")
    lines = [f"{where}: the checkpoint's arrays differ from this run's:", *(change.line for change in causes), *leaves]
    raise UserError("\n".join([*lines, "  fix: " + "\n       or ".join(fixes)]))
  # Other shapes or mathematics of the model, then other dtypes.
  require_same(where, model, allow=allow, resumes=resumes)
  changed = changes_of(saved, current, _keys({KeyClass.DTYPE}))
  _check_dtypes(where, saved_leaves, wanted_leaves, changed, allow=allow_dtype_change)


def _listed(names: list[str]) -> str:
  shown = "\n".join(f"    {name}" for name in names[:_SHOWN])
  return shown + (f"\n    ... and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _leaf_complaints(
  saved: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]], *, subset: bool, spared: Collection[str]
) -> list[str]:
  """Returns the differences between the leaves. Either may lack the parts in ``OPTIONAL_PARTS`` and in ``spared``."""
  complaints, may_lack = [], {*OPTIONAL_PARTS, *spared}
  if absent := [name for name in wanted if name not in saved and part_of(name) not in may_lack]:
    complaints.append(f"  arrays missing in the checkpoint:\n{_listed(absent)}")
  if not subset and (unknown := [name for name in saved if name not in wanted and part_of(name) not in may_lack]):
    complaints.append(f"  arrays only in the checkpoint:\n{_listed(unknown)}")
  shapes = [
    f"{name}: checkpoint {tuple(saved[name]['shape'])}, this run {tuple(leaf['shape'])}"
    for name, leaf in wanted.items()
    if name in saved and list(saved[name]["shape"]) != list(leaf["shape"])
  ]
  if shapes:
    complaints.append(f"  arrays with other shapes:\n{_listed(shapes)}")
  return complaints


def _check_dtypes(
  where: str,
  saved: dict[str, dict[str, Any]],
  wanted: dict[str, dict[str, Any]],
  keys: Sequence[Change],
  *,
  allow: bool,
) -> None:
  changed = [(name, saved[name]["dtype"], leaf["dtype"]) for name, leaf in wanted.items() if name in saved]
  changed = [change for change in changed if change[1] != change[2]]
  fixed = [change for change in changed if not (_is_float(change[1]) and _is_float(change[2]))]
  if changed and (fixed or not allow):
    alike: dict[tuple[str, str], list[str]] = {}
    for name, old, new in fixed or changed:
      alike.setdefault((old, new), []).append(name)
    lines = [
      f"{old} in the checkpoint, {new} in this run: "
      + (names[0] if len(names) == 1 else f"{len(names)} arrays, such as {names[0]}")
      for (old, new), names in alike.items()
    ]
    why = "\n  why: integers are never cast to floats, nor floats to integers" if fixed else ""
    words = " ".join(change.word for change in keys) or "the dtypes of the checkpoint"
    fix = f"{words} (the checkpoint's values)" if keys else words
    if not fixed:
      fix += "\n       or allow_dtype_change=true (casts, and checks the range)"
    raise UserError(f"{where}: the checkpoint stores other dtypes:\n{_listed(lines)}{why}\n  fix: {fix}")


def _is_float(dtype: str) -> bool:
  return dtype.startswith(("float", "bfloat"))
