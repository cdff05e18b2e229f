"""The training state as a checkpoint stores it: the names of its arrays, the disk space that it needs, and how a stored step is
found, checked and read.

``flatten`` makes a flat dictionary of named arrays. Names are tree paths joined with dots
(``params.stack_0.layer_0.mlp.down``, ``opt_state.0.mu.embedding.table``). ``None`` and empty tuples (optax's masked leaves)
contain no arrays and are dropped; the caller's tree restores them.

``newest_valid`` finds the newest valid step of a run, and ``read`` reads one step into the shardings of this run, whatever
devices wrote it. Dtypes change only on request.
"""

import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from maxtext_like.checkpoint import compatibility
from maxtext_like.checkpoint.store import manifest, zarr_arrays
from maxtext_like.checkpoint.store.remote_steps import RemoteSteps
from maxtext_like.checkpoint.store.steps import StepDirectories
from maxtext_like.errors import UserError
from maxtext_like.storage import Place, failed, naming_refusals, set_up_client

_log = logging.getLogger(__name__)
_REPORTED = 1.0  # GB; the speed of reading less is not reported
_RESTORE_GB = 4


def _name(path: tuple[Any, ...]) -> str:
  parts = []
  for key in path:
    match key:
      case jax.tree_util.DictKey(key=part) | jax.tree_util.FlattenedIndexKey(key=part):
        parts.append(str(part))
      case jax.tree_util.SequenceKey(idx=part):
        parts.append(str(part))
      case jax.tree_util.GetAttrKey(name=part):
        parts.append(part)
      case _:
        raise ValueError(f"tree path {path}: cannot name a key of type {type(key).__name__}")
  return ".".join(parts)


def flatten(tree: Any) -> dict[str, Any]:
  """Returns the leaves of ``tree`` (arrays or ``ShapeDtypeStruct``) by name, in tree order.

  Raises:
    ValueError: two leaves get the same name, a leaf is not an array, or it is a typed random key.
  """
  flat: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = _name(path)
    if name in flat:
      raise ValueError(f"two leaves of the state are named {name!r}; rename a key that contains a dot")
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
      raise ValueError(f"state leaf {name} is a {type(leaf).__name__}, not an array; store it in `extra` instead")
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      raise ValueError(f"state leaf {name} is a typed random key; store its jax.random.key_data instead")
    flat[name] = leaf
  return flat


def unflatten(like: Any, flat: dict[str, Any]) -> Any:
  """Returns a tree with the structure of ``like`` whose leaves are taken from ``flat`` by name."""
  paths, structure = jax.tree_util.tree_flatten_with_path(like)
  return jax.tree_util.tree_unflatten(structure, [flat[_name(path)] for path, _ in paths])


def describe(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the shape and dtype of every leaf in the format of the manifest."""
  return {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in flat.items()}


def total_bytes(flat: dict[str, Any]) -> int:
  """Returns the bytes of all leaves, each counted once even if it is replicated."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in flat.values())


def free_bytes(path: Path | Place) -> int | None:
  """Returns the free bytes of a file system, or None if unknown: for a store, and for network disks that report 0 of 0."""
  if isinstance(path, Place):
    return None
  usage = shutil.disk_usage(path)
  return usage.free if usage.total else None


def megabytes(count: float) -> str:
  """Formats a number of bytes as decimal MB or GB."""
  return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def require_disk_space(directory: Path | Place, size: int, *, existing: int, kept: int | None) -> None:
  """Compares the space that checkpoints need with the free space. During every save one more exists than is kept.

  Args:
    directory: directory of the checkpoints.
    size: bytes of one checkpoint.
    existing: number of existing checkpoints.
    kept: number of checkpoints to keep; None for all. Too little space for these logs a warning.

  Raises:
    UserError: not even one more checkpoint fits.
  """
  free = free_bytes(directory)
  if free is None:
    return
  wanted = size * max(1, (kept or 1) + 1 - existing)
  if free < size:
    raise UserError(
      f"{directory}: a checkpoint needs {megabytes(size)}, {megabytes(free)} are free\n"
      "  fix: free disk space, choose another output_dir, or save no checkpoints (enable_checkpointing=false resume=false)"
    )
  if free < wanted:
    _log.warning(
      "%s: keeping %s checkpoints of %s needs %s more, %s are free; free disk space or lower max_to_keep",
      directory, kept or "all", megabytes(size), megabytes(wanted), megabytes(free),
    )  # fmt: skip


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
    describe(wanted),
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
    PermissionError: the store refused the credentials.
  """
  import jax
  import jax.numpy as jnp

  # Select the leaves that are stored. Only optional parts of the state and optimizer moments may be missing.
  if lacking := compatibility.OPTIONAL_PARTS - {compatibility.part_of(name) for name in stored.leaves}:
    like = {name: x for name, x in like.items() if name not in lacking or not jax.tree.leaves(x)}
  everything = flatten(like)
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
  with naming_refusals(state):
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
  return unflatten(like, {**flat, **unread})


def _read_orbax(state: Path | Place, template: dict[str, Any], whole: bool) -> dict[str, Any]:
  import orbax.checkpoint as ocp

  arguments = {
    name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
    for name, leaf in template.items()
  }
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=restore_gb(template))) as checkpointer:
    return checkpointer.restore(
      for_orbax(state), args=ocp.args.PyTreeRestore(item=template, restore_args=arguments, partial_restore=not whole)
    )


def restore_gb(arrays: dict[str, Any]) -> int:
  """Returns the limit of the bytes that are in host memory while a step is read, in GB (1e9 bytes).

  Orbax reads as many arrays at the same time as fit, and refuses an array that does not fit. Its own limit is 96 GB.

  Args:
    arrays: ``jax.ShapeDtypeStruct`` of each array. Orbax counts the stored parts that a device's part overlaps, which are never
      more than the array.
  """
  return max(_RESTORE_GB, *(x.size * x.dtype.itemsize // 10**9 + 1 for x in arrays.values()), 1)


def for_orbax(path: Path | Place) -> Any:
  """Returns a path in the form that orbax accepts."""
  if isinstance(path, Place):
    from etils import epath

    set_up_client(path.protocol)  # etils creates other clients than fsspec
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
    wanted = flatten(like)
    current = None if config is None else manifest.record(config)
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
