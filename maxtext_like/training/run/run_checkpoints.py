"""The checkpoints of a run: what stands there before it begins, who writes them, and their second place."""

from pathlib import Path
from typing import Any

from maxtext_like.checkpoint.store import manifest, restore, sidecar_files, zarr_arrays
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.checkpoint.store.mirror import Mirror
from maxtext_like.checkpoint.store.steps import StepDirectories
from maxtext_like.checkpoint.store.tree import flatten
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
  """The second place of the checkpoints, from which what is lost here was copied back; None: there is none.

  Raises:
    UserError, RetryableError: as ``Mirror.bring_back``.
  """
  c = config.checkpoint
  if c.checkpoint_mirror is None:
    return None
  assert isinstance(directory.checkpoints, Path), "a run in a store has no mirror: paths.py refuses it"
  mirror = Mirror(c.checkpoint_mirror, directory.path.name, directory.checkpoints, c.max_to_keep)
  steps = StepDirectories(directory.checkpoints, directory.exclusive)
  if (step := mirror.bring_back(steps, resume=c.resume)) is not None:
    progress.say(f"mirror  step {step} copied back from {mirror}, its newest one; {directory.checkpoints} had none as new")
  return mirror


def open_manager(
  config: Config, directory: RunDirectory, data: DataSource, watchdog: Watchdog, mirror: Mirror | None
) -> CheckpointManager:
  """Who restores and saves the steps of a run, to be entered.

  Raises:
    UserError: moments on the host, which orbax is given copies of, of several processes, whose copies it would take for one
      and the same.
  """
  c = config.checkpoint
  away = config.training.optimizer_memory_host_offload
  if away and processes.count() > 1 and not zarr_arrays.are_for(directory.checkpoints):
    raise UserError(
      f"{on_host.KEY} = true in {processes.count()} processes: their checkpoints are written to s3:// only\n"
      "  fix: output_dir=s3://..., or enable_checkpointing=false, or a process for all devices of one host"
    )

  def saved(step: int) -> None:
    directory.require_held()
    resume_state.remember_newest(directory.path, step, directory.fence)
    directory.saved()

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


def newest_begun(directory: RunDirectory, settings: CheckpointConfig) -> dict[str, Any] | None:
  """The fields of ``Begun`` of the newest complete step, as JSON; None: there is none to go on from.

  Raises:
    UserError, RetryableError: as ``standing.look``, and ``storage.failed``.
  """
  newest = resume_state.look(directory.path, directory.checkpoints).newest
  if newest is None or not (settings.enable_checkpointing and settings.resume):
    return None
  try:
    position = manifest.read(directory.checkpoints / str(newest)).extra.get("data")
  except manifest.DamageError:  # which the restore tells, and takes the one before
    return None
  except OSError as error:
    raise failed(error) from error
  return None if position is None else {"step": newest, "data": position}


def finished(program: TrainProgram, manager: CheckpointManager) -> tuple[manifest.Manifest, str | None] | None:
  """Returns the manifest of the newest complete step, and why the run has stopped early there, if it has.

  None if there is work to do: that step is not the last of the configuration, and the run has not stopped early.

  Raises:
    UserError: the directory belongs to another model.
  """
  newest, config = manager.latest_complete(), program.config
  if newest is None:
    return None
  path = manager.directory / str(newest)
  stored = manifest.read(path)
  early = stopped_early(stored, config.training)
  if newest < config.training.last_step and early is None:
    return None
  restore.check(
    path, stored, flatten(program.abstract_stored),
    config=manager.config, allow_dtype_change=config.checkpoint.allow_dtype_change, resumes=True,
  )  # fmt: skip
  return stored, early
