"""Merges one or several adapters, of peft or of our own runs, into the weights of a model."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.checkpoint.adapters import adapter_step
from maxtext_like.checkpoint.adapters.adapted_weights import stored_as
from maxtext_like.checkpoint.adapters.adapter_step import EXTRA, Base
from maxtext_like.checkpoint.huggingface import peft
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.fingerprint import of_files
from maxtext_like.checkpoint.store.stored_config import section
from maxtext_like.checkpoint.store.stored_state import flatten
from maxtext_like.checkpoint.weight_sources import find_step
from maxtext_like.config.adapter_keys import AdapterConfig
from maxtext_like.errors import UserError
from maxtext_like.layers.param import path_keys
from maxtext_like.layers.quantization.low_rank import Layout, factors, with_magnitude
from maxtext_like.models.model import Model
from maxtext_like.models.naming import ADAPTER

_log = logging.getLogger(__name__)


def with_adapters(params: Any, model: Model, directories: Sequence[Path], weights: Path) -> Any:
  """Returns the weights with adapters merged into them, in their own dtype.

  Logs a warning if an adapter of a run was trained on other weights.

  Args:
    params: weights of the model. Their memory is reused if an adapter comes from a run.
    model: the model.
    directories: peft directories, runs with ``lora_rank``, or steps of such runs.
    weights: directory from which the weights were read.

  Raises:
    UserError: a directory contains no adapter, is damaged, or belongs to another model; or as ``in_order``.
  """
  directories = in_order(directories, model, weights)
  params = _rounded(params, model, directories)
  for directory in directories:
    if peft.is_adapter(directory):
      params = _of_peft(params, model, directory)
    else:
      params = _of_a_run(params, model, directory)
  return params


def in_order(directories: Sequence[Path], model: Model, weights: Path) -> list[Path]:
  """Returns adapters in the order in which they are added: complete arrays first, then updates, which are added to them.

  Logs a warning if an adapter of a run was trained on other weights.

  Args:
    directories, model, weights: as for ``with_adapters``.

  Raises:
    UserError: the adapters cannot be combined.
  """
  if len(directories) > 1 and (scaled := [str(d) for d in directories if _has_magnitudes(d)]):
    raise UserError(
      f"{', '.join(scaled)}: a DoRA adapter cannot be used together with others\n"
      "  why: it sets the norms of the weights that it was trained on, which other adapters would change\n"
      "  fix: name one adapter with DoRA and no other"
    )
  if len(apart := [d for d in directories if _has_whole(d, model)]) > 1:
    raise UserError(
      f"{', '.join(str(d) for d in apart)}: each replaces arrays, such as a vision tower, projector, embedding or head\n"
      "  why: one would overwrite the other\n  fix: name only one of them; the others must be adapters without such arrays"
    )
  settings = settings_of_runs(directories)
  found = {(s.base_weights, s.base_weights_modules): d for d, s in settings.items()}
  if len(found) > 1:
    (one, first), (other, second) = [(key[0], place) for key, place in found.items()][:2]
    raise UserError(
      f"{first} was trained on base_weights={one or 'null'}, {second} on {other or 'null'}\n"
      "  why: each corrects the rounding errors of one quantization\n  fix: name only adapters with the same base_weights"
    )
  _compare(directories, weights)
  return sorted(directories, key=lambda d: d not in apart)


def settings_of_runs(directories: Sequence[Path]) -> dict[Path, AdapterConfig]:
  """Returns the settings of those adapters that runs have trained. Raises UserError as ``step_of_adapter``."""
  return {d: section(ADAPTER, step_of_adapter(d)[1].config) for d in directories if not peft.is_adapter(d)}


def _compare(directories: Sequence[Path], weights: Path) -> None:
  found = of_files(weights)
  for directory in directories:
    if peft.is_adapter(directory):
      continue
    then = Base.from_json(step_of_adapter(directory)[1].extra[EXTRA])
    if then.same_files(found) is False:
      _log.warning(
        "%s was trained on %s, but %s contains other weights; the adapter may not work with them", directory, then, weights
      )


def _has_magnitudes(directory: Path) -> bool:
  if peft.is_adapter(directory):
    return bool(peft.read_settings(directory).get("use_dora"))
  return section(ADAPTER, step_of_adapter(directory)[1].config).lora_dora


def _has_whole(directory: Path, model: Model) -> bool:
  if peft.is_adapter(directory):
    return bool(peft.read_settings(directory).get("modules_to_save"))
  return bool(adapter_step.stored_adapter(step_of_adapter(directory)[1], model).whole)


def _rounded(params: Any, model: Model, directories: Sequence[Path]) -> Any:
  """Returns the weights in the quantized values on which the runs' adapters were trained, if they were quantized."""
  base = next((stored_as(model, s).base for s in settings_of_runs(directories).values()), None)
  if base is None:
    return params
  places = jax.tree.map(lambda x: x.sharding, params)
  return jax.jit(base.rounded, out_shardings=places, donate_argnums=0)(params)


def step_of_adapter(directory: Any) -> tuple[Any, manifest.Manifest]:
  """Returns the step of a run that trained an adapter, and its manifest.

  Args:
    directory: the run, or a step of it, on a disk or in a store.

  Raises:
    UserError: there is no adapter, or it is damaged.
  """
  step = find_step(directory)
  if step is None:
    raise UserError(
      f"{directory}: no adapter\n  fix: name a directory with {peft.CONFIG}, a run trained with lora_rank, or a step of it"
    )
  try:
    stored = manifest.read(step)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from None
  if not adapter_step.holds_adapter_alone(stored):
    raise UserError(
      f"{step}: contains a complete model, not an adapter\n  fix: name it as the checkpoint, or in init_from to train from it"
    )
  return step, stored


def _of_a_run(params: Any, model: Model, directory: Path) -> Any:
  return adapter_step.merged(params, *step_of_adapter(directory), model).params


def _of_peft(params: Any, model: Model, directory: Path) -> Any:
  adapter = peft.read_adapter(directory, model.decoder, model.config.model.decoder_block)
  # Sum the updates of all pieces on the host, and collect the magnitudes of DoRA.
  leaves, spec = flatten(params), flatten(model.decoder.params())
  sums: dict[str, np.ndarray] = {}
  norms: dict[str, np.ndarray] = {}
  for piece, addition, magnitude in (found for own in adapter.maps for found in own.additions()):
    name = ".".join(piece.path)
    total = sums.setdefault(name, np.zeros(leaves[name].shape, np.float32))
    total[piece.index] += addition
    if magnitude is not None:
      outputs = factors(spec[name], 1, dora=True)["lora_magnitude"].shape
      own = norms.setdefault(name, np.full(outputs, np.nan, np.float32))
      own[piece.index] = magnitude.reshape(own[piece.index].shape)

  # Add them on the device in float32.
  def add(x, y, norms, layout):
    exact = x.astype(jnp.float32) + y
    if norms is not None:  # layers without an adapter are unchanged
      axes = tuple(i - layout.rank for i in layout.summed)
      exact = jnp.where(jnp.isnan(jnp.expand_dims(norms, axes)), exact, with_magnitude(exact, layout, norms))
    return exact.astype(x.dtype)

  add = jax.jit(add, static_argnums=3)

  def added(path: tuple[str, ...], node: Any) -> Any:
    if isinstance(node, dict):
      return {key: added((*path, key), value) for key, value in node.items()}
    name = ".".join(path)
    if name not in sums:
      return node
    return add(node, jax.device_put(sums[name], node.sharding), norms.get(name), Layout.of(spec[name]))

  # Replace the arrays that the adapter stores completely.
  replaced: dict[str, np.ndarray] = {}
  for piece, values in ((piece, values) for tensor, values in adapter.whole for piece in tensor.pieces):
    name = ".".join(piece.path)
    x = replaced.setdefault(name, np.array(jax.device_get(leaves[name])))
    x[piece.index] = piece.to_ours(values).astype(x.dtype)
  return _in_places(added((), params), replaced)


def _in_places(params: Any, arrays: dict[str, np.ndarray]) -> Any:
  """Returns the tree with some arrays, given by name, replaced. They keep the shardings of the originals."""

  def put(path: Any, x: Any) -> Any:
    name = ".".join(path_keys(path))
    return jax.make_array_from_callback(x.shape, x.sharding, arrays[name].__getitem__) if name in arrays else x

  return jax.tree_util.tree_map_with_path(put, params)
