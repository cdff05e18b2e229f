"""Opens the checkpoints of a run: the mirror, the manager that saves and restores steps, and the newest complete step."""

from pathlib import Path
from typing import Any

from maxtext_like.checkpoint.store import manifest, sidecar_files, stored_state, zarr_arrays
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.checkpoint.store.mirror import Mirror
from maxtext_like.checkpoint.store.steps import StepDirectories
from maxtext_like.checkpoint.store.stored_state import flatten
from maxtext_like.config.schema import CheckpointConfig, Config
from maxtext_like.data.loader import DataSource
from maxtext_like.errors import UserError
from maxtext_like.sharding import processes
from maxtext_like.storage import failed
from maxtext_like.training.loop.best import stopped_early
from maxtext_like.training.loop.progress import Progress
from maxtext_like.training.loop.watchdog import Watchdog
from maxtext_like.training.optimizers import on_host
from maxtext_like.training.run import resume_state
from maxtext_like.training.run.run_directory import RunDirectory
from maxtext_like.training.step.program import TrainProgram


def open_mirror(config: Config, directory: RunDirectory, progress: Progress) -> Mirror | None:
  """Open the mirror of the checkpoints, after copying back a newer step from it; None if no mirror is configured.

  Raises:
    UserError, RetryableError: as ``Mirror.bring_back``.
  """
  c = config.checkpoint
  if c.checkpoint_mirror is None:
    return None
  assert isinstance(directory.checkpoints, Path), "config/paths.py refuses a mirror for a remote run directory"
  # Copy back a newer step before the run looks for its newest one.
  mirror = Mirror(c.checkpoint_mirror, directory.path.name, directory.checkpoints, c.max_to_keep)
  steps = StepDirectories(directory.checkpoints, directory.exclusive)
  if (step := mirror.bring_back(steps, resume=c.resume)) is not None:
    progress.say(f"mirror  copied back step {step}, the newest in {mirror}; {directory.checkpoints} had no step as new")
  return mirror


def open_manager(
  config: Config, directory: RunDirectory, data: DataSource, watchdog: Watchdog, mirror: Mirror | None
) -> CheckpointManager:
  """Make the manager that restores and saves the steps of a run. It has to be entered.

  Raises:
    UserError: moments in host memory with several processes. Orbax would get a copy from each process and treat these as the
      same array.
  """
  c = config.checkpoint
  away = config.training.optimizer_memory_host_offload
  # Only our own S3 writer takes arrays from the host memory of several processes.
  if away and processes.count() > 1 and not zarr_arrays.uses_zarr(directory.checkpoints):
    raise UserError(
      f"{on_host.KEY}=true with {processes.count()} processes: checkpoints can then be written to s3:// only\n"
      "  fix: set output_dir=s3://... or enable_checkpointing=false, or start one process for all devices of a host"
    )

  # Called after each save. The lock is checked first: the file must not name a step of another run.
  def saved(step: int) -> None:
    directory.require_held()
    resume_state.record_newest(directory.path, step, directory.fence)
    directory.checkpoint_saved()

  return CheckpointManager(
    directory.checkpoints,
    config=config,
    interval=c.checkpoint_interval,
    max_to_keep=c.max_to_keep,
    asynchronous=c.async_checkpointing,
    tokenizer=sidecar_files.of_tokenizer(data.tokenizer.files) if data.tokenizer else None,
    fence=directory.exclusive,
    saved=saved,
    watch=watchdog.watch,
    mirror=mirror,
    mirror_seconds=min(watchdog.limit("exit") / 2, 24 * 3600),
    peers_seconds=min(watchdog.limit("save"), 24 * 3600),
  )


def newest_resume_point(directory: RunDirectory, settings: CheckpointConfig) -> dict[str, Any] | None:
  """Return the fields of ``ResumePoint`` for the newest complete step, as JSON; None if there is no step to resume from.

  Raises:
    UserError, RetryableError: as ``resume_state.read``, and ``storage.failed``.
  """
  newest = resume_state.read(directory.path, directory.checkpoints).newest
  # No step, or the run must not resume.
  if newest is None or not (settings.enable_checkpointing and settings.resume):
    return None
  try:
    position = manifest.read(directory.checkpoints / str(newest)).extra.get("data")
  except manifest.DamageError:  # the restore reports it and uses an older step
    return None
  except OSError as error:
    raise failed(error, writes=True) from error
  return None if position is None else {"step": newest, "data": position}


def finished(program: TrainProgram, manager: CheckpointManager) -> tuple[manifest.Manifest, str | None] | None:
  """Return the manifest of the newest complete step, and the reason for early stopping at that step if there is one.

  Returns None if there are steps to train.

  Raises:
    UserError: the directory belongs to another model.
  """
  newest, config = manager.latest_complete(), program.config
  if newest is None:
    return None
  # Read what the run stored about its end.
  path = manager.directory / str(newest)
  stored = manifest.read(path)
  early = stopped_early(stored, config.training)
  if newest < config.training.last_step and early is None:
    return None
  # The run is finished. Its arrays must still fit the configuration, or the message would be wrong.
  stored_state.check(
    path, stored, flatten(program.abstract_checkpoint),
    config=manager.config, allow_dtype_change=config.checkpoint.allow_dtype_change, resumes=True,
  )  # fmt: skip
  return stored, early
