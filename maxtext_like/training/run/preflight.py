"""What can be said of a run within a second, before JAX is imported: paths that lead nowhere, and that it is finished."""

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
from maxtext_like.training.sinks import trackers


def run_directory(config: Config) -> RunDirectory:
  """The directory of a run, not held."""
  place, name = config.logging.output_dir, config.logging.run_name or config.model.model_name
  return RemoteRunDirectory(place, name) if is_remote(place) else RunDirectory(place, name)


def first_look(loaded: Loaded) -> str | None:
  """Looks before anything is loaded, compiled or written.

  Returns:
    The line that says that the run is finished; None: there may be work to do.

  Raises:
    UserError: every path that leads nowhere; or as ``Standing.require``; or the run is of another model.
    NonFiniteError: the run is finished, and the weights that it left are not usable.
  """
  config = loaded.config
  directory = run_directory(config)
  if config.checkpoint.checkpoint_mirror is not None:
    require_usable("checkpoint_mirror", config.checkpoint.checkpoint_mirror)
  if problems := list(_lost_paths(loaded)):
    raise error_of(problems)
  stands = resume_state.look(directory.path, directory.checkpoints)
  remote = isinstance(directory.checkpoints, Place)
  mirrored = config.checkpoint.checkpoint_mirror is not None
  if not ((mirrored or remote) and stands.evidence):  # what is lost here may come back, or be old
    stands.require(config.checkpoint)
  if stands.newest is not None and (stored := _manifest(stands.checkpoints / str(stands.newest))) is not None:
    current = compatibility.record(config)
    compatibility.require_same_model(str(stands.checkpoints / str(stands.newest)), stored.config, current)
    early, steps = stopped_early(stored, config.training), config.training.steps  # those of epochs are not counted yet
    over = early is not None or (steps is not None and stands.newest >= steps)
    if over and not mirrored and compatibility.surely_same_arrays(stored.config, current):
      return finished_line(directory.shown, stored, early, config)
  if not remote and (reason := _unusable(directory.path)) is not None:
    raise UserError(
      f"run directory {directory.path}: cannot be used: {reason}; choose another with output_dir=... or run_name=..."
    )
  return None


def finished_line(run: str, stored: manifest.Manifest, early: str | None, config: Config) -> str:
  """The line about a finished run.

  Args:
    run: its directory.
    stored: manifest of its newest checkpoint.
    early: why it ended before its last step; None if it did not.
    config: configuration that it is started with again.

  Raises:
    NonFiniteError: the weights that it left are not usable.
  """
  training = config.training
  if early is not None and (training.steps is None or stored.step < training.steps):
    done, onward = early, "raise early_stopping_patience to go on"
  else:
    done = f"already at step {stored.step} of {training.last_step}"
    onward = f"raise {'steps' if training.epochs is None else 'epochs'} to go on"
  if reasons := reasons_of(stored):
    raise failed_run(f"{run}: {done}", reasons, config)
  return f"{run}: {done}; {onward}"


def _lost_paths(loaded: Loaded) -> Iterator[Problem]:
  c = loaded.config
  checks: list[tuple[str, Callable[[], object]]] = []
  if (source := c.checkpoint.init_from) is not None:
    checks.append(("checkpoint.init_from", lambda: require_source(located(source))))
  kind = DATASETS[c.data.dataset]
  if kind.files:
    checks.append(("data.dataset_path", lambda: _require_data(c.data, "dataset_path")))
    checks.append(("data.eval_path", lambda: _require_data(c.data, "eval_path")))
  if c.data.tokenizer not in ("bytes", AUTO) and kind.text:
    checks.append(("data.tokenizer", lambda: find_tokenizer(c.data.tokenizer)))
  for key, problem in trackers.missing(c.logging):
    yield replace(problem, where=loaded.origins[key])
  for key, check in checks:
    try:
      check()
    except UserError as error:
      what, _, fix = str(error).partition("\n  fix: ")
      yield Problem(what, fix=fix, where=loaded.origins[key])
    except PermissionError as error:
      yield Problem(f"{key.partition('.')[2]}: {error.filename}: {error.strerror}", where=loaded.origins[key])


def _require_data(data: DataConfig, key: str) -> None:
  """An entry that matches nothing is refused as it would be later; no folder is listed to its end for that."""
  for name, paths in by_source(getattr(data, key)).items():
    named = f"{key}.{name}" if name else key
    for entry in [paths] if isinstance(paths, str) else paths or ():
      if is_remote(entry):
        input_files.find_remote(entry, (), named)
        continue
      path = os.path.expanduser(entry)
      if os.path.lexists(path):
        continue
      with input_files.log_if_slow(f"data.{named} {entry!r}: looking for files"):
        found = next(glob.iglob(path, recursive=True), None)
      if found is None:
        input_files.find(entry, (), data.dataset, named)


def _manifest(step: Path | Place) -> manifest.Manifest | None:
  """Of a step that this version can read; what is wrong with another is said when it is restored."""
  try:
    stored = manifest.read(step)
  except manifest.DamageError:
    return None
  return stored if stored.schema <= manifest.SCHEMA_VERSION else None


def _unusable(run: Path) -> str | None:
  """Why the directory cannot be made or written; None as far as can be told without doing it."""
  there = next(path for path in (run, *run.parents) if path.exists())
  if not there.is_dir():
    return f"{there} is not a directory"
  return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"
