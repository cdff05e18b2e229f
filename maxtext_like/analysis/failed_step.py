"""Stores a step that failed its finiteness check in the run's directory, and examines it with x-ray at once or later.

``failed_step/`` holds ``N/`` (the state after N finished steps, in the format of a checkpoint that is marked as incomplete),
``batch.npz`` and ``failure.json``. A failing update is not applied (see ``TrainStep.untouched`` for exceptions), so the state
after the step equals the state before it, except for the step counter and the loss scale, which are restored. With several
processes, each one writes its part of the state; all of them replay the step together and find the same result. For a run in a
remote store all files are in the store.
"""

import contextlib
import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_like import atomic
from maxtext_like.analysis import step_xray
from maxtext_like.checkpoint.store import manifest, stored_state, zarr_arrays
from maxtext_like.checkpoint.store.stored_state import free_bytes, megabytes
from maxtext_like.config.schema import Config
from maxtext_like.errors import ExitError, NonFiniteError, RetryableError, UserError
from maxtext_like.layers.partition import Mesh
from maxtext_like.layers.sharding_rules import Rules
from maxtext_like.numerics.xray import on_host
from maxtext_like.numerics.xray_report import Report
from maxtext_like.sharding import processes
from maxtext_like.storage import Place, failed
from maxtext_like.training.loop.finiteness import StepResult
from maxtext_like.training.step.program import TrainProgram
from maxtext_like.training.step.train_step import Batch, State

DIRECTORY = "failed_step"
FAILURE, BATCH = "failure.json", "batch.npz"


@dataclass
class FailedStep:
  """Watches a run for the step that ends it.

  Attributes:
    program: program of the run.
    directory: directory of the run; it may be in a remote store.
    say: receives progress messages for the user.
  """

  program: TrainProgram
  directory: Path | Place
  say: Callable[[str], None] = print

  def explained(self, error: NonFiniteError, result: StepResult, state: State, batch: Batch) -> NonFiniteError:
    """Store the step, replay it with x-ray, and return the error with its first cause. Any failure here adds one line to the
    error.

    Args:
      error: the error that ends the run.
      result: metrics of the failed step.
      state: after the step.
      batch: batch of the step.
    """
    step = result.step
    if not result.scalars["skipped"]:
      return NonFiniteError(
        error.what, error.remedies, ["no replay: the update was applied, so the state before it no longer exists"]
      )
    self.say(f"step {step} failed and ends the run: saving it and searching for the first cause (this compiles the step again)")
    # Undo what a step changes even if its update is skipped. The count of finite steps in a row, now 0, matters to no replay.
    put = lambda number, x: jax.device_put(np.asarray(number, x.dtype), x.sharding)
    state = {**state, "step": put(step - 1, state["step"])}
    if scaling := state.get("loss_scale"):
      state["loss_scale"] = {**scaling, "scale": put(result.scalars["loss_scale"], scaling["scale"])}
    # First store the step, so that a replay is possible even if the search below runs out of memory.
    place = self.directory / DIRECTORY
    notes = []
    try:
      keep(self.program, place, step, state, batch, str(error))
      more = (
        "; if one host has too little memory, use as many hosts as the run, or --processes" if processes.count() > 1 else ""
      )
      notes.append(
        f"saved in {place}; to replay it: maxtext-like replay {self.directory} (maxtext_like.replay in Python){more}"
      )
    except RetryableError as problem:  # another process failed here, and will not take part in the replay either
      return NonFiniteError(error.what, error.remedies, [f"no replay: {_one_line(problem)}"])
    except Exception as problem:  # a full disk, for which orbax raises a bare Exception; it must not hide the run's error
      if processes.primary():
        with contextlib.suppress(OSError):
          _remove(place)  # an incomplete state is useless and takes space
      notes.append(f"not saved for replay: {_one_line(problem)}")
    try:
      report = step_xray.xray_step(self.program, state, batch)
    except Exception as problem:  # usually out of memory
      return NonFiniteError(error.what, error.remedies, [f"no replay: {_one_line(problem)}", *notes])
    # Then report the first cause and the settings that concern it.
    found, remedies = "every number is finite", error.remedies
    if report.first_cause is not None:
      found = f"first cause: {report.first_cause}"
    if report.finite:
      found = f"in the replay by x-ray, which computes in a different order, the step is finite\n{found}"
    elif report.first_cause is not None:
      remedies = step_xray.remedies(self.program.config, report.first_cause) or remedies
    try:
      if processes.primary():
        write(report, place, f"step {step} of {self.directory.name}")
    except OSError as problem:
      notes.append(f"no xray.html: {_one_line(problem)}")
    return NonFiniteError(f"{error.what}\n{found}", remedies, notes)


def _one_line(error: Exception) -> str:
  name = "" if isinstance(error, ExitError | OSError) else f"{type(error).__name__}: "
  return f"{name}{' '.join(str(error).split())[:300]}"


def keep(program: TrainProgram, directory: Path | Place, step: int, state: State, batch: Batch, message: str) -> None:
  """Write state and batch of a failed step, replacing an earlier one. Every process of a run calls it.

  Raises:
    OSError: there is not enough space, or writing failed in one of the processes.
    RetryableError: another process did not finish.
  """
  flat, seconds = stored_state.flatten(state), program.config.watchdog.watchdog_peers_seconds
  here, problem = directory / str(step - 1), ""
  processes.on_primary(lambda: _make_room(directory, here, stored_state.total_bytes(flat)), seconds)
  try:
    _write_arrays(here / manifest.STATE_NAME, flat, seconds)
  except Exception as error:  # as orbax raises them
    problem = _one_line(error)
  if problems := [said for said in processes.everyone(problem, seconds) if said]:
    raise OSError(problems[0])
  rows = on_host(batch)
  processes.on_primary(lambda: _complete(program, directory, here, flat, rows, message), seconds)


def _write_arrays(place: Path | Place, flat: dict[str, Any], seconds: float) -> None:
  if isinstance(place, Place) and zarr_arrays.uses_zarr(place):
    writer = zarr_arrays.Writer(seconds)
    writer.save(place, flat)
    writer.wait_until_finished()
    return
  import orbax.checkpoint as ocp

  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    checkpointer.save(stored_state.for_orbax(place), args=ocp.args.PyTreeSave(flat))


def _remove(directory: Path | Place) -> None:
  if isinstance(directory, Path):
    shutil.rmtree(directory, ignore_errors=True)
    return
  for entry in directory.entries():
    entry.place.remove()


def _make_room(directory: Path | Place, here: Path | Place, needed: int) -> None:
  _remove(directory)
  if isinstance(here, Place):
    return
  here.mkdir(parents=True)
  free = free_bytes(directory)
  if free is not None and free < needed:
    raise OSError(f"{directory}: the state needs {megabytes(needed)}, {megabytes(free)} are free")


def _complete(
  program: TrainProgram,
  directory: Path | Place,
  here: Path | Place,
  flat: dict[str, Any],
  rows: dict[str, np.ndarray],
  message: str,
) -> None:
  """Turn a written state into a failed step: add the manifest, the batch and the error."""
  step = int(here.name) + 1
  record = manifest.Manifest(
    step=step - 1,
    finite=False,  # not checked
    config=manifest.record(program.config),
    extra={},
    leaves=stored_state.describe(flat),
    files=manifest.describe_objects(here) if isinstance(here, Place) else manifest.hash_files(here),
    versions=manifest.versions(),
  )
  _write_text(here / manifest.FILE_NAME, manifest.to_text(record))
  content = io.BytesIO()
  np.savez(content, **rows)  # type: ignore[arg-type]
  (directory / BATCH).write_bytes(content.getvalue())
  _write_text(directory / FAILURE, json.dumps({"step": step, "error": message}, indent=1) + "\n")


def _write_text(file: Path | Place, text: str) -> None:
  if isinstance(file, Place):
    file.write_bytes(text.encode())
  else:
    atomic.write_text(file, text)


def write(report: Report, directory: Path | Place, title: str) -> None:
  """Write ``xray.json`` and ``xray.html``."""
  if isinstance(directory, Path):
    directory.mkdir(parents=True, exist_ok=True)
  _write_text(directory / "xray.json", report.to_json() + "\n")
  _write_text(directory / "xray.html", report.html(title))


@dataclass(frozen=True)
class Kept:
  """A stored failed step: the number of the step, the error, the batch of all devices and the state's directory."""

  step: int
  error: str
  batch: dict[str, np.ndarray]
  state: Path | Place


def find(run: Path | Place) -> Kept:
  """Return the failed step of a run directory.

  Raises:
    UserError: the run has no stored step.
    RetryableError: a remote store does not answer.
  """
  directory = run / DIRECTORY
  try:
    failure = json.loads((directory / FAILURE).read_text(encoding="utf-8"))
    with np.load(io.BytesIO((directory / BATCH).read_bytes())) as arrays:
      batch = dict(arrays)
    return Kept(failure["step"], failure["error"], batch, directory / str(failure["step"] - 1))
  except (OSError, ValueError, KeyError) as error:
    if isinstance(error, OSError) and isinstance(run, Place) and not isinstance(error, FileNotFoundError):
      raise failed(error) from error
    there = not isinstance(error, FileNotFoundError) or str(error.filename) != str(directory / FAILURE)
    damaged = f" that can be read ({error})" if there else ""
    raise UserError(
      f"{run}: contains no failed step{damaged}\n"
      "  fix: pass the directory of a run that ended with exit code 3, or examine any step with maxtext-like xray "
      "(maxtext_like.xray_step in Python)"
    ) from error


def fitted(config: Config, kept: Kept, mesh: Mesh) -> Config:
  """Return the configuration with the kept batch's number of rows per device, and with the run's steps if they were given in
  epochs.

  Args:
    config: configuration of the run.
    kept: its failed step.
    mesh: the mesh of the replay.

  Raises:
    UserError: the rows cannot be divided evenly.
  """
  rows, parts = kept.batch["tokens"].shape[0], config.training.gradient_accumulation_steps
  ways = Rules(**config.mesh.sharding_rules).ways("batch", mesh)
  if rows % (ways * parts):
    raise UserError(
      f"replay: a batch of {rows} rows cannot be divided among {ways} devices in {parts} microbatches\n"
      "  fix: use a number of devices that divides the rows, or gradient_accumulation_steps=1"
    )
  if config.training.steps is None:
    steps = manifest.read(kept.state).config["training"]["steps"]
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=steps))
  each = rows / (mesh.size * parts)
  each = int(each) if each.is_integer() else each
  if each == config.training.per_device_batch_size:
    return config
  return dataclasses.replace(config, training=dataclasses.replace(config.training, per_device_batch_size=each))
