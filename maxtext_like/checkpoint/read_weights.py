"""The parameters that a model begins with, from a checkpoint of ours or of Hugging Face."""

import logging
from pathlib import Path
from typing import Any

import jax

from maxtext_like.checkpoint import adapter_step, manifest, restore
from maxtext_like.checkpoint.huggingface import tensors
from maxtext_like.checkpoint.huggingface.weights import load_hugging_face
from maxtext_like.checkpoint.partial_read import StoredArrays
from maxtext_like.checkpoint.quantised_rows import read_quantised
from maxtext_like.checkpoint.weight_sources import (
  copied_step,
  find_step,
  hugging_face_here,
  is_hugging_face,
  no_checkpoint,
  readable_step,
)
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.models.placed import Model
from maxtext_like.models.row_norms import row_labels, row_squares
from maxtext_like.storage import Place

_log = logging.getLogger(__name__)
_TOLD_ROUNDING = 0.05  # of what an adapter adds


def read_weights(directory: Path | Place, model: Model) -> Any:
  """The parameters of ``directory``, each device reading its own part.

  Args:
    directory: a Hugging Face checkpoint (config.json and safetensors), a run, its checkpoints, or one step of them; it may be
      in a store.
    model: whose they become.

  Raises:
    UserError: nothing of the kind is there, or it is of another model.
    NonFiniteError: a weight is not finite.
  """
  params = model.abstract_params
  if is_hugging_face(directory):
    places = jax.tree.map(lambda x: x.sharding, params)
    config = model.config
    place = hugging_face_here(directory)
    return load_hugging_face(
      place, model.decoder, model=config.model, vision=config.vision, shardings=places, finite=True, base=model.base
    )
  step = find_step(directory)
  if step is None:
    raise no_checkpoint(f"init_from: {directory}", directory)
  if model.base is not None and isinstance(step, Place):
    step = copied_step(step)  # single layers are read of it
  step = readable_step(step)
  if adapter_step.holds_adapter_alone(stored := _manifest(step)):
    if model.base is not None:
      raise UserError(
        f"init_from: {step}: an adapter on weights of its own, below another adapter on base_weights={model.base.form.name}\n"
        "  fix: export it first, and name what export writes; or leave base_weights out"
      )
    found = adapter_step.read_merged(step, stored, model, read_weights)
    if found.rounding > _TOLD_ROUNDING:
      _log.warning(
        "%s: the adapter is added to weights in %s, and what rounding changes is %.2g of what it adds; weight_dtype=float32 "
        "has all of it", step, model.config.precision.weight_dtype, found.rounding,
      )  # fmt: skip
    return _finite(found.params, step, model)
  allow = model.config.checkpoint.allow_dtype_change
  quantised = set() if model.base is None else set(model.base.weights)
  wanted = {".".join(path): x for path, x in tensors.flatten(params) if path[:-1] not in quantised}
  found = restore.load(step, {"params": wanted}, config=model.config, allow_dtype_change=allow).state["params"]
  return _finite(_nested(params, found, _quantised_rows(step, model)), step, model)


def _quantised_rows(step: Any, model: Model) -> dict[str, Any]:
  """The weights of a step of ours that are stored in another form, each layer read by itself."""
  if model.base is None:
    return {}
  arrays, places = StoredArrays(step), dict(tensors.flatten(model.abstract_params))
  found = {}
  for path, p in model.base.weights.items():
    own = {where[-1]: x.sharding for where, x in places.items() if where[:-1] == path}
    rest = (slice(None),) * (len(p.shape) - 1)
    read = lambda row, path=path, rest=rest: arrays.parameter(path, (slice(None) if row is None else row, *rest))
    found[".".join(path)] = read_quantised(model.base.form, p, own, read)
  return found


def _nested(like: Any, *found: dict[str, Any]) -> Any:
  """The tree of what was found by names."""
  by_name = {name: value for part in found for name, value in part.items()}

  def walk(node: Any, path: tuple[str, ...]) -> Any:
    name = ".".join(path)
    return by_name[name] if name in by_name else {key: walk(value, (*path, key)) for key, value in node.items()}

  return walk(like, ())


def _manifest(step: Path | Place) -> manifest.Manifest:
  try:
    return manifest.read(step)
  except manifest.DamageError as error:
    raise UserError(f"{step} is not a complete checkpoint: {error}") from error


def _finite(found: Any, step: Path | Place, model: Model) -> Any:
  """The weights, none of which is NaN or infinite."""
  finite = jax.device_get(jax.jit(lambda tree: row_squares(tree).finite)(found))
  if bad := [name for name, good in zip(row_labels(model.decoder, model.spec), finite, strict=True) if not good]:
    raise NonFiniteError(
      f"init_from: {step}: {len(bad)} arrays hold numbers that are not finite, first {bad[0]}\n"
      "  why: whatever is computed with them is not finite either\n"
      "  fix: begin with another step of that run"
    )
  return found


def read_merged(step: Path, stored: manifest.Manifest, model: Model, dtype: str) -> tuple[Any, float]:
  """The weights below a step's adapter with the adapter added and rounded to a dtype, and what rounding changed beside what the
  adapter adds.

  Raises:
    UserError, NonFiniteError: as ``read_weights``.
  """
  found = adapter_step.read_merged(step, stored, model, read_weights, dtype)
  return _finite(found.params, step, model), found.rounding
