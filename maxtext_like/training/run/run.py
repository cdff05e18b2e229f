"""One training run, from a loaded configuration to its end. ``_Run.train`` lists its stages in order."""

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax

from maxtext_like.capacity import memory, memory_limits
from maxtext_like.capacity.flops import peak_tflops, train_flops
from maxtext_like.checkpoint.store.best_steps import NAME as BEST
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.checkpoint.store.stored_state import flatten, total_bytes
from maxtext_like.checkpoint.weight_sources import located, require_source
from maxtext_like.config.data_keys import DataConfig
from maxtext_like.config.load import Loaded
from maxtext_like.data.loader import DataSource
from maxtext_like.data.sources import source_names
from maxtext_like.errors import DoesNotFitError, ExitError, RetryableError, StoppedRunError, is_out_of_memory
from maxtext_like.masking import masked, masked_values
from maxtext_like.sharding import processes
from maxtext_like.sharding.compilation_cache import use_compilation_cache
from maxtext_like.sharding.processes import Agreement, Heartbeat
from maxtext_like.storage import Place
from maxtext_like.training.loop.best import Best
from maxtext_like.training.loop.divergence import Divergence
from maxtext_like.training.loop.evaluation import Evaluation
from maxtext_like.training.loop.finiteness import Explainer, FinitenessGuard
from maxtext_like.training.loop.goodput import Goodput, summary
from maxtext_like.training.loop.loop import Loop
from maxtext_like.training.loop.moved_weights import MovedWeights
from maxtext_like.training.loop.profile import Profile
from maxtext_like.training.loop.progress import Progress, Shown, duration
from maxtext_like.training.loop.samples import Samples
from maxtext_like.training.loop.signals import StopRequest, StopRequested
from maxtext_like.training.loop.spikes import Spikes
from maxtext_like.training.loop.task_evaluation import TaskEvaluation
from maxtext_like.training.loop.watchdog import Watchdog
from maxtext_like.training.run import provenance, report, resolve_tokenizer, resume_state
from maxtext_like.training.run.banner import banner, cut_conversations, never_evaluated, passes, shares
from maxtext_like.training.run.batches import ResumePoint, open_data, with_counted_steps
from maxtext_like.training.run.preflight import finished_line, run_directory
from maxtext_like.training.run.process_group import join
from maxtext_like.training.run.restarts import Restarts
from maxtext_like.training.run.run_checkpoints import finished, newest_resume_point, open_manager, open_mirror
from maxtext_like.training.run.run_directory import RunDirectory
from maxtext_like.training.run.start import Start, prepare
from maxtext_like.training.sinks.metrics import METRICS, SAMPLES, by_step, read, warn_of_finished
from maxtext_like.training.sinks.run_files import NoFiles, RunFiles
from maxtext_like.training.sinks.trackers import Tracked, trackers
from maxtext_like.training.step.program import Stepper, TrainProgram, make_program

# Status codes with which the runtime reports a lost or faulty device or a lost peer. Errors of the program have other codes.
_DEVICE_FAULT = re.compile(r"(INTERNAL|UNAVAILABLE|ABORTED|DATA_LOSS|DEADLINE_EXCEEDED)\b")
REPORT = "report.html"
T = TypeVar("T")
MakeExplainer = Callable[[TrainProgram, Path | Place, Callable[[str], None]], Explainer]


def train(loaded: Loaded, explainer: MakeExplainer, shown: Shown = None) -> str:
  """Train as configured.

  A stop request by signal is only possible in the main thread. If a launcher started several processes, this is one of them:
  they connect here, before the first device is used.

  Args:
    loaded: the configuration.
    explainer: makes the object that keeps and explains the step that ends the run, from (program, run directory, function
      that prints a line); used with ``replay_failed_step``. See ``analysis.failed_step.FailedStep``.
    shown: where the lines of the run go.

  Returns:
    A line that says how the run ended.

  Raises:
    ExitError: the run did not finish; the class has the exit code.
  """
  heartbeat = join(loaded)
  stop = StopRequest(Agreement(loaded.config.watchdog.watchdog_peers_seconds) if processes.count() > 1 else None)
  hears = threading.current_thread() is threading.main_thread()
  with stop if hears else contextlib.nullcontext(), heartbeat:
    return _Run(loaded, explainer, stop, shown if processes.primary() else None, heartbeat).train()


@contextlib.contextmanager
def _stopped_at_start(stop: StopRequest) -> Iterator[None]:
  """Turn a stop request before the first step into its exit code. Such starts count towards the restart limit."""
  try:
    yield
  except StopRequested:
    raise stop.error_at_start() from None


@dataclass
class _Resources:
  """Everything that is open before the first step."""

  program: TrainProgram
  start: int  # number of finished steps in the newest checkpoint
  need: memory.MemoryEstimate
  limit: memory_limits.Limit | None
  settings: DataConfig
  data: DataSource
  held_out: dict[str, DataSource]
  samples: Samples | None
  tasks: TaskEvaluation | None
  manager: CheckpointManager | None


class _Run:
  """One process of a run. Resources are opened in order and closed in reverse order."""

  def __init__(self, loaded: Loaded, explainer: MakeExplainer, stop: StopRequest, shown: Shown, heartbeat: Heartbeat):
    # Configuration, and what limits waiting for other processes.
    self._loaded, self._config, self._explainer, self._stop = loaded, loaded.config, explainer, stop
    self._heartbeat, self._peers_seconds = heartbeat, loaded.config.watchdog.watchdog_peers_seconds
    self._goodput, self._began = Goodput(), time.monotonic()
    # Nothing is created or locked here; ``train`` enters these in order.
    self._directory: RunDirectory = run_directory(self._config)
    self._watchdog = Watchdog(self._config.watchdog.limits())
    self._progress = Progress(self._config.training.steps or 0, self._config.logging.log_interval, shown)
    self._stack = contextlib.ExitStack()
    self._thread = threading.get_ident()

  def train(self) -> str:
    """Run all stages. Returns the last line."""
    c, watchdog, progress, directory = self._config, self._watchdog, self._progress, self._directory
    # 1. Check what a start needs, before anything is written.
    use_compilation_cache(c.logging.compilation_cache_dir)
    if c.checkpoint.init_from is not None:
      require_source(located(c.checkpoint.init_from))
    # 2. Start the watchdog and the terminal output, and lock the run directory.
    with self._stack as stack:
      stack.enter_context(watchdog)
      watchdog.stop = self._stop
      starting = stack.enter_context(contextlib.ExitStack())
      starting.enter_context(watchdog.watch("compile", "the start"))
      stack.enter_context(progress)
      # The directory is created here, and removed again if the run ends before it writes a file.
      directory.require_shared(processes.from_primary(lambda: stack.enter_context(directory).holder, self._peers_seconds))
      if processes.primary():
        watchdog.directory = directory.path
      if c.checkpoint.enable_checkpointing:  # count this start before anything can fail
        newest = resume_state.newest_saved(directory.path, directory.checkpoints)
        restarts = Restarts(directory, newest, c.watchdog.max_restarts_without_progress)
        processes.on_primary(lambda: stack.enter_context(restarts), self._peers_seconds)
      # 3. Build the program, open the data and the checkpoints.
      stack.enter_context(_stopped_at_start(self._stop))
      with progress.waiting("building the model and opening the data"):
        opened = self._open()
      if (finished := self._from_primary(lambda: self._validate_checkpoints(opened))) is not None:
        progress.say(finished)
        return finished
      # 4. Print the banner.
      stack.callback(watchdog.begin_shutdown)
      # Describe the run before its first step, so that a wrong setting is noticed early.
      progress.say(banner(opened.program, directory.shown, opened.need, opened.limit))
      if opened.data.rows is not None:
        progress.say(passes(opened.program, opened.data, opened.start))
      if opened.data.documents:
        held_out = {name: source.documents[name] for name, source in opened.held_out.items()}
        progress.say(shares(opened.data.documents, held_out, opened.settings))
      if (line := never_evaluated(opened.program.config)) is not None:
        progress.say(line)
      if chat := opened.data.identity.get("chat"):
        progress.say(f"chat    template {chat['template']}, train_on={chat['train_on']}")
      # 5. Compile, make or restore the state, and train.
      with self._device_faults(opened):
        loop, page, start = self._make_loop(opened)
        # Wait for process 0, which opens the files of the run.
        self._stop.interruptible(lambda: processes.barrier("start", watchdog.limit("compile")))
        starting.close()
        unwritten = self._loop_to_its_end(loop, page, start)
      # 6. Print how the run ended.
      progress.say(f"time    {summary(self._goodput.to_json())}\n{page.outcome}")
      if not any(line.startswith(REPORT) for line in unwritten):
        progress.say(f"{directory.shown}/{REPORT}")
      return page.outcome

  def _from_primary(self, make: Callable[[], T], seconds: float | None = None) -> T:
    """Run ``make`` in process 0 and return its result in all processes. Waiting processes react to a stop request."""
    ask = lambda: processes.from_primary(make, seconds or self._peers_seconds)
    return ask() if processes.primary() else self._stop.interruptible(ask)

  def _open(self) -> _Resources:
    """Build the program and open the data, which makes the first batch, before any file of the run is written."""
    c, watchdog, stop, stack = self._config, self._watchdog, self._stop, self._stack
    program = stop.interruptible(lambda: make_program(c))
    need, limit = memory.require_fit(program, memory.activation_bytes(program))
    watchdog.state_bytes = total_bytes(flatten(program.abstract_checkpoint))
    # The mirror comes before the data, because its checkpoint may bring the tokenizer.
    with watchdog.watch("read", "fetching a checkpoint from the mirror"):
      mirrors = []
      self._from_primary(lambda: mirrors.append(open_mirror(c, self._directory, self._progress)), watchdog.limit("read"))
    settings = resolve_tokenizer.resolve(c.data, c.checkpoint, self._directory.checkpoints)
    # Validating all records may take longer than the startup limit; each sign of progress extends it.
    alive = lambda: watchdog.restart(thread=self._thread)

    def open_split(split: str, source: str | None = None) -> DataSource:
      opened = stop.interruptible(lambda: open_data(program, split, settings, alive, stop.check, source))
      return stack.enter_context(contextlib.closing(opened))

    # The training data give the number of steps of a run configured by epochs.
    data = open_split("train")
    newest = None if data.rows is None else self._from_primary(lambda: newest_resume_point(self._directory, c.checkpoint))
    start = None if newest is None else ResumePoint(**newest)
    program = stop.interruptible(lambda: with_counted_steps(program, data, start))
    self._config = c = program.config
    self._progress.last_step = c.training.last_step
    # The evaluation data. All processes must see the same data.
    held_out = {name: open_split("eval", name) for name in source_names(settings, "eval") if settings.eval_interval}
    identities = {"train data": data.identity}
    identities |= {f"eval data{f' of {name}' * bool(name)}": source.identity for name, source in held_out.items()}
    # Another process may still be validating its records.
    stop.interruptible(lambda: processes.require_same(identities, watchdog.limit("compile")))
    samples = None
    if c.logging.sample_every:
      assert data.tokenizer is not None, "synthetic data, which config/rules.py refuses"
      samples = Samples(program, data.tokenizer, self._progress.say)
    tasks = None
    if c.logging.eval_tasks_interval:
      assert data.tokenizer is not None, "synthetic data, which config/rules.py refuses"
      tasks = TaskEvaluation(program, data.tokenizer, stop, watchdog, self._progress.say)
    # The checkpoints.
    self._from_primary(lambda: resume_state.read(self._directory.path, self._directory.checkpoints).require(c.checkpoint))
    manager = None
    if c.checkpoint.enable_checkpointing:
      manager = stack.enter_context(open_manager(c, self._directory, data, watchdog, next(iter(mirrors), None)))
    return _Resources(program, start.step if start else 0, need, limit, settings, data, held_out, samples, tasks, manager)

  def _validate_checkpoints(self, opened: _Resources) -> str | None:
    """Validate the existing checkpoints. Returns a line if the run is already finished, otherwise None."""
    manager, path = opened.manager, self._directory.path
    if manager is None:
      return None
    # A finished run needs no training.
    if (done := finished(opened.program, manager)) is not None:
      warn_of_finished(self._directory.home, done[0].step)
      return finished_line(self._directory.shown, *done, self._config)
    # The tokens of the checkpoint and of this run must mean the same.
    if (newest := manager.latest_complete()) is not None:
      resolve_tokenizer.require_same(manager.directory / str(newest), opened.data)
    # The stored arrays must fit the program.
    manager.preflight(opened.program.abstract_checkpoint)
    if (gone := resume_state.missing_step(path, self._directory.checkpoints, newest)) is not None:
      self._progress.say(f"note    step {gone} was saved but no longer exists; the run resumes from step {newest}")
    resume_state.record_newest(path, newest, self._directory.fence)
    return None

  def _make_loop(self, opened: _Resources) -> tuple[Loop, "_Page", int]:
    """Make the loop with its state. Also returns the source of the report and the number of finished steps."""
    c, program, directory, say = self._config, opened.program, self._directory, self._progress.say
    # Compile the programs, and restore or initialize the state.
    spikes = Spikes(c.training) if c.training.spike_factor else None
    watched = c.checkpoint.keep_best or c.training.early_stopping_patience
    best = Best.of(c.training) if watched else None
    divergence = Divergence(c)
    start: Start = self._stop.interruptible(lambda: prepare(
      program, opened.manager, opened.data, self._progress, self._goodput, spikes, best, divergence,
      lambda what: self._watchdog.watch("read", what, thread=self._thread),
    ))  # fmt: skip
    # Open the files of the run in process 0.
    files: RunFiles = NoFiles()
    if processes.primary():
      files = RunFiles(
        directory.path,
        tensorboard=c.logging.enable_tensorboard,
        step=start.step,
        require_held=directory.require_held,
        fence=directory.fence,
        trackers=trackers(c.logging, Tracked.of(directory.path, c)),
      )
    self._stack.enter_context(files)
    # Steps that are repeated after a restart count as lost time, not as progress.
    self._goodput.add_earlier(directory.path, sum(row.get("step_seconds") or 0.0 for row in files.again))
    # Record the configuration and the environment.
    config_yaml = self._loaded.to_yaml(mask=True)
    if processes.primary():
      directory.keep_previous("config.yml", config_yaml)
    files.text("config.yml", config_yaml)
    # Chosen kernels are recorded with the environment, because results may depend on them.
    used = {"kernels": [use.to_json() for use in program.model.kernels], "grouped_product": program.model.grouped_product}
    used["norm_kernel"] = program.model.norms
    env = masked_values(provenance.describe() | used)
    files.text("env.json", json.dumps(env, indent=1) + "\n")
    # Assemble the loop.
    evaluate = None
    if opened.held_out:
      evaluate = Evaluation(program, opened.held_out, self._progress, self._stop, self._goodput, self._watchdog)
    profiled = c.logging.profile_steps
    # The guard knows the names of arrays, which messages about non-finite numbers need.
    guard = FinitenessGuard(c, program.labels, program.state_labels, c.training.last_step, program.step.untouched)
    loop = Loop(
      program=program,
      stepper=Stepper(program, start.train_step, start.check),
      state=start.state,
      base=start.base,
      data=opened.data,
      evaluate=evaluate,
      sample=opened.samples,
      evaluate_tasks=opened.tasks,
      manager=opened.manager,
      files=files,
      progress=self._progress,
      stop=self._stop,
      guard=guard,
      flops=train_flops(
        program.model.decoder, program.spec, program.selection, program.global_batch, c.training.max_target_length
      ),
      peak_tflops=peak_tflops(program.model.devices[0].device_kind, c.precision.dtype),
      explainer=self._explainer(program, directory.home, say) if c.training.replay_failed_step else None,
      watchdog=self._watchdog,
      goodput=self._goodput,
      spikes=spikes,
      best=best,
      divergence=divergence,
      moved_weights=MovedWeights(program, start.step),
      profile=Profile(profiled, directory.path, say, traces=processes.primary()) if profiled else None,
    )
    return loop, _Page(directory.path, guard, config_yaml, env), start.step

  def _loop_to_its_end(self, loop: Loop, page: "_Page", start: int) -> list[str]:
    """Train, then write the report, also after an error. Returns a line for each file that could not be written."""
    begin, steps = time.monotonic(), self._config.training.last_step
    outcome = "interrupted by a program error"
    try:
      self._progress.begin(start)
      loop.run(start)
      # The loop ended without an error.
      self._heartbeat.leave()
      done = steps if loop.stopped_early is None else loop.finished
      how = f"{steps:,} steps" if loop.stopped_early is None else f"{loop.stopped_early}; {done:,} steps"
      how += f", {done - start:,} of them since this start" if start else ""
      whole = duration(time.monotonic() - self._began)
      outcome = f"finished: {how}; {duration(time.monotonic() - begin)} of training, {whole} with start and compilation"
      if (best := loop.best) is not None and best.step is not None and self._config.checkpoint.keep_best:
        self._progress.say(f"best    eval loss {best.loss:.4f} after step {best.step}, in {self._directory.checkpoints / BEST}")
    except ExitError as error:
      # Other processes stop as well, or this one has no reason to wait for them.
      if isinstance(error, StoppedRunError) or not isinstance(error, RetryableError):
        self._heartbeat.leave()
      outcome = str(error) if isinstance(error, StoppedRunError) else f"stopped: {error}"
      raise
    finally:
      # Write the summaries and the report in every case.
      self._watchdog.begin_shutdown()
      if (line := cut_conversations(loop.data.counts(), self._config)) is not None:
        self._progress.say(line)
      loop.write_goodput()
      page.outcome, page.goodput, page.output = masked(outcome), self._goodput.to_json(), self._progress.unwritten
      unwritten = loop.files.end(REPORT, page.render)
      for line in unwritten:
        self._progress.say(line)
    return unwritten

  @contextlib.contextmanager
  def _device_faults(self, opened: _Resources) -> Iterator[None]:
    """Translate errors of the runtime into errors with an exit code."""
    try:
      yield
    except jax.errors.JaxRuntimeError as error:
      self._heartbeat.wait_for_verdict()  # a lost process first appears as a failed collective
      first = str(error).strip().splitlines()[0]
      # Out of memory: show the estimate and the remedies.
      if is_out_of_memory(error):
        raise DoesNotFitError(
          f"out of memory: {first}\nestimated for each device:\n{memory.table(opened.need, opened.limit)}\n"
          f"{memory.remedies(opened.program, opened.need, opened.limit)}"
        ) from error
      # A faulty device is worth another start; any other error is one of the program.
      if not self._stop.training or not _DEVICE_FAULT.match(str(error)):
        raise
      raise RetryableError(f"the device failed: {first}; the same command resumes the run") from error


@dataclass
class _Page:
  """The contents of report.html, rendered after all other files are written."""

  """The contents of report.html, rendered after all other files are written."""

  directory: Path
  guard: FinitenessGuard
  config_yaml: str
  environment: dict[str, Any]
  outcome: str = ""
  goodput: dict[str, Any] = field(default_factory=dict)
  output: str | None = None

  def render(self, unwritten: list[str]) -> str:
    return report.render(
      name=self.directory.name,
      outcome=self.outcome,
      rows=by_step(read(self.directory / METRICS)),
      samples=read(self.directory / SAMPLES),
      finiteness=self.guard.report,
      config_yaml=self.config_yaml,
      environment=self.environment,
      unwritten=[*unwritten, *([self.output] if self.output else [])],
      goodput=self.goodput,
    )


logging.getLogger("absl").setLevel(logging.ERROR)
