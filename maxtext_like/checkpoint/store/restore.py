"""Finds the newest valid step of a run, and reads one step into the shardings of this run, whatever devices wrote it.

Dtypes change only on request.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext_like.checkpoint import compatibility
from maxtext_like.checkpoint.store import manifest, tree, zarr_arrays
from maxtext_like.checkpoint.store.remote_steps import RemoteSteps
from maxtext_like.checkpoint.store.steps import StepDirectories
from maxtext_like.errors import UserError
from maxtext_like.storage import Place, failed

_log = logging.getLogger(__name__)
_REPORTED = 1.0  # GB; the speed of reading less is not reported


@dataclass(frozen=True)
class Restored:
  """A restored state, and the values that were stored with it."""

  step: int
  state: Any
  extra: dict[str, Any]
  config: dict[str, Any]
  directory: Path | Place


def newest_valid(
  steps: StepDirectories | RemoteSteps,
  require_fit: Callable[[Path | Place, manifest.Manifest], None],
  copied_back: Callable[[int, Exception], bool],
  upto: int | None = None,
) -> int | None:
  """Returns the newest valid step. Newer steps with wrong hashes are logged and set aside.

  Args:
    steps: the steps of the run.
    require_fit: raises UserError if a step has another model or other arrays.
    copied_back: (step, damage) -> True if the step was replaced from the mirror.
    upto: the newest step to consider; None for no limit.

  Returns:
    The number of the step, or None if there is no checkpoint at all.

  Raises:
    UserError: all steps are corrupt, the newest does not fit, ``upto`` does not exist, or a step has another step's name.
  """
  steps.require_names()
  candidates = steps.with_manifest()
  if upto is not None:
    if upto not in candidates:
      raise UserError(
        f"{steps.directory}: there is no step {upto}; the complete steps are {steps.complete() or 'none'}",
        fix=f"name one of the complete steps, or leave {steps.directory} to the newest one",
      )
    candidates = [number for number in candidates if number <= upto]

  def require_valid(path: Path | Place) -> None:
    stored = manifest.read(path)
    require_fit(path, stored)
    manifest.check_hashes(path, stored)

  damaged: list[tuple[int, str]] = []
  # Search from the newest step. Set the corrupt ones aside only after a valid one was found.
  for number in reversed(candidates):
    try:
      require_valid(steps.path(number))
    except manifest.DamageError as error:
      if not copied_back(number, error):
        damaged.append((number, str(error)))
        continue
      require_valid(steps.path(number))
    for corrupt, reason in damaged:
      _log.error("step %d is corrupt: %s; using step %d", corrupt, reason, number)
      steps.set_aside(corrupt)
    return number
  if damaged:
    reasons = "\n".join(f"  step {corrupt} is corrupt: {reason}" for corrupt, reason in damaged)
    raise UserError(
      f"{steps.directory}: no valid checkpoint is left\n{reasons}\n"
      "  fix: restore one of them from a copy, or start a new run with another run_name or resume=false"
    )
  return None


def check(
  step_directory: Path | Place,
  stored: manifest.Manifest,
  wanted: dict[str, Any],
  *,
  config: dict[str, Any] | None,
  allow_dtype_change: bool,
  subset: bool = False,
  resumes: bool = False,
  adds: bool = False,
) -> None:
  """Refuses a step that does not fit this run. Only the manifest has been read by then.

  Raises:
    UserError: the step has a newer schema, another model configuration, or other leaves or dtypes.
  """
  where = str(step_directory)
  if stored.schema > manifest.SCHEMA_VERSION:
    raise UserError(
      f"{where}: written by maxtext_like {stored.versions.get('maxtext_like', '(unknown)')} with checkpoint schema "
      f"{stored.schema}; this version reads schemas up to {manifest.SCHEMA_VERSION}\n  fix: upgrade maxtext_like"
    )
  compatibility.check_state(
    where,
    stored.config,
    config,
    stored.leaves,
    tree.describe(wanted),
    allow_dtype_change=allow_dtype_change,
    subset=subset,
    resumes=resumes,
    adds=adds,
  )


def read(step_directory: Path | Place, stored: manifest.Manifest, like: Any) -> Any:
  """Reads the arrays of ``like`` from a step that was checked and verified.

  Args:
    step_directory: the step.
    stored: its manifest.
    like: tree of ``jax.ShapeDtypeStruct``. A leaf with a sharding is read shard by shard, each device its own part, so that no
      device ever holds more than it keeps. A leaf without one goes to the first local device.

  Returns:
    The tree of ``like`` filled with arrays. It lacks entries that were not stored and that the caller initializes. Optimizer
    moments that were not stored, such as those of frozen parameters, stay ``jax.ShapeDtypeStruct``.

  Raises:
    UserError: a value does not fit the dtype to which it is cast.
  """
  import jax
  import jax.numpy as jnp

  # Select the leaves that are stored. Only optional parts of the state and optimizer moments may be missing.
  if lacking := compatibility.OPTIONAL_PARTS - {compatibility.part_of(name) for name in stored.leaves}:
    like = {name: x for name, x in like.items() if name not in lacking or not jax.tree.leaves(x)}
  everything = tree.flatten(like)
  wanted = {name: leaf for name, leaf in everything.items() if name in stored.leaves}
  unread = {name: leaf for name, leaf in everything.items() if name not in wanted}
  assert all(compatibility.part_of(name) == compatibility.MOMENTS for name in unread), f"{list(unread)} were not checked"
  # Read in the stored dtypes, then cast.
  local = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  shardings = {name: getattr(leaf, "sharding", None) or local for name, leaf in wanted.items()}
  stored_dtypes = {name: jnp.dtype(stored.leaves[name]["dtype"]) for name in wanted}
  template = {
    name: jax.ShapeDtypeStruct(leaf.shape, stored_dtypes[name], sharding=shardings[name]) for name, leaf in wanted.items()
  }
  state, begin = manifest.home(step_directory, stored) / manifest.STATE_NAME, time.monotonic()
  whole = len(wanted) == len(stored.leaves)
  flat = zarr_arrays.read(state, template) if zarr_arrays.holds_zarr(stored) else _read_orbax(state, template, whole)
  size, seconds = sum(x.nbytes for x in jax.block_until_ready(flat).values()) / 1e9, time.monotonic() - begin
  if size >= _REPORTED:
    _log.info("checkpoint of step %d: %.1f GB read in %.1f s, %.2f GB/s", stored.step, size, seconds, size / seconds)
  casts: dict[str, list[str]] = {}
  for name, leaf in wanted.items():
    if stored_dtypes[name] != leaf.dtype:
      flat[name] = _cast(name, flat[name], leaf.dtype)
      casts.setdefault(f"from {stored_dtypes[name]} to {leaf.dtype}", []).append(name)
  for change, names in casts.items():
    _log.warning("cast %d arrays %s (allow_dtype_change): %s, ...", len(names), change, names[0])
  return tree.unflatten(like, {**flat, **unread})


def _read_orbax(state: Path | Place, template: dict[str, Any], whole: bool) -> dict[str, Any]:
  import orbax.checkpoint as ocp

  arguments = {
    name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
    for name, leaf in template.items()
  }
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    return checkpointer.restore(
      for_orbax(state), args=ocp.args.PyTreeRestore(item=template, restore_args=arguments, partial_restore=not whole)
    )


def for_orbax(path: Path | Place) -> Any:
  """Returns a path in the form that orbax accepts."""
  if isinstance(path, Place):
    from etils import epath

    return epath.Path(str(path))
  return path.absolute()  # orbax refuses relative paths


def _cast(name: str, array: Any, dtype: Any) -> Any:
  """Casts one array. Refuses a value that would become infinite (or NaN, in float8_e4m3)."""
  import jax
  import jax.numpy as jnp

  from maxtext_like.sharding import host_memory

  place, away = array.sharding, host_memory.is_on_host(array)
  array = host_memory.on_device(array)
  if array.size:
    largest, limit = float(jnp.max(jnp.abs(array.astype(jnp.float32)))), float(jnp.finfo(dtype).max)
    if largest > limit:
      raise UserError(
        f"checkpoint leaf {name} holds {largest:.6g}, which does not fit {dtype} (largest {limit:.6g})\n"
        f"  fix: keep its dtype {array.dtype}"
      )
  array = array.astype(dtype)
  return jax.device_put(array, place) if away else array


def load(
  step_directory: Path | Place, like: Any, *, config: Any = None, allow_dtype_change: bool = False, adds: bool = False
) -> Restored:
  """Reads ``like``, which may be a part of the state such as ``{"params": ...}``, from one step of any run.

  Args:
    step_directory: a step such as ``runs/a/checkpoints/100``.
    like: tree of ``jax.ShapeDtypeStruct`` with shardings.
    config: configuration of this run; None skips the comparison of the models.
    allow_dtype_change: cast floats, with a range check, instead of refusing.
    adds: as for ``compatibility.check_state``.

  Raises:
    UserError: the step is incomplete, damaged, of another model, or has other arrays.
  """
  try:
    stored = manifest.read(step_directory)
    wanted = tree.flatten(like)
    current = None if config is None else compatibility.record(config)
    check(step_directory, stored, wanted, config=current, allow_dtype_change=allow_dtype_change, subset=True, adds=adds)
    state = _read_and_check_hashes(step_directory, stored, like)
  except manifest.DamageError as error:
    raise UserError(f"{step_directory}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from error
  except OSError as error:
    raise failed(error) from error
  return Restored(stored.step, state, stored.extra, stored.config, step_directory)


def _read_and_check_hashes(step_directory: Path | Place, stored: manifest.Manifest, like: Any) -> Any:
  """Reads arrays while another thread checks the hashes of the files, so that they come from the disk only once.

  Raises:
    DamageError: a file is damaged; the arrays are then discarded.
    UserError, RetryableError: as ``read``, if the files are undamaged.
  """
  if isinstance(step_directory, Place):  # the store has the checksums, and nothing is read for them
    manifest.check_hashes(step_directory, stored)
    return read(step_directory, stored, like)
  manifest.check_sizes(step_directory, stored)
  with ThreadPoolExecutor(1, "check-hashes") as pool:
    checked = pool.submit(manifest.check_hashes, step_directory, stored)
    try:
      state = read(step_directory, stored, like)
    except Exception:
      checked.result()  # damage would be the reason
      raise
    checked.result()
  return state
