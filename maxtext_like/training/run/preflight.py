"""Checks that take less than a second, before JAX is imported: wrong paths, missing checkpoints, and finished runs."""

import glob
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from maxtext_like.checkpoint import compatibility
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.weight_sources import located, require_source
from maxtext_like.config.choices import DATASETS
from maxtext_like.config.data_keys import DataConfig
from maxtext_like.config.load import Loaded
from maxtext_like.config.paths import by_source
from maxtext_like.config.problems import Problem, error_of
from maxtext_like.config.schema import Config
from maxtext_like.data.readers import input_files
from maxtext_like.data.tokenization.tokenizer import AUTO, find_tokenizer
from maxtext_like.errors import UserError
from maxtext_like.storage import Place, is_remote, require_usable
from maxtext_like.training.loop.best import stopped_early
from maxtext_like.training.loop.divergence import failed_run, reasons_of
from maxtext_like.training.run import resume_state
from maxtext_like.training.run.remote_run_directory import RemoteRunDirectory
from maxtext_like.training.run.run_directory import RunDirectory
from maxtext_like.training.sinks import metrics, trackers


def run_directory(config: Config) -> RunDirectory:
  """Return the directory of a run, not locked."""
  place, name = config.logging.output_dir, config.logging.run_name or config.model.model_name
  return RemoteRunDirectory(place, name) if is_remote(place) else RunDirectory(place, name)


def preflight(loaded: Loaded) -> str | None:
  """Check the run before anything is loaded, compiled or written.

  Returns:
    A line if the run is already finished; None if there may be steps to train.

  Raises:
    UserError: paths that do not exist, all at once; or as ``ResumeState.require``; or checkpoints of another model.
    NonFiniteError: the run is finished and its weights are not usable.
  """
  config = loaded.config
  directory = run_directory(config)
  # Paths and protocols. All wrong ones are reported together.
  if config.checkpoint.checkpoint_mirror is not None:
    require_usable("checkpoint_mirror", config.checkpoint.checkpoint_mirror)
  if problems := list(_lost_paths(loaded)):
    raise error_of(problems)
  # The run directory: refuse lost or mixed checkpoints.
  state = resume_state.read(directory.path, directory.checkpoints)
  remote = isinstance(directory.checkpoints, Place)
  mirrored = config.checkpoint.checkpoint_mirror is not None
  if not ((mirrored or remote) and state.evidence):  # a mirror or store may bring missing steps back
    state.require(config.checkpoint)
  # A finished run needs no start. With a mirror or with epochs this is decided later.
  if state.newest is not None and (stored := _manifest(state.checkpoints / str(state.newest))) is not None:
    current = manifest.record(config)
    compatibility.require_same_model(str(state.checkpoints / str(state.newest)), stored.config, current)
    early, steps = stopped_early(stored, config.training), config.training.steps  # steps of epochs are not counted yet
    over = early is not None or (steps is not None and state.newest >= steps)
    if over and not mirrored and compatibility.arrays_unaffected(stored.config, current):
      metrics.warn_of_finished(directory.home, stored.step)
      return finished_line(directory.shown, stored, early, config)
  # A directory that cannot be written.
  if not remote and (reason := _unusable(directory.path)) is not None:
    raise UserError(
      f"run directory {directory.path} cannot be used: {reason}\n  fix: choose another with output_dir=... or run_name=..."
    )
  return None


def finished_line(run: str, stored: manifest.Manifest, early: str | None, config: Config) -> str:
  """Return the line about a finished run.

  Args:
    run: the run directory.
    stored: manifest of its newest checkpoint.
    early: why it ended before its last step; None if it did not.
    config: configuration of the new start.

  Raises:
    NonFiniteError: the weights of the run are not usable.
  """
  training = config.training
  # Say why the run ended and which key continues it.
  if early is not None and (training.steps is None or stored.step < training.steps):
    done, onward = early, "raise early_stopping_patience to continue"
  else:
    done = f"already at step {stored.step} of {training.last_step}"
    onward = f"raise {'steps' if training.epochs is None else 'epochs'} to continue"
  if reasons := reasons_of(stored):
    raise failed_run(f"{run}: {done}", reasons, config)
  return f"{run}: {done}; {onward}"


def _lost_paths(loaded: Loaded) -> Iterator[Problem]:
  c = loaded.config
  checks: list[tuple[str, Callable[[], object]]] = []
  if (source := c.checkpoint.init_from) is not None:
    checks.append(("checkpoint.init_from", lambda: require_source(located(source))))
  # Collect the checks of the keys that name paths.
  kind = DATASETS[c.data.dataset]
  if kind.files:
    checks.append(("data.dataset_path", lambda: _require_data(c.data, "dataset_path")))
    checks.append(("data.eval_path", lambda: _require_data(c.data, "eval_path")))
  if c.data.tokenizer not in ("bytes", AUTO) and kind.text:
    checks.append(("data.tokenizer", lambda: find_tokenizer(c.data.tokenizer)))
  # Packages of trackers that are not installed.
  for key, problem in trackers.missing(c.logging):
    yield replace(problem, where=loaded.origins[key])
  # Run all checks, so that one start reports every wrong path.
  for key, check in checks:
    try:
      check()
    except UserError as error:
      what, _, fix = str(error).partition("\n  fix: ")
      yield Problem(what, fix=fix, where=loaded.origins[key])
    except PermissionError as error:
      yield Problem(
        f"{key.partition('.')[2]}: {error.filename}: {error.strerror}",
        fix="name a path that you may read",
        where=loaded.origins[key],
      )


def _require_data(data: DataConfig, key: str) -> None:
  """Raise for an entry that matches no file. Large folders are not listed completely for this check."""
  for name, paths in by_source(getattr(data, key)).items():
    named = f"{key}.{name}" if name else key
    for entry in [paths] if isinstance(paths, str) else paths or ():
      # A store is asked; local entries are tested without listing folders.
      if is_remote(entry):
        input_files.find_remote(entry, (), named)
        continue
      # A literal path, or a pattern with at least one match.
      path = os.path.expanduser(entry)
      if os.path.lexists(path):
        continue
      with input_files.log_if_slow(f"data.{named} {entry!r}: looking for files"):
        found = next(glob.iglob(path, recursive=True), None)
      if found is None:
        input_files.find(entry, (), data.dataset, named)


def _manifest(step: Path | Place) -> manifest.Manifest | None:
  """Return the manifest if this version can read it. Errors of other manifests are reported when the step is restored."""
  try:
    stored = manifest.read(step)
  except manifest.DamageError:
    return None
  return stored if stored.schema <= manifest.SCHEMA_VERSION else None


def _unusable(run: Path) -> str | None:
  """Return why the directory cannot be created or written, or None. Nothing is written for this check."""
  there = next(path for path in (run, *run.parents) if path.exists())
  if not there.is_dir():
    return f"{there} is not a directory"
  return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"
