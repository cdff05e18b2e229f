"""One training run, from a loaded configuration to its end: checks first, then the directory, then the devices."""

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

from maxtext_like.capacity import memory
from maxtext_like.capacity.flops import peak_tflops, train_flops
from maxtext_like.checkpoint.store.best_steps import NAME as BEST
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.checkpoint.store.tree import flatten, total_bytes
from maxtext_like.checkpoint.weight_sources import located, require_source
from maxtext_like.config.data_keys import DataConfig
from maxtext_like.config.load import Loaded
from maxtext_like.data.loader import DataSource
from maxtext_like.data.sources import source_names
from maxtext_like.errors import DoesNotFitError, ExitError, RetryableError, StoppedRunError
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
from maxtext_like.training.loop.progress import Progress, Shown
from maxtext_like.training.loop.samples import Samples
from maxtext_like.training.loop.screens import duration
from maxtext_like.training.loop.signals import StopAsked, StopRequest
from maxtext_like.training.loop.spikes import Spikes
from maxtext_like.training.loop.stepper import Stepper
from maxtext_like.training.loop.watchdog import Watchdog
from maxtext_like.training.run import provenance, report, resolve_tokenizer, resume_state
from maxtext_like.training.run.banner import cut_conversations, introduction, never_evaluated, passes, shares
from maxtext_like.training.run.batches import Begun, counted, open_data
from maxtext_like.training.run.preflight import finished_line, run_directory
from maxtext_like.training.run.process_group import join
from maxtext_like.training.run.restarts import Restarts
from maxtext_like.training.run.run_checkpoints import finished, newest_begun, open_manager, open_mirror
from maxtext_like.training.run.run_directory import RunDirectory
from maxtext_like.training.run.start import Start, prepare
from maxtext_like.training.sinks.metrics import METRICS, SAMPLES, by_step, read
from maxtext_like.training.sinks.run_files import NoFiles, RunFiles
from maxtext_like.training.sinks.trackers import Tracked, trackers
from maxtext_like.training.step.program import TrainProgram, make_program

# What a runtime says of a device that is lost or broken, or a peer that is gone; a program that is wrong says other words.
_DEVICE_FAULT = re.compile(r"(INTERNAL|UNAVAILABLE|ABORTED|DATA_LOSS|DEADLINE_EXCEEDED)\b")
REPORT = "report.html"
T = TypeVar("T")
MakeExplainer = Callable[[TrainProgram, Path | Place, Callable[[str], None]], Explainer]


def train(loaded: Loaded, explainer: MakeExplainer, shown: Shown = None) -> str:
  """Trains as configured. Returns what came of it, in a line.

  Outside the main thread, which alone hears signals, nothing asks it to stop. Where a launcher started several processes, this
  is one of them: they join here, before the first device is touched.

  Args:
    loaded: the configuration.
    explainer: of (program, directory of the run, what tells whoever waits); keeps and explains a step that ends the run,
      where ``replay_failed_step`` asks for it: ``analysis.failed_step.FailedStep``.
    shown: where the lines of the run go.

  Raises:
    ExitError: everything else that can happen; its class has the exit code.
  """
  heartbeat = join(loaded)
  stop = StopRequest(Agreement(loaded.config.watchdog.watchdog_peers_seconds) if processes.count() > 1 else None)
  hears = threading.current_thread() is threading.main_thread()
  with stop if hears else contextlib.nullcontext(), heartbeat:
    return _Run(loaded, explainer, stop, shown if processes.primary() else None, heartbeat).train()


@contextlib.contextmanager
def _stopped_at_start(stop: StopRequest) -> Iterator[None]:
  """Gives a stop before the first step its exit code, by which starts are counted."""
  try:
    yield
  except StopAsked:
    raise stop.error_at_start() from None


@dataclass
class _Opened:
  """What a run has open before its first step."""

  program: TrainProgram
  begun: int  # finished steps of the newest checkpoint
  need: memory.MemoryEstimate
  limit: memory.Limit | None
  settings: DataConfig
  data: DataSource
  held_out: dict[str, DataSource]
  samples: Samples | None
  manager: CheckpointManager | None


class _Run:
  """One life of a run: its parts, entered one after the other, and left in the opposite order."""

  def __init__(self, loaded: Loaded, explainer: MakeExplainer, stop: StopRequest, shown: Shown, heartbeat: Heartbeat):
    self._loaded, self._config, self._explainer, self._stop = loaded, loaded.config, explainer, stop
    self._heartbeat, self._peers_seconds = heartbeat, loaded.config.watchdog.watchdog_peers_seconds
    self._goodput, self._began = Goodput(), time.monotonic()
    self._directory: RunDirectory = run_directory(self._config)
    self._watchdog = Watchdog(self._config.watchdog.limits())
    self._progress = Progress(self._config.training.steps or 0, self._config.logging.log_interval, shown)
    self._stack = contextlib.ExitStack()
    self._thread = threading.get_ident()

  def train(self) -> str:
    """From the first check to the last line."""
    c, watchdog, progress, directory = self._config, self._watchdog, self._progress, self._directory
    use_compilation_cache(c.logging.compilation_cache_dir)
    if c.checkpoint.init_from is not None:
      require_source(located(c.checkpoint.init_from))
    with self._stack as stack:
      stack.enter_context(watchdog)
      watchdog.stop = self._stop
      starting = stack.enter_context(contextlib.ExitStack())
      starting.enter_context(watchdog.watch("compile", "the start"))
      stack.enter_context(progress)
      # Made here, and gone again where nothing is left in it, as after a refusal.
      directory.require_shared(processes.from_primary(lambda: stack.enter_context(directory).holder, self._peers_seconds))
      if processes.primary():
        watchdog.directory = directory.path
      if c.checkpoint.enable_checkpointing:  # before all that can fail at each start
        newest = resume_state.newest_saved(directory.path, directory.checkpoints)
        restarts = Restarts(directory, newest, c.watchdog.max_restarts_without_progress)
        processes.on_primary(lambda: stack.enter_context(restarts), self._peers_seconds)
      stack.enter_context(_stopped_at_start(self._stop))
      with progress.waiting("building the model and opening the data"):
        opened = self._open()
      if (finished := self._first(lambda: self._look_at_checkpoints(opened))) is not None:
        progress.say(finished)
        return finished
      stack.callback(watchdog.leave)
      progress.say(introduction(opened.program, directory.shown, opened.need, opened.limit))
      if opened.data.rows is not None:
        progress.say(passes(opened.program, opened.data, opened.begun))
      if opened.data.documents:
        held_out = {name: source.documents[name] for name, source in opened.held_out.items()}
        progress.say(shares(opened.data.documents, held_out, opened.settings))
      if (line := never_evaluated(opened.program.config)) is not None:
        progress.say(line)
      if chat := opened.data.identity.get("chat"):
        progress.say(f"chat    template {chat['template']}, train_on={chat['train_on']}")
      with self._device_faults(opened):
        loop, page, start = self._make_loop(opened)
        # Process 0 opens the files of the run meanwhile.
        self._stop.interruptible(lambda: processes.barrier("start", watchdog.limit("compile")))
        starting.close()
        unwritten = self._loop_to_its_end(loop, page, start)
      progress.say(f"time    {summary(self._goodput.to_json())}\n{page.outcome}")
      if not any(line.startswith(REPORT) for line in unwritten):
        progress.say(f"{directory.shown}/{REPORT}")
      return page.outcome

  def _first(self, make: Callable[[], T], seconds: float | None = None) -> T:
    """What process 0 makes, in all; the others leave the wait for it when they are to stop."""
    ask = lambda: processes.from_primary(make, seconds or self._peers_seconds)
    return ask() if processes.primary() else self._stop.interruptible(ask)

  def _open(self) -> _Opened:
    """Puts the program together, and opens the data, which make their first batch, before anything of the run is written."""
    c, watchdog, stop, stack = self._config, self._watchdog, self._stop, self._stack
    program = stop.interruptible(lambda: make_program(c))
    need, limit = memory.require_fit(program, memory.activation_bytes(program))
    watchdog.state_bytes = total_bytes(flatten(program.abstract_stored))
    with watchdog.watch("read", "bringing a step back from the mirror"):  # before the data, for it brings a tokenizer along
      mirrors = []
      self._first(lambda: mirrors.append(open_mirror(c, self._directory, self._progress)), watchdog.limit("read"))
    settings = resolve_tokenizer.resolve(c.data, c.checkpoint, self._directory.checkpoints)
    # A first look at every record may take longer than a start: it counts as long as it gets on.
    alive = lambda: watchdog.again(thread=self._thread)

    def open_split(split: str, source: str | None = None) -> DataSource:
      opened = stop.interruptible(lambda: open_data(program, split, settings, alive, stop.check, source))
      return stack.enter_context(contextlib.closing(opened))

    data = open_split("train")
    newest = None if data.rows is None else self._first(lambda: newest_begun(self._directory, c.checkpoint))
    begun = None if newest is None else Begun(**newest)
    program = stop.interruptible(lambda: counted(program, data, begun))
    self._config = c = program.config
    self._progress.last_step = c.training.last_step
    held_out = {name: open_split("eval", name) for name in source_names(settings, "eval") if settings.eval_interval}
    identities = {"train data": data.identity}
    identities |= {f"eval data{f' of {name}' * bool(name)}": source.identity for name, source in held_out.items()}
    # One may have to look at every record first.
    stop.interruptible(lambda: processes.require_same(identities, watchdog.limit("compile")))
    samples = None
    if c.logging.sample_every:
      assert data.tokenizer is not None, "synthetic data, which rules.py refuses"
      samples = Samples(program, data.tokenizer, self._progress.say)
    self._first(lambda: resume_state.look(self._directory.path, self._directory.checkpoints).require(c.checkpoint))
    manager = None
    if c.checkpoint.enable_checkpointing:
      manager = stack.enter_context(open_manager(c, self._directory, data, watchdog, next(iter(mirrors), None)))
    return _Opened(program, begun.step if begun else 0, need, limit, settings, data, held_out, samples, manager)

  def _look_at_checkpoints(self, opened: _Opened) -> str | None:
    """Judges the steps that are there. The line that says that the run is finished; None: there is work to do."""
    manager, path = opened.manager, self._directory.path
    if manager is None:
      return None
    if (done := finished(opened.program, manager)) is not None:
      return finished_line(self._directory.shown, *done, self._config)
    if (newest := manager.latest_complete()) is not None:
      resolve_tokenizer.require_same(manager.directory / str(newest), opened.data)
    manager.preflight(opened.program.abstract_stored)
    if (gone := resume_state.gone_step(path, self._directory.checkpoints, newest)) is not None:
      self._progress.say(f"note    step {gone} was saved and is gone, the run goes on from step {newest}")
    resume_state.remember_newest(path, newest, self._directory.fence)
    return None

  def _make_loop(self, opened: _Opened) -> tuple[Loop, "_Page", int]:
    """The loop with its state, what the report is made of, and the number of finished steps."""
    c, program, directory, say = self._config, opened.program, self._directory, self._progress.say
    spikes = Spikes(c.training) if c.training.spike_factor else None
    watched = c.checkpoint.keep_best or c.training.early_stopping_patience
    best = Best.of(c.training) if watched else None
    divergence = Divergence(c)
    begun: Start = self._stop.interruptible(lambda: prepare(
      program, opened.manager, opened.data, self._progress, self._goodput, spikes, best, divergence,
      lambda what: self._watchdog.watch("read", what, thread=self._thread),
    ))  # fmt: skip
    files: RunFiles = NoFiles()
    if processes.primary():
      files = RunFiles(
        directory.path,
        tensorboard=c.logging.enable_tensorboard,
        step=begun.step,
        require_held=directory.require_held,
        fence=directory.fence,
        trackers=trackers(c.logging, Tracked.of(directory.path, c)),
      )
    self._stack.enter_context(files)
    self._goodput.go_on(directory.path, sum(row.get("step_seconds") or 0.0 for row in files.again))
    config_yaml = self._loaded.to_yaml(mask=True)
    if processes.primary():
      directory.keep_earlier("config.yml", config_yaml)
    files.text("config.yml", config_yaml)
    used = {"kernels": [use.to_json() for use in program.model.kernels], "grouped_product": program.model.grouped_product}
    used["norm_kernel"] = program.model.norms
    env = masked_values(provenance.describe() | used)
    files.text("env.json", json.dumps(env, indent=1) + "\n")
    evaluate = None
    if opened.held_out:
      evaluate = Evaluation(program, opened.held_out, self._progress, self._stop, self._goodput, self._watchdog)
    profiled = c.logging.profile_steps
    guard = FinitenessGuard(c, program.labels, program.state_labels, c.training.last_step, program.step.untouched)
    loop = Loop(
      program=program,
      stepper=Stepper(program, begun.train_step, begun.look),
      state=begun.state,
      base=begun.base,
      data=opened.data,
      evaluate=evaluate,
      sample=opened.samples,
      manager=opened.manager,
      files=files,
      progress=self._progress,
      stop=self._stop,
      guard=guard,
      flops=train_flops(
        program.model.decoder, program.spec, program.selection, program.global_batch, c.training.max_target_length
      ),
      peak_tflops=peak_tflops(program.model.devices[0].device_kind, c.precision.dtype),
      failed=self._explainer(program, directory.home, say) if c.training.replay_failed_step else None,
      watchdog=self._watchdog,
      goodput=self._goodput,
      spikes=spikes,
      best=best,
      divergence=divergence,
      moved=MovedWeights(program, begun.step),
      profile=Profile(profiled, directory.path, say, traces=processes.primary()) if profiled else None,
    )
    return loop, _Page(directory.path, guard, config_yaml, env), begun.step

  def _loop_to_its_end(self, loop: Loop, page: "_Page", start: int) -> list[str]:
    """Trains, and writes the report whatever becomes of it. Returns a line for each file that could not be written."""
    begin, steps = time.monotonic(), self._config.training.last_step
    outcome = "interrupted by an error of the program"
    try:
      self._progress.begin(start)
      loop.run(start)
      self._heartbeat.leave()
      done = steps if loop.stopped_early is None else loop.finished
      how = f"{steps:,} steps" if loop.stopped_early is None else f"{loop.stopped_early}; {done:,} steps"
      how += f", {done - start:,} of them since this start" if start else ""
      whole = duration(time.monotonic() - self._began)
      outcome = f"finished: {how}; {duration(time.monotonic() - begin)} of training, {whole} with start and compilation"
      if (best := loop.best) is not None and best.step is not None and self._config.checkpoint.keep_best:
        self._progress.say(f"best    eval loss {best.loss:.4f} after step {best.step}, in {self._directory.checkpoints / BEST}")
    except ExitError as error:
      if isinstance(error, StoppedRunError) or not isinstance(error, RetryableError):  # all end so, or have nothing to wait for
        self._heartbeat.leave()
      outcome = str(error) if isinstance(error, StoppedRunError) else f"stopped: {error}"
      raise
    finally:
      self._watchdog.leave()
      if (line := cut_conversations(loop.data.counts(), self._config)) is not None:
        self._progress.say(line)
      loop.write_goodput()
      page.outcome, page.goodput, page.output = masked(outcome), self._goodput.to_json(), self._progress.unwritten
      unwritten = loop.files.end(REPORT, page.render)
      for line in unwritten:
        self._progress.say(line)
    return unwritten

  @contextlib.contextmanager
  def _device_faults(self, opened: _Opened) -> Iterator[None]:
    """Gives what the runtime raises its meaning, and with it an exit code."""
    try:
      yield
    except jax.errors.JaxRuntimeError as error:
      self._heartbeat.wait_for_verdict()  # a process that is lost shows first as a collective that fails
      first = str(error).strip().splitlines()[0]
      if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
        raise DoesNotFitError(
          f"out of memory: {first}\nestimated for each device:\n{memory.table(opened.need, opened.limit)}\n"
          f"{memory.remedies(opened.program, opened.need, opened.limit)}"
        ) from error
      if not self._stop.training or not _DEVICE_FAULT.match(str(error)):
        raise
      raise RetryableError(f"the device failed: {first}; the same command goes on") from error


@dataclass
class _Page:
  """What report.html is made of, when all else is written."""

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
