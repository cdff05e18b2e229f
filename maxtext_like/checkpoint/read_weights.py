"""Reads the initial parameters of a model from a checkpoint of ours or of Hugging Face."""

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.checkpoint.adapters import adapter_step
from maxtext_like.checkpoint.added_rows import with_added_rows, with_stored_vocabulary
from maxtext_like.checkpoint.huggingface import tensors
from maxtext_like.checkpoint.huggingface.config import compared_with_file, read_config
from maxtext_like.checkpoint.huggingface.weights import load_hugging_face
from maxtext_like.checkpoint.model_changes import Comparison, compared
from maxtext_like.checkpoint.quantized_rows import read_quantized
from maxtext_like.checkpoint.store import manifest, stored_state
from maxtext_like.checkpoint.store.partial_read import StoredArrays
from maxtext_like.checkpoint.weight_sources import (
  find_step,
  is_hugging_face,
  local_hugging_face,
  local_step,
  no_checkpoint,
  readable_step,
)
from maxtext_like.config.yaml_file import to_text
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.models.model import Model
from maxtext_like.models.row_norms import row_labels, row_squares
from maxtext_like.sharding import processes
from maxtext_like.sharding.mesh import use_mesh
from maxtext_like.storage import Place

_log = logging.getLogger(__name__)
_TOLD_ROUNDING = 0.05  # warn if rounding changes more than this share of the adapter's update


def read_weights(
  directory: Path | Place,
  model: Model,
  *,
  starts: Callable[[str], None] | None = None,
  opened: Callable[[manifest.Manifest], object] | None = None,
) -> Any:
  """Reads the parameters in ``directory``; each device reads its own part. Rows are added if ``model`` has a larger vocabulary.

  Args:
    directory: a Hugging Face checkpoint (config.json and safetensors), a run, its checkpoints folder, or one step; it may be in
      a store.
    model: the model that gets the parameters.
    starts: for a run that starts training with them. It is called with a line for each key that differs from the checkpoint's,
      and for a part that the checkpoint lacks, which is then initialized from the run's seed. None refuses such a part.
    opened: called with the manifest of the step, if the checkpoint is one of a run.

  Raises:
    UserError: there is no checkpoint, or it is of another model.
    NonFiniteError: a weight is not finite.
  """
  if (smaller := with_stored_vocabulary(directory, model)) is not None:
    return with_added_rows(read_weights(directory, smaller, starts=starts, opened=opened), model, directory)
  params = model.abstract_params
  # A Hugging Face checkpoint.
  if is_hugging_face(directory):
    places = jax.tree.map(lambda x: x.sharding, params)
    config = model.config
    place = local_hugging_face(directory)
    comparison = compared_with_file(read_config(place), config.model, config.vision)
    lacking = _lacking(comparison, model, starts is not None)
    found = load_hugging_face(
      place, model.decoder, model=config.model, vision=config.vision, shardings=places, finite=True, base=model.base,
      allow_model_change=config.checkpoint.allow_model_change, without=lacking,
    )  # fmt: skip
    for path, value in _drawn(lacking, model).items():
      node = found
      for key in path[:-1]:
        node = node.setdefault(key, {})
      node[path[-1]] = value
    _say(starts, comparison, lacking, config.training.seed)
    return found
  # A step of a run.
  step = find_step(directory)
  if step is None:
    raise no_checkpoint(f"init_from: {directory}", directory)
  if model.base is not None and isinstance(step, Place):
    step = local_step(step)  # single layers are read from it
  step = readable_step(step)
  stored = _manifest(step)
  if opened is not None:
    opened(stored)
  comparison = compared(stored.config, manifest.record(model.config), subset=True)
  if adapter_step.holds_adapter_alone(stored):
    if model.base is not None:
      raise UserError(
        f"init_from: {step} contains an adapter, which cannot be merged into base_weights={model.base.form.name}\n"
        "  fix: export it first and name the exported directory, or leave base_weights out"
      )
    found = adapter_step.read_merged(step, stored, model, read_weights)
    if found.rounding > _TOLD_ROUNDING:
      _log.warning(
        "%s: the adapter is merged into weights in %s; rounding changes %.2g of its update; weight_dtype=float32 avoids that",
        step, model.config.precision.weight_dtype, found.rounding,
      )  # fmt: skip
    _say(starts, comparison, (), model.config.training.seed)
    return _finite(found.params, step, model)
  allow = model.config.checkpoint.allow_dtype_change
  lacking = _lacking(comparison, model, starts is not None)
  quantized = set() if model.base is None else set(model.base.weights)
  wanted = {".".join(path): x for path, x in tensors.flatten(params) if path[:-1] not in quantized and path not in lacking}
  found = stored_state.load(step, {"params": wanted}, config=model.config, allow_dtype_change=allow, adds=starts is not None)
  drawn = {".".join(path): x for path, x in _drawn(lacking, model).items()}
  read = _finite(_nested(params, found.state["params"], drawn, _quantized_rows(step, model)), step, model)
  _say(starts, comparison, lacking, model.config.training.seed)
  return read


def _lacking(comparison: Comparison, model: Model, starts: bool) -> tuple[tuple[str, ...], ...]:
  """Returns the paths of the parameters of a part that the model has and the checkpoint lacks, if a run starts training.

  Raises:
    UserError: the run trains only an adapter, so these parameters would be neither trained nor stored.
  """
  if not starts or comparison.adds is None:
    return ()
  adds = comparison.adds
  if model.config.adapter.trained:
    raise UserError(
      f"init_from: the checkpoint has no {adds.part}, and this run trains only an adapter\n"
      f"  why: the {adds.part} would keep its random initial values\n"
      f"  fix: train the {adds.part} first, in a run without an adapter and with {adds.stage}={to_text(adds.before)}"
    )
  return tuple(path for path, _ in tensors.flatten(model.spec) if adds.part in path)


def _drawn(lacking: Collection[tuple[str, ...]], model: Model) -> dict[tuple[str, ...], jax.Array]:
  """Returns the parameters of some paths, initialized as in a new run."""
  if not lacking:
    return {}
  places = {path: x.sharding for path, x in tensors.flatten(model.abstract_params) if path in lacking}

  def draw(seed: jax.Array) -> list[jax.Array]:
    drawn = dict(tensors.flatten(model.draw(jax.random.key(seed))))
    return [drawn[path] for path in places]

  seed = np.uint32(model.config.training.seed % 2**32)
  with use_mesh(model.mesh):
    compiled = jax.jit(draw, out_shardings=[*places.values()]).lower(seed).compile()
  processes.await_compiled("the parameters of a new part", model.config.watchdog.watchdog_compile_seconds)
  return dict(zip(places, compiled(seed), strict=True))


def _say(starts: Callable[[str], None] | None, comparison: Comparison, lacking: Collection[tuple[str, ...]], seed: int) -> None:
  """Reports the differences from the checkpoint to a run that starts training."""
  if starts is None:
    return
  for line in comparison.without_added().lines():
    starts(line)
  if comparison.adds is not None:
    starts(
      f"new     {comparison.adds.part}: not in the checkpoint; {len(lacking)} parameter arrays initialized from seed {seed}"
    )


def _quantized_rows(step: Any, model: Model) -> dict[str, Any]:
  """Reads the weights of a step that this run stores quantized, one layer at a time."""
  if model.base is None:
    return {}
  arrays, places = StoredArrays(step), dict(tensors.flatten(model.abstract_params))
  found = {}
  for path, p in model.base.weights.items():
    own = {where[-1]: x.sharding for where, x in places.items() if where[:-1] == path}
    rest = (slice(None),) * (len(p.shape) - 1)
    read = lambda row, path=path, rest=rest: arrays.parameter(path, (slice(None) if row is None else row, *rest))
    found[".".join(path)] = read_quantized(model.base.form, p, own, read)
  return found


def _nested(like: Any, *found: dict[str, Any]) -> Any:
  """Builds a tree from arrays given by name."""
  by_name = {name: value for part in found for name, value in part.items()}

  def walk(node: Any, path: tuple[str, ...]) -> Any:
    name = ".".join(path)
    return by_name[name] if name in by_name else {key: walk(value, (*path, key)) for key, value in node.items()}

  return walk(like, ())


def _manifest(step: Path | Place) -> manifest.Manifest:
  try:
    return manifest.read(step)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from error


@jax.jit
def _all_finite(arrays: list[jax.Array]) -> jax.Array:
  return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()


def _finite(found: Any, step: Path | Place, model: Model) -> Any:
  """Returns the weights after a check that none is NaN or infinite."""
  if _all_finite([x for x in jax.tree.leaves(found) if x.dtype.itemsize > 1]):  # codes of quantized weights have no NaN
    return found
  # Only now compile the large program that names the layer. It takes as long as reading gigabytes.
  finite = jax.device_get(jax.jit(lambda tree: row_squares(tree).finite)(found))
  if bad := [name for name, good in zip(row_labels(model.decoder, model.spec), finite, strict=True) if not good]:
    raise NonFiniteError(
      f"init_from: {step}: {len(bad)} arrays contain non-finite numbers, the first is {bad[0]}\n"
      "  why: everything computed with them would be non-finite too\n"
      "  fix: start from another step of that run"
    )
  return found


def read_merged(step: Path, stored: manifest.Manifest, model: Model, dtype: str) -> tuple[Any, float]:
  """Reads the base weights of a step's adapter, merges the adapter and rounds to a dtype.

  Returns:
    The weights, and the change by rounding relative to the adapter's update.

  Raises:
    UserError, NonFiniteError: as ``read_weights``.
  """
  found = adapter_step.read_merged(step, stored, model, read_weights, dtype)
  return _finite(found.params, step, model), found.rounding
