"""The training loop: takes batches, runs the compiled step, writes metrics, and between steps saves, evaluates and stops.

The device works one step ahead of the host: while it runs step n + 1, the host reads the metrics of step n, so neither
waits for the other. The duration of a step is the time between two step ends on the device. A separate thread records these
ends, because launching the kernels of step n + 1 can block the main thread until late in that step.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from maxtext_like.checkpoint.adapters.adapter_step import Base
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.errors import ExitError, NonFiniteError
from maxtext_like.sharding import processes
from maxtext_like.training.loop.best import EXTRA as BEST
from maxtext_like.training.loop.best import Best
from maxtext_like.training.loop.divergence import Divergence
from maxtext_like.training.loop.finiteness import Explainer, FinitenessGuard, StepResult
from maxtext_like.training.loop.goodput import FILE_NAME as GOODPUT
from maxtext_like.training.loop.goodput import Goodput
from maxtext_like.training.loop.launched_step import LaunchedStep
from maxtext_like.training.loop.moved_weights import MovedWeights
from maxtext_like.training.loop.profile import Profile
from maxtext_like.training.loop.progress import Progress
from maxtext_like.training.loop.saving import Saver
from maxtext_like.training.loop.signals import StopRequest, StopRequested
from maxtext_like.training.loop.spikes import EXTRA as SPIKES
from maxtext_like.training.loop.spikes import FILE_NAME as SPIKES_FILE
from maxtext_like.training.loop.spikes import Spike, Spikes
from maxtext_like.training.loop.watchdog import Watchdog
from maxtext_like.training.sinks.metrics import Row
from maxtext_like.training.sinks.run_files import RunFiles
from maxtext_like.training.step import update_retention
from maxtext_like.training.step.program import Stepper, TrainProgram
from maxtext_like.training.step.train_step import Batch, Metrics, State

_GOODPUT_SECONDS = 10.0  # interval between two writes of goodput.json; a killed process may lose this much accounting


@dataclass
class Loop:
  """Trains one run from a state to its last step.

  Attributes:
    program: the run's model, objective and step, before compilation.
    stepper: calls the compiled step.
    state: the state to start from; each step reuses its memory.
    data: iterator over this process's batches, with ``get_state()`` and ``progress()``.
    evaluate: maps params to the evaluation losses of a metrics row, or to None if a stop request interrupted it. None turns
      evaluation off.
    sample: maps (step, params) to rows of samples.jsonl. None turns sampling off.
    evaluate_tasks: as ``evaluate``, for ``eval_tasks``.
    manager: writes checkpoints; None without checkpoints.
    files: metrics and report files of the run directory.
    progress: the terminal output.
    stop: stop requests from signals and other processes.
    guard: decides when non-finite numbers end the run.
    flops: floating-point operations of one step, summed over all devices.
    peak_tflops: peak TFLOP/s of one device; None if unknown, and then rows have no mfu.
    explainer: keeps and explains the step that ends the run; None to skip the explanation.
    base: identifies the weights below the trained adapter; None if the weights themselves are trained.
    watchdog: limits the duration of a step and of the work between two steps.
    finite: True if the newest metrics show a finite state.
    goodput: accounts for the time of this process.
    spikes: detects loss spikes; None turns detection off.
    best: tracks the best evaluation; None if no key asks for it.
    divergence: watches losses and the parameter norm.
    moved_weights: warns if updates are too small for 16-bit weights; None for no warning.
    finished: number of finished steps.
    stopped_early: reason why the run ended before its last step; None if it did not.
    profile: traces some steps with the JAX profiler; None turns it off.
  """

  program: TrainProgram
  stepper: Stepper
  state: State
  data: Any
  evaluate: Callable[[Any], dict[str, float] | None] | None
  sample: Callable[[int, Any], list[Row]] | None
  manager: CheckpointManager | None
  files: RunFiles
  progress: Progress
  stop: StopRequest
  guard: FinitenessGuard
  divergence: Divergence
  flops: float
  peak_tflops: float | None
  explainer: Explainer | None = None
  base: Base | None = None
  watchdog: Watchdog = field(default_factory=Watchdog)
  finite: bool = True
  goodput: Goodput = field(default_factory=Goodput)
  spikes: Spikes | None = None
  best: Best | None = None
  moved_weights: MovedWeights | None = None
  finished: int = field(default=0, init=False)
  stopped_early: str | None = field(default=None, init=False)
  profile: Profile | None = None
  evaluate_tasks: Callable[[Any], dict[str, float] | None] | None = None
  _launched: LaunchedStep | None = field(default=None, init=False)
  _batch_wait: tuple[float, float] = field(default=(0.0, 0.0), init=False)
  _goodput_written: float = field(default=0.0, init=False)
  _last_end: float = field(default=0.0, init=False)
  _batch: Any = field(default=None, init=False)  # batch of the newest finished step with targets
  _warned_survival: bool = field(default=False, init=False)  # True once the warning about lost updates was printed
  _spike: tuple[LaunchedStep, Spike] | None = field(default=None, init=False)
  _unsaved_seconds: float = field(default=0.0, init=False)
  _saver: Saver | None = field(default=None, init=False)  # None without checkpoints

  def run(self, start: int) -> None:
    """Trains from ``start`` finished steps to the last step of the configuration.

    Raises:
      NonFiniteError: ``FinitenessGuard`` found a non-finite number, and no state is saved; or all steps are finished and
        saved, and ``Divergence`` reports that the weights are not usable.
      ExitError: a signal stopped the run, after a checkpoint.
      RetryableError: saving checkpoints failed repeatedly.
      UserError, RetryableError: the data cannot be read, for example a missing file. The finished steps are saved first.
    """
    self.finished = start
    self.stop.training = True
    if self.manager is not None:
      self._saver = Saver(
        self.program, self.stepper, self.manager, self.data, self.guard, self.watchdog,
        self.divergence, self.spikes, self.best, self.base,
      )  # fmt: skip
    try:
      if self.profile is not None:
        self.profile.note(start)
      with self.goodput.phase("steps"):
        self._run(start)
    except ExitError:
      raise
    except Exception:  # a bug in this program
      self._save_after_error()
      raise
    finally:
      # The profile of a run that ends with an error is written too.
      if self.profile is not None:
        self.profile.stop()

  def _run(self, start: int) -> None:
    t, d, log = self.program.config.training, self.program.config.data, self.program.config.logging
    self._last_end = time.perf_counter()
    step = start
    self._stop_if_requested(step)
    self._evaluate_skipped(step)
    with self.watchdog.watch("first_step", f"step {step + 1}"), ThreadPoolExecutor(1, "step-end") as clock:
      # A batch is drawn only if a step will use it: the next checkpoint counts every drawn batch as trained on.
      while step < t.last_step and not self._stops_early(step):
        # 1. Start the profiler before the first traced step.
        if self.profile is not None and self.profile.starts(step + 1):
          self._read_launched()
          self.profile.start()
          self._last_end = time.perf_counter()
        # 2. Draw a batch and launch the step.
        try:
          batch = self._next_batch()
        except StopRequested:  # a stop request arrived while the data pipeline was waiting
          self._stop_if_requested(step)
          if (rolled_back_to := self._roll_back()) is not None:  # the previous step was a loss spike
            step = rolled_back_to
          continue
        step += 1
        metrics = self._launch(step, batch)
        self.finished = step
        if self._read_launched():  # the previous step had to be repeated, so this step left the state unchanged
          metrics = self._launch(step, batch)
        if (rolled_back_to := self._roll_back()) is not None:
          step = rolled_back_to
          continue
        # 3. Record the launched step. Its metrics are read after the next launch.
        end = clock.submit(_wait_for_end, metrics["loss"])
        position = None if self.spikes is None else self.data.get_state()
        self._launched = LaunchedStep(step, metrics, batch, end, self._batch_wait, self.data.progress(), position)
        jax.tree.map(lambda x: x.copy_to_host_async(), metrics)
        # 4. Read the metrics now if something between this step and the next needs them.
        evaluating = self.evaluate is not None and step % d.eval_interval == 0
        testing = self.evaluate_tasks is not None and step % log.eval_tasks_interval == 0
        saving = self.manager is not None and self.manager.due(step)
        sampling = self.sample is not None and step % log.sample_every == 0
        # If this step may end the run, read its metrics before the next step replaces the state.
        last = self.explainer is not None and self.guard.may_end_the_run
        traced = self.profile is not None and self.profile.ends(step)
        measured = self.moved_weights is not None and step == self.moved_weights.step
        # The first step is read at once, so that its progress line appears without delay.
        due = evaluating, testing, sampling, saving, last, traced, measured, step in (start + 1, t.last_step)
        if any(due) or self.stop.should_stop(step):
          self._read_launched(evaluating, testing)
          if (rolled_back_to := self._roll_back()) is not None:
            step = rolled_back_to
            continue
        # 5. Stop the profiler, sample, save, and stop on request.
        if traced and self.profile is not None:
          self.profile.stop()
          self._last_end = time.perf_counter()
        if sampling and self.finite:
          self._write_samples(step)
        if self.manager is not None and self._saver is not None:
          self.manager.poll()
          # The last step is saved after the loop, when it is known whether its weights are usable.
          if (saving or self._saver.is_best(step)) and step < t.last_step and not self._stops_early(step):
            with self.goodput.phase("save"):
              self._flush()
              self._saver.save(step, self.state, finite=self.finite)
              self._unsaved_seconds = 0.0
            self._last_end = time.perf_counter()
        if step < t.last_step:
          self._stop_if_requested(step)
        self.watchdog.restart("step", f"step {step + 1}")
    self._measure_final_loss()
    kept = self._save_and_wait(step)
    best = None if self._saver is None else self._saver.best_to_keep()
    if (error := self.divergence.failure(step, kept, None if best is None else best[0])) is not None:
      raise error

  def _measure_final_loss(self) -> None:
    """Measures the loss of the final weights. The last step's own loss belongs to the weights before its update."""
    if self._batch is None or self.divergence.history.reasons(0) or not self.finite:
      return
    with self.goodput.phase("end"), self.watchdog.watch("step", "the forward pass of the final weights"):
      self.state, loss = self.stepper.loss(self.state, self._batch)
      self.divergence.history.final = float(jax.device_get(loss))

  def _stops_early(self, step: int) -> bool:
    """Return True if early stopping ends the run after this step."""
    if self.best is None or not self.best.exhausted:
      return False
    self.stopped_early = self.best.why_stopped(step, self.program.config.training.last_step)
    return True

  def _evaluate_skipped(self, step: int) -> None:
    """Runs the evaluation that a stop request skipped in the previous process. Early stopping has to count it."""
    if self.best is None or self.evaluate is None or not step or step % self.program.config.data.eval_interval:
      return
    if self.best.evaluated != step and (held_out := self._evaluated(step, self.evaluate)):
      self.files.row({"step": step} | held_out)
    self._last_end = time.perf_counter()

  def _evaluated(self, step: int, evaluate: Callable[[Any], dict[str, float] | None] | None) -> dict[str, float]:
    """Evaluates the current weights. Returns {} if a stop was requested."""
    if evaluate is None:
      return {}
    # The first evaluation compiles, so the compilation limit applies.
    with self.goodput.phase("evaluate"), self.watchdog.watch("compile", f"the evaluation after step {step}"):
      held_out = evaluate(self.state["params"]) or {}
    if "eval_loss" in held_out and self.best is not None:
      self.best.observe(step, held_out["eval_loss"])
    return held_out

  def _launch(self, step: int, batch: Batch) -> Metrics:
    """Starts a step."""
    if self.moved_weights is not None and step == self.moved_weights.step:
      self.moved_weights.before(self.state)
    self.state, metrics = self.stepper.launch(self.state, batch)
    return metrics

  def _next_batch(self) -> dict[str, jax.Array]:
    """Returns the next batch on the mesh.

    Raises:
      StopRequested: a stop was requested while waiting; the data state is then that of the finished steps.
    """
    # The loop waits here if the data pipeline is slower than the device.
    begin = time.perf_counter()
    try:
      with self.watchdog.watch("data", "the wait for a batch"):
        batch = next(self.data)
    except ExitError:
      self._save_after_error()
      raise
    self._batch_wait = begin, time.perf_counter()
    return self.program.place(batch)

  def _roll_back(self) -> int | None:
    """If the newest step was a loss spike, restores the checkpoint before it and skips the data used since.

    Returns:
      The number of finished steps after the restore. None if there was no spike or no checkpoint to return to.

    Raises:
      NoProgressError: the maximum number of rollbacks did not remove the spike.
      StoppedRunError: a stop was requested while the data pipeline was waiting.
      UserError, RetryableError: the checkpoint cannot be read, or saving failed repeatedly.
    """
    if self.spikes is None or self._spike is None:
      return None
    # Find the newest checkpoint before the spike. Without one, training continues.
    (launched, spike), self._spike = self._spike, None
    to = None if self.manager is None else self.manager.newest_before(launched.step)
    if to is None or self.manager is None:
      self.progress.say(self.spikes.add(spike))
      return None
    # Free the memory of the current state before the restore.
    more = self.spikes.more_batches(spike, to)
    jax.block_until_ready(self.state)
    below = self.state["params"]
    for leaf in jax.tree.leaves(self.program.checkpoint_state(self.state)):
      leaf.delete()  # two states do not fit in device memory
    with self.goodput.phase("restore"), self.watchdog.watch("read", f"going back to step {to}"):
      # Restore the state, and move the data past the spike.
      restored = self.manager.restore(self.program.abstract_checkpoint, step=to)
      assert restored is not None, "this checkpoint was complete a moment ago"
      self.manager.abandon_after(restored.step)
      try:
        self.data.set_state(launched.position)
        for _ in range(more):
          next(self.data)
      except StopRequested:  # the next start reaches the same spike and rolls back again
        raise self.stop.error(restored.step, str(self.manager.directory / str(restored.step))) from None
    # Report and record the rollback.
    first, last = self.spikes.documents, self.data.counts()["documents"]
    to = restored.step  # an older step if the requested one was damaged
    batches = launched.step - to + more
    self.progress.say(self.spikes.add(replace(spike, back_to=to, batches=batches, documents=(first, last))))
    self.files.text(SPIKES_FILE, json.dumps(self.spikes.to_json(), indent=1) + "\n")
    # Continue everything else from the restored step: state, detectors and files.
    self.goodput.move("steps", "lost", self._unsaved_seconds)
    self.state, self._launched, self.finite = self.program.completed(restored.state, below), None, True
    # Everything else that the discarded steps changed goes back too.
    self.stepper.reset_bound()
    self.spikes.set_state(restored.extra.get(SPIKES), found=False)
    self.spikes.documents = last
    self.divergence.restart(restored.extra, self.data.identity)
    if self.best is not None:
      self.best.set_state(restored.extra.get(BEST), to)
    self.files.rewind(to)
    self.finished, self._unsaved_seconds, self._last_end = to, 0.0, time.perf_counter()
    return to

  def _save_after_error(self) -> None:
    """Saves the finished steps before an error ends the run. Failures here are only printed, so the first error stays visible.

    Raises:
      NonFiniteError: the state is not finite and must not be saved.
    """
    # Check that there is a state to save.
    step = self.finished
    if processes.count() > 1:
      return  # a save needs all processes, and the others may have failed elsewhere
    if self.manager is None or step in (0, *self.manager.complete_steps()):
      return
    # A step donates its state, so a failed step may have deleted the buffers.
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
      self.progress.say(f"step {step} cannot be saved: the failed step has already overwritten its state")
      return
    try:
      # The metrics of launched steps may report non-finite numbers, which must not be saved.
      self._read_launched()
      held = int(jax.device_get(self.state["step"]))  # smaller if the last step left the state unchanged
      if held != step:
        self.progress.say(f"step {step} cannot be saved: the state is that of step {held}, but more data were read")
      elif self._spike is not None:
        self.progress.say(f"step {step} is not saved because its loss is a spike")
      elif self._save_and_wait(step) is not None:
        self.progress.say(f"saved   step {step} in {self.manager.directory / str(step)}, because of the error below")
    except NonFiniteError:
      raise
    except Exception as error:
      self.progress.say(f"step {step} could not be saved: {error}")

  def _stop_if_requested(self, step: int) -> None:
    if not self.stop.should_stop(step):
      return
    self._read_launched()
    if self._spike is not None:
      return  # roll back before stopping
    self.watchdog.begin_shutdown()
    raise self.stop.error(step, self._save_and_wait(step))

  def _save_and_wait(self, step: int) -> str | None:
    """Saves at the end of a run and waits for the write. Returns the path of the checkpoint, or None if nothing was saved."""
    with self.goodput.phase("save"):
      self._flush()
      return None if self._saver is None else self._saver.save_and_wait(step, self.state, finite=self.finite)

  def _flush(self) -> None:
    """Writes everything that must be on disk if the process is killed after a checkpoint."""
    self.write_goodput()
    self.files.flush()

  def write_goodput(self) -> None:
    """Writes goodput.json, the accounting of the run's time until now."""
    self._goodput_written = time.perf_counter()
    self.files.text(GOODPUT, json.dumps(self.goodput.to_json(), indent=1) + "\n")

  def _write_samples(self, step: int) -> None:
    if self.sample is None:
      return
    # Sampling compiles once and can be interrupted.
    sample, params = self.sample, self.state["params"]
    try:
      with self.goodput.phase("sample"), self.watchdog.watch("compile", f"sampling after step {step}"):
        for row in self.stop.interruptible(lambda: sample(step, params)):
          self.files.sample(row)
    except StopRequested:
      return  # the loop checks for stop requests itself
    self._last_end = time.perf_counter()

  def _read_launched(self, evaluating: bool = False, testing: bool = False) -> bool:
    """Waits for the launched step, writes its metrics row and prints its line.

    Args:
      evaluating: also run the evaluation and add its losses to the row.
      testing: also evaluate the tasks and add their metrics to the row.

    Returns:
      True if the step had to be repeated in the checked form; a step launched after it then left the state unchanged.
    """
    if self._launched is None:
      return False
    launched, self._launched = self._launched, None
    # Wait for the metrics. Repeat the step if its fast form could not prove a finite update.
    step, begin, end = launched.step, self._last_end, launched.end.result()
    host = jax.device_get(launched.metrics)
    if repeated := not host.pop("decided"):
      with self.watchdog.watch("first_step", f"step {step}, repeated with a check of every number"):
        self.state, metrics = self.stepper.repeat_checked(step, self.state, launched.batch)
      host = jax.device_get(metrics)
      host.pop("decided")
      end = time.perf_counter()
    if step == self.finished and self.stop.requested is not None:  # the last step before the stop
      self.watchdog.begin_shutdown()
    # Account for the time and make the metrics row.
    seconds, self._last_end = end - begin, end
    starved = launched.starved(begin, seconds)
    self.goodput.move("steps", "data", starved)
    finite = host.pop("finite")
    row, scalars = launched.row(
      self.program, host, seconds, starved, flops=self.flops, peak_tflops=self.peak_tflops
    )  # fmt: skip
    # Print warnings about updates that are too small for the stored dtype.
    measured = update_retention.NAME in row and not self._warned_survival
    if measured and (low := update_retention.warning(step, row, self.program.config)):
      self._warned_survival = True
      self.progress.say(low)
    if self.moved_weights is not None and step == self.moved_weights.step:
      few = self.moved_weights.after(self.state, skipped=bool(scalars["skipped"]))
      if few is not None:
        self.progress.say(few)
    # Look for divergence and loss spikes.
    result = StepResult(step, scalars, finite)
    self.finite, failure = result.state_finite, None
    self._batch = launched.batch if scalars["tokens"] else self._batch
    rises = self.divergence.observe(step, scalars, self.stepper.norm, overflow=result.overflow)
    # Time since the last save is lost if a spike sends the run back.
    if self.spikes is not None:
      self._unsaved_seconds += seconds
      row["spike_rollbacks"] = self.spikes.rollbacks
      if not scalars["skipped"] and (spike := self.spikes.observe(step, scalars["loss"])) is not None:
        self._spike = launched, spike
    if evaluating and self._spike is not None and self.best is not None:
      self.best.evaluated = step  # the rollback skips this evaluation for good
    # Evaluate, unless the step is going to be rolled back.
    if (evaluating or testing) and self.finite and self._spike is None:
      try:
        row |= self._evaluated(step, self.evaluate if evaluating else None)
        row |= self._evaluated(step, self.evaluate_tasks if testing else None)
      except ExitError as raised:
        failure = raised  # raised below, after the row of this finished step is written
      self._last_end = time.perf_counter()
    # Write the row, then raise whatever ends the run.
    self.files.row(row)
    if time.perf_counter() - self._goodput_written > _GOODPUT_SECONDS:
      self.write_goodput()
    # Report the checks of the step.
    lines, error = self.guard.observe(result)
    if self.guard.changed:
      self.guard.changed = False
      self.files.text("finiteness.json", json.dumps(self.guard.report, indent=1) + "\n")
    for line in lines + rises:
      self.progress.say(line)
    self.progress.step(row)
    # End the run: x-ray the failed step first, if that is configured.
    if error is not None:
      if self.explainer is not None:
        watched = self.watchdog.watch("compile", f"the x-ray of step {step}")
        with self.goodput.phase("end"), watched, self.progress.waiting("searching for the first cause"):
          error = self.explainer.explained(error, result, self.state, launched.batch)
      raise self.divergence.explained(error, step)
    if failure is not None:
      self._save_after_error()
      raise failure
    return repeated


def _wait_for_end(loss: jax.Array) -> float:
  """Waits for a step. Returns the time when the device finished it, in seconds of ``time.perf_counter``."""
  jax.block_until_ready(loss)
  return time.perf_counter()
