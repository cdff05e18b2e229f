"""The parameters that a model begins with, from a checkpoint of ours or of Hugging Face."""

from pathlib import Path
from typing import Any

import jax

from maxtext_like.checkpoint import adapter_step, manifest, restore
from maxtext_like.checkpoint.huggingface.weights import load_hugging_face
from maxtext_like.checkpoint.weight_sources import (
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
    return load_hugging_face(place, model.decoder, model=config.model, vision=config.vision, shardings=places, finite=True)
  step = find_step(directory)
  if step is None:
    raise no_checkpoint(f"init_from: {directory}", directory)
  step = readable_step(step)
  if adapter_step.holds_adapter_alone(stored := _manifest(step)):
    found = adapter_step.read_merged(step, stored, model, read_weights)
    return _finite(found, step, model)
  allow = model.config.checkpoint.allow_dtype_change
  found = restore.load(step, {"params": params}, config=model.config, allow_dtype_change=allow).state["params"]
  return _finite(found, step, model)


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
