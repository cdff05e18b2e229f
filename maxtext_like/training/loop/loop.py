"""The loop around the train step: batches in, metrics out, and in between checkpoints, evaluation and a stop on request.

The device is one step ahead of the host: while it works on step n + 1, the host reads the metrics of step n. So nothing
waits, and a step's time is the time between two ends on the device. A thread of its own sees them: launching the kernels of
step n + 1 can keep the host until far into that step, and every end but the last would be seen late.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from maxtext_like.checkpoint.adapters.adapter_step import EXTRA as BASE
from maxtext_like.checkpoint.adapters.adapter_step import Base
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.errors import ExitError, NonFiniteError
from maxtext_like.sharding import processes
from maxtext_like.training.loop.best import EXTRA as BEST
from maxtext_like.training.loop.best import Best
from maxtext_like.training.loop.divergence import EXTRA as DIVERGENCE
from maxtext_like.training.loop.divergence import Divergence
from maxtext_like.training.loop.finiteness import Explainer, FinitenessGuard, StepResult
from maxtext_like.training.loop.goodput import FILE_NAME as GOODPUT
from maxtext_like.training.loop.goodput import Goodput
from maxtext_like.training.loop.launched_step import LaunchedStep
from maxtext_like.training.loop.moved_weights import MovedWeights
from maxtext_like.training.loop.profile import Profile
from maxtext_like.training.loop.progress import Progress
from maxtext_like.training.loop.resume_diff import batch_of
from maxtext_like.training.loop.signals import StopAsked, StopRequest
from maxtext_like.training.loop.spikes import EXTRA as SPIKES
from maxtext_like.training.loop.spikes import FILE_NAME as SPIKES_FILE
from maxtext_like.training.loop.spikes import Spike, Spikes
from maxtext_like.training.loop.stepper import Stepper
from maxtext_like.training.loop.watchdog import Watchdog
from maxtext_like.training.sinks.metrics import Row
from maxtext_like.training.sinks.run_files import RunFiles
from maxtext_like.training.step import update_retention
from maxtext_like.training.step.program import TrainProgram
from maxtext_like.training.step.train_step import Batch, Metrics, State

_GOODPUT_SECONDS = 10.0  # between two writes: what a killed life may leave uncounted


@dataclass
class Loop:
  """One run from a state to its last step.

  Attributes:
    program: of the run.
    stepper: takes its steps.
    state: where to start; each step takes its memory.
    data: batches of this process, ``get_state()`` and ``progress()``.
    evaluate: params -> held-out losses of the row, None when it was left for a stop; None: no evaluation.
    sample: (step, params) -> rows of samples.jsonl; None: no samples.
    manager, files, progress, stop, guard: the run's own.
    flops: of one step on all devices.
    peak_tflops: of one device; None: no mfu.
    failed: keeps and explains the step that ends the run; None: nobody does.
    base: what lies below the adapter that is trained; None: the weights themselves are trained.
    watchdog: limits how long a step may take, and what comes between two.
    finite: the newest metrics show a finite state.
    goodput: clock of this life.
    spikes: of the loss; off unless given.
    best: watches the evaluations; None: nobody asks which was best.
    divergence: watches losses and the parameter norm.
    moved: warns if updates are too small for 16-bit weights; None for no warning.
    finished: steps that are.
    stopped_early: why the run ended before its last step; None: it did not.
    profile: traces some steps; None: none.
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
  failed: Explainer | None = None
  base: Base | None = None
  watchdog: Watchdog = field(default_factory=Watchdog)
  finite: bool = True
  goodput: Goodput = field(default_factory=Goodput)
  spikes: Spikes | None = None
  best: Best | None = None
  moved: MovedWeights | None = None
  finished: int = field(default=0, init=False)
  stopped_early: str | None = field(default=None, init=False)
  profile: Profile | None = None
  _pending: LaunchedStep | None = field(default=None, init=False)
  _drawn: tuple[float, float] = field(default=(0.0, 0.0), init=False)
  _goodput_written: float = field(default=0.0, init=False)
  _last_end: float = field(default=0.0, init=False)
  _batch: Any = field(default=None, init=False)  # batch of the newest finished step that had targets
  _low: bool = field(default=False, init=False)  # that little of the updates survives has been said
  _spiked: tuple[LaunchedStep, Spike] | None = field(default=None, init=False)
  _unsaved_seconds: float = field(default=0.0, init=False)

  def run(self, start: int) -> None:
    """Trains from ``start`` finished steps to the configuration's ``steps``.

    Raises:
      NonFiniteError: see ``FinitenessGuard``; no state is saved after that. Or all steps were taken, and ``Divergence`` says
        that the weights are not usable; they are saved with that remark.
      ExitError: stopped by a signal, after a checkpoint.
      RetryableError: checkpoints keep failing.
      UserError, RetryableError: the data's own, as of a file that has gone; the finished steps are saved before.
    """
    self.finished = start
    self.stop.training = True
    try:
      if self.profile is not None:
        self.profile.note(start)
      with self.goodput.phase("steps"):
        self._run(start)
    except ExitError:
      raise
    except Exception:  # an error of this program
      self._keep_finished()
      raise
    finally:
      if self.profile is not None:
        self.profile.stop()

  def _run(self, start: int) -> None:
    t, d, log = self.program.config.training, self.program.config.data, self.program.config.logging
    self._last_end = time.perf_counter()
    step = start
    self._stop_if_asked(step)
    self._evaluate_late(step)
    with self.watchdog.watch("first_step", f"step {step + 1}"), ThreadPoolExecutor(1, "step-end") as clock:
      # Never one batch too many: a drawn batch counts as trained on in the next checkpoint.
      while step < t.last_step and not self._is_enough(step):
        if self.profile is not None and self.profile.starts(step + 1):
          self._settle()
          self.profile.start()
          self._last_end = time.perf_counter()
        try:
          batch = self._next_batch()
        except StopAsked:  # while the data stalled
          self._stop_if_asked(step)
          if (back := self._go_back()) is not None:  # the step was a spike
            step = back
          continue
        step += 1
        metrics = self._launch(step, batch)
        self.finished = step
        if self._settle():  # the step before was taken again, so this one did nothing
          metrics = self._launch(step, batch)
        if (back := self._go_back()) is not None:
          step = back
          continue
        end = clock.submit(_end_of, metrics["loss"])
        position = None if self.spikes is None else self.data.get_state()
        self._pending = LaunchedStep(step, metrics, batch, end, self._drawn, self.data.progress(), position)
        jax.tree.map(lambda x: x.copy_to_host_async(), metrics)
        evaluating = self.evaluate is not None and step % d.eval_interval == 0
        saving = self.manager is not None and self.manager.due(step)
        sampling = self.sample is not None and step % log.sample_every == 0
        # A step that may end the run is waited for, so that the state is still the one after it.
        last = self.failed is not None and self.guard.may_end_the_run
        traced = self.profile is not None and self.profile.ends(step)
        measured = self.moved is not None and self.moved.due(step)
        # After the first step too: whoever started the run waits for this line.
        if (
          evaluating
          or sampling
          or saving
          or last
          or traced
          or measured
          or step in (start + 1, t.last_step)
          or self.stop.should_stop(step)
        ):
          self._settle(evaluating)
          if (back := self._go_back()) is not None:
            step = back
            continue
        if traced and self.profile is not None:
          self.profile.stop()
          self._last_end = time.perf_counter()
        if sampling and self.finite:
          self._write_samples(step)
        if self.manager is not None:
          self.manager.poll()
          found = self._keeps_best and self.best is not None and self.best.step == step
          # The last step is saved below, when it is known whether its weights are usable.
          if (saving or found) and step < t.last_step and not self._is_enough(step):
            with self.goodput.phase("save"):
              self._flush()
              self._look_before_save(step)
              if found:
                self.manager.wait()  # a step that is due may be passed over for one that is being written, the best not
              state, extra = self.program.stored(self.state), self._extra()
              self.manager.save(step, state, extra, finite=self.finite, best=self._best_to_keep())
              self._unsaved_seconds = 0.0
            self._last_end = time.perf_counter()
        if step < t.last_step:
          self._stop_if_asked(step)
        self.watchdog.again("step", f"step {step + 1}")
    self._measure_final_loss()
    kept = self._save_and_wait(step)
    if (error := self.divergence.failure(step, kept, (self._best_to_keep() or (None,))[0])) is not None:
      raise error

  def _measure_final_loss(self) -> None:
    """Runs the weights that the last step left forward: that step's loss is of the weights before it."""
    if self._batch is None or self.divergence.history.reasons(0) or not self.finite:
      return
    with self.goodput.phase("end"), self.watchdog.watch("step", "the forward pass of the final weights"):
      self.state, loss = self.stepper.loss(self.state, self._batch)
      self.divergence.history.final = float(jax.device_get(loss))

  @property
  def _keeps_best(self) -> bool:
    return self.program.config.checkpoint.keep_best

  def _best_to_keep(self) -> tuple[int, float] | None:
    """The best step and its loss, where checkpoints are kept for that."""
    if not self._keeps_best or self.best is None or self.best.step is None:
      return None
    return self.best.step, self.best.loss

  def _is_enough(self, step: int) -> bool:
    """Whether the run has waited long enough for a better evaluation."""
    if self.best is None or not self.best.exhausted:
      return False
    self.stopped_early = self.best.why_stopped(step, self.program.config.training.last_step)
    return True

  def _evaluate_late(self, step: int) -> None:
    """The evaluation that a stop kept the life before this one from: without it patience would count otherwise."""
    if self.best is None or self.evaluate is None or not step or step % self.program.config.data.eval_interval:
      return
    if self.best.evaluated != step and (held_out := self._evaluated(step)):
      self.files.row({"step": step} | held_out)
    self._last_end = time.perf_counter()

  def _evaluated(self, step: int) -> dict[str, float]:
    """The held-out losses after a step; none when a stop was asked for."""
    if self.evaluate is None:
      return {}
    with self.goodput.phase("evaluate"), self.watchdog.watch("compile", f"the evaluation after step {step}"):
      held_out = self.evaluate(self.state["params"]) or {}
    if held_out and self.best is not None:
      self.best.look(step, held_out["eval_loss"])
    return held_out

  def _launch(self, step: int, batch: Batch) -> Metrics:
    """Starts a step."""
    if self.failed is not None:
      self.failed.remember(self.state)
    if self.moved is not None:
      self.moved.before(step, self.state)
    self.state, metrics = self.stepper.begin(self.state, batch)
    return metrics

  def _next_batch(self) -> dict[str, jax.Array]:
    """Raises StopAsked where a stop was asked for and none comes: the data then stand after the finished steps."""
    begin = time.perf_counter()
    try:
      with self.watchdog.watch("data", "the wait for a batch"):
        batch = next(self.data)
    except ExitError:
      self._keep_finished()
      raise
    self._drawn = begin, time.perf_counter()
    return self.program.place(batch)

  def _extra(self) -> dict[str, Any]:
    extra = {"data": self.data.get_state(), "batch": batch_of(self.program), DIVERGENCE: self.divergence.get_state()}
    if self.spikes is not None:
      self.spikes.documents = self.data.counts()["documents"]
      extra[SPIKES] = self.spikes.get_state()
    if self.best is not None:
      extra[BEST] = self.best.get_state()
    return extra if self.base is None else extra | {BASE: self.base.to_json()}

  def _go_back(self) -> int | None:
    """Where the newest step was a spike: takes up the state of the checkpoint before it, past the data of the steps since.

    Returns:
      The number of steps that are finished now; None: there was no spike, or nothing to go back to.

    Raises:
      NoProgressError: it did not help often enough.
      StoppedRunError: a stop was asked for while the data stalled.
      UserError, RetryableError: the checkpoint cannot be read, or saving keeps failing.
    """
    if self.spikes is None or self._spiked is None:
      return None
    (launched, spike), self._spiked = self._spiked, None
    to = None if self.manager is None else self.manager.newest_before(launched.step)
    if to is None or self.manager is None:
      self.progress.say(self.spikes.add(spike))
      return None
    more = self.spikes.more_batches(spike, to)
    jax.block_until_ready(self.state)
    below = self.state["params"]
    for leaf in jax.tree.leaves(self.program.stored(self.state)):
      leaf.delete()  # there is no room for two
    with self.goodput.phase("restore"), self.watchdog.watch("read", f"going back to step {to}"):
      restored = self.manager.restore(self.program.abstract_stored, step=to)
      assert restored is not None, "it was complete a moment ago"
      self.manager.abandon_after(restored.step)
      try:
        self.data.set_state(launched.position)
        for _ in range(more):
          next(self.data)
      except StopAsked:  # the data stall; the next start comes to the spike, and back, again
        raise self.stop.error(restored.step, str(self.manager.directory / str(restored.step))) from None
    first, last = self.spikes.documents, self.data.counts()["documents"]
    to = restored.step  # an older one where that one was damaged
    batches = launched.step - to + more
    self.progress.say(self.spikes.add(replace(spike, back_to=to, batches=batches, documents=(first, last))))
    self.files.text(SPIKES_FILE, json.dumps(self.spikes.to_json(), indent=1) + "\n")
    self.goodput.move("steps", "lost", self._unsaved_seconds)
    self.state, self._pending, self.finite = self.program.completed(restored.state, below), None, True
    self.stepper.forget()
    self.spikes.set_state(restored.extra.get(SPIKES), found=False)
    self.spikes.documents = last
    self.divergence.restart(restored.extra, self.data.identity)
    if self.best is not None:
      self.best.set_state(restored.extra.get(BEST), to)
    self.files.rewind(to)
    self.finished, self._unsaved_seconds, self._last_end = to, 0.0, time.perf_counter()
    return to

  def _keep_finished(self) -> None:
    """Saves the steps that an error ends the run after; what fails here is told, for the error itself must be seen.

    Raises:
      NonFiniteError: the last of them shows that the state is not fit to be kept.
    """
    step = self.finished
    if processes.count() > 1:
      return  # the others may be elsewhere, and a save needs all
    if self.manager is None or step in (0, *self.manager.complete_steps()):
      return
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
      self.progress.say(f"step {step} cannot be saved: its state went into the step that failed")
      return
    try:
      self._settle()
      held = int(jax.device_get(self.state["step"]))  # fewer where a step did nothing, and could not be taken again
      if held != step:
        self.progress.say(f"step {step} cannot be saved: the state is that of step {held}, and its data are read past already")
      elif self._spiked is not None:
        self.progress.say(f"step {step} is not saved: its loss is a spike")
      elif self._save_and_wait(step) is not None:
        self.progress.say(f"saved   step {step} in {self.manager.directory / str(step)}, because of the error below")
    except NonFiniteError:
      raise
    except Exception as error:
      self.progress.say(f"step {step} could not be saved: {error}")

  def _stop_if_asked(self, step: int) -> None:
    if not self.stop.should_stop(step):
      return
    self._settle()
    if self._spiked is not None:
      return  # the next step goes back first
    self.watchdog.leave()
    raise self.stop.error(step, self._save_and_wait(step))

  def _save_and_wait(self, step: int) -> str | None:
    """Saves at the end of a run; returns the path of the checkpoint, None where there is none."""
    with self.goodput.phase("save"):
      self._flush()
      if self.manager is None:
        return None
      self._look_before_save(step)
      state, extra, best = self.program.stored(self.state), self._extra(), self._best_to_keep()
      if not self.manager.save_and_wait(step, state, extra, finite=self.finite, best=best):
        return None
    return str(self.manager.directory / str(step))

  def _look_before_save(self, step: int) -> None:
    """Reads what the steps only proved: a proof knows nothing of a device whose memory forgets.

    Raises:
      NonFiniteError: the state is not fit to be saved.
    """
    if not self.finite:
      return
    with self.watchdog.watch("step", f"the look at step {step} before its save"):
      seen = jax.device_get(self.stepper.seen(self.state))
    if (error := self.guard.before_save(step, seen)) is not None:
      raise error

  def _flush(self) -> None:
    """What a life that is killed after a checkpoint must have left."""
    self.write_goodput()
    self.files.flush()

  def write_goodput(self) -> None:
    """Writes where the time of the run went, up to now."""
    self._goodput_written = time.perf_counter()
    self.files.text(GOODPUT, json.dumps(self.goodput.to_json(), indent=1) + "\n")

  def _write_samples(self, step: int) -> None:
    if self.sample is None:
      return
    sample, params = self.sample, self.state["params"]
    try:
      with self.goodput.phase("sample"), self.watchdog.watch("compile", f"sampling after step {step}"):
        for row in self.stop.interruptible(lambda: sample(step, params)):
          self.files.sample(row)
    except StopAsked:
      return  # the loop asks for itself
    self._last_end = time.perf_counter()

  def _settle(self, evaluating: bool = False) -> bool:
    """Waits for the step under way, and writes and shows what it gave.

    Args:
      evaluating: the held-out losses too.

    Returns:
      Whether it had to be taken again: a step that was started since did nothing.
    """
    if self._pending is None:
      return False
    launched, self._pending = self._pending, None
    step, begin, end = launched.step, self._last_end, launched.end.result()
    host = jax.device_get(launched.metrics)
    if again := not host.pop("usual"):
      self.state, metrics = self.stepper.again(step, self.state, launched.batch, self.watchdog)
      host = jax.device_get(metrics)
      host.pop("usual")
      end = time.perf_counter()
    if step == self.finished and self.stop.requested is not None:  # no step after it
      self.watchdog.leave()
    seconds, self._last_end = end - begin, end
    starved = launched.starved(begin, seconds)
    self.goodput.move("steps", "data", starved)
    finite = host.pop("finite")
    row, scalars = launched.row(
      self.program, host, seconds, starved, flops=self.flops, peak_tflops=self.peak_tflops
    )  # fmt: skip
    if update_retention.NAME in row and not self._low and (low := update_retention.warning(step, row, self.program.config)):
      self._low = True
      self.progress.say(low)
    if self.moved is not None and (few := self.moved.after(step, self.state, skipped=bool(scalars["skipped"]))):
      self.progress.say(few)
    result = StepResult(step, scalars, finite)
    self.finite, failure = result.state_finite, None
    self._batch = launched.batch if scalars["tokens"] else self._batch
    rises = self.divergence.observe(step, scalars, self.stepper.norm, overflow=result.overflow)
    if self.spikes is not None:
      self._unsaved_seconds += seconds
      row["spike_rollbacks"] = self.spikes.rollbacks
      if not scalars["skipped"] and (spike := self.spikes.look(step, scalars["loss"])) is not None:
        self._spiked = launched, spike
    if evaluating and self._spiked is not None and self.best is not None:
      self.best.evaluated = step  # it is passed over, for good
    if evaluating and self.finite and self._spiked is None:
      try:
        row |= self._evaluated(step)
      except ExitError as raised:
        failure = raised  # the step is finished all the same, and its row is due
      self._last_end = time.perf_counter()
    self.files.row(row)
    if time.perf_counter() - self._goodput_written > _GOODPUT_SECONDS:
      self.write_goodput()
    lines, error = self.guard.observe(result)
    if self.guard.changed:
      self.guard.changed = False
      self.files.text("finiteness.json", json.dumps(self.guard.report, indent=1) + "\n")
    for line in lines + rises:
      self.progress.say(line)
    self.progress.step(row)
    if error is not None:
      if self.failed is not None:
        with self.goodput.phase("end"), self.watchdog.watch("compile", f"the look through step {step}"):
          error = self.failed.explained(error, step, self.state, launched.batch, applied=not scalars["skipped"])
      raise self.divergence.explained(error, step)
    if failure is not None:
      self._keep_finished()
      raise failure
    return again


def _end_of(loss: jax.Array) -> float:
  """Waits for a step; returns when its device had finished, in seconds of ``time.perf_counter``."""
  jax.block_until_ready(loss)
  return time.perf_counter()
