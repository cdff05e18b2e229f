"""One training run, from a loaded configuration to its exit code: checks first, then the directory, then the devices."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.checkpoint import companions, manifest, restore
from maxtext_like.checkpoint.manager import CheckpointManager
from maxtext_like.checkpoint.mirror import Mirror
from maxtext_like.checkpoint.read_weights import read_weights
from maxtext_like.checkpoint.sources import require_source
from maxtext_like.checkpoint.steps import StepDirectories
from maxtext_like.checkpoint.tree import flatten, total_bytes
from maxtext_like.config.load import Loaded
from maxtext_like.config.schema import Config, DataConfig
from maxtext_like.data.loader import DataSource, make_data
from maxtext_like.errors import DoesNotFitError, ExitError, RetryableError, StoppedRunError
from maxtext_like.layers.param import count
from maxtext_like.masking import masked
from maxtext_like.training import chosen_tokenizer, memory, provenance, standing
from maxtext_like.training.changes import changes
from maxtext_like.training.finiteness import FinitenessGuard, Report
from maxtext_like.training.first_look import finished_line, run_directory
from maxtext_like.training.flops import peak_tflops, train_flops
from maxtext_like.training.goodput import Goodput, summary
from maxtext_like.training.loop import Explainer, Loop
from maxtext_like.training.profile import Profile
from maxtext_like.training.program import TrainProgram, make_program
from maxtext_like.training.progress import Progress, duration
from maxtext_like.training.restarts import Restarts
from maxtext_like.training.run_directory import RunDirectory
from maxtext_like.training.samples import Samples
from maxtext_like.training.schedule import make_schedule
from maxtext_like.training.signals import StopAsked, StopRequest
from maxtext_like.training.sinks import report
from maxtext_like.training.sinks.metrics import METRICS, SAMPLES, read
from maxtext_like.training.sinks.run_files import RunFiles
from maxtext_like.training.spikes import EXTRA as SPIKES
from maxtext_like.training.spikes import Spikes
from maxtext_like.training.step import State
from maxtext_like.training.watchdog import Watchdog

COMPILE_NOTICE_SECONDS = 30.0
# What a runtime says of a device that is lost or broken, or a peer that is gone; a program that is wrong says other words.
_DEVICE_FAULT = re.compile(r"(INTERNAL|UNAVAILABLE|ABORTED|DATA_LOSS|DEADLINE_EXCEEDED)\b")
REPORT = "report.html"
MakeExplainer = Callable[[TrainProgram, Path, Callable[[str], None]], Explainer]
_log = logging.getLogger(__name__)


def train(loaded: Loaded, explainer: MakeExplainer) -> int:
  """Trains as configured. Returns 0.

  Args:
    loaded: the configuration.
    explainer: of (program, directory of the run, what tells whoever waits); keeps and explains a step that ends the run,
      where ``replay_failed_step`` asks for it: ``analysis.failed_step.FailedStep``.

  Raises:
    ExitError: everything else that can happen; its class has the exit code.
  """
  with StopRequest() as stop:
    _train(loaded, explainer, stop)
  return 0


@contextlib.contextmanager
def _stopped_at_start(stop: StopRequest) -> Iterator[None]:
  """Gives a stop before the first step its exit code, by which starts are counted."""
  try:
    yield
  except StopAsked:
    raise stop.error_at_start() from None


def _train(loaded: Loaded, explainer: MakeExplainer, stop: StopRequest) -> None:
  config, goodput = loaded.config, Goodput()
  use_compilation_cache(config.logging.compilation_cache_dir)
  directory = run_directory(config)
  if config.checkpoint.init_from is not None:
    require_source(Path(config.checkpoint.init_from))
  with contextlib.ExitStack() as stack:
    watchdog = stack.enter_context(Watchdog(config.watchdog.limits()))
    watchdog.stop = stop
    starting = stack.enter_context(contextlib.ExitStack())
    starting.enter_context(watchdog.watch("compile", "the start"))
    progress = stack.enter_context(Progress(config.training.steps, config.logging.log_interval))
    stack.enter_context(directory)  # made here, and gone again where nothing is left in it, as after a refusal
    watchdog.directory = directory.path
    if config.checkpoint.enable_checkpointing:  # before all that can fail at each start
      newest = standing.newest_saved(directory.path)
      stack.enter_context(Restarts(directory, newest, config.watchdog.max_restarts_without_progress))
    stack.enter_context(_stopped_at_start(stop))
    program = stop.interruptible(lambda: make_program(config))
    need, limit = memory.require_fit(program)
    watchdog.state_bytes = total_bytes(flatten(program.abstract_state))
    with watchdog.watch("read", "bringing a step back from the mirror"):
      mirror = _open_mirror(config, directory)  # before the data are opened, for a step brings its tokenizer along
    # The data are opened, and the first batch is made, before anything of the run is written.
    settings = chosen_tokenizer.resolve(config.data, config.checkpoint, directory.checkpoints)
    # A first look at every record may take longer than a start: it counts as long as it gets on.
    here = threading.get_ident()
    opened = lambda split: open_data(program, split, settings, lambda: watchdog.again(thread=here), stop.check)
    data = stack.enter_context(contextlib.closing(stop.interruptible(lambda: opened("train"))))
    held_out = None
    if settings.eval_interval:
      held_out = stack.enter_context(contextlib.closing(stop.interruptible(lambda: opened("eval"))))
    samples = None
    if config.logging.sample_every:
      assert data.tokenizer is not None, "synthetic data, which rules.py refuses"
      samples = Samples(program, data.tokenizer, progress.say)
    standing.look(directory.path).require(config.checkpoint)
    manager = None
    if config.checkpoint.enable_checkpointing:
      manager = stack.enter_context(_manager(config, directory, data, watchdog, mirror))
      if (done := finished_step(program, manager)) is not None:
        progress.say(finished_line(directory.path, done, config.training.steps))
        return
      if (newest := manager.latest_complete()) is not None:
        chosen_tokenizer.require_same(manager.directory / str(newest), data)
      manager.preflight(program.abstract_state)
      if (gone := standing.gone_step(directory.path, newest)) is not None:
        progress.say(f"note    step {gone} was saved and is gone, the run goes on from step {newest}")
      standing.remember_newest(directory.path, newest)
    stack.callback(watchdog.leave)
    _introduce(progress, program, directory, need, limit)
    if data.documents is not None:
      progress.say(f"data    {_shares(data.documents, held_out and held_out.documents, settings)}")
    try:
      spikes = Spikes(config.training) if config.training.spike_factor else None
      reading = lambda what: watchdog.watch("read", what, thread=here)
      prepare = lambda: _prepare(program, manager, data, progress, goodput, spikes, reading)
      train_step, look, start, state = stop.interruptible(prepare)
      files = stack.enter_context(
        RunFiles(directory.path, tensorboard=config.logging.enable_tensorboard, step=start, require_held=directory.require_held)
      )
      goodput.go_on(directory.path, sum(row.get("step_seconds") or 0.0 for row in files.again))
      config_yaml = masked(loaded.to_yaml())
      directory.keep_earlier("config.yml", config_yaml)
      files.text("config.yml", config_yaml)
      env = provenance.describe() | {"kernels": [use.to_json() for use in program.model.kernels]}
      files.text("env.json", json.dumps(env, indent=1) + "\n")
      guard = FinitenessGuard(config, program.labels, program.state_labels, config.training.steps)
      device = program.model.devices[0]
      rows_flops = train_flops(
        program.model.decoder, program.selection, program.global_batch, config.training.max_target_length
      )
      loop = Loop(
        program, train_step, look, state, data,
        held_out and Evaluation(program, held_out, progress, stop, goodput, watchdog), samples,
        manager, files, progress, stop, guard, rows_flops, peak_tflops(device.device_kind),
        explainer(program, directory.path, progress.say) if config.training.replay_failed_step else None,
        watchdog, goodput=goodput, spikes=spikes,
        profile=Profile(steps, directory.path, progress.say) if (steps := config.logging.profile_steps) else None,
      )  # fmt: skip
      del state
      starting.close()
      begin, outcome = time.monotonic(), "interrupted by an error of the program"
      try:
        loop.run(start)
        took = duration(time.monotonic() - begin)
        outcome = f"finished: {config.training.steps} steps, {config.training.steps - start} of them now, in {took}"
      except ExitError as error:
        outcome = str(error) if isinstance(error, StoppedRunError) else f"stopped: {error}"
        raise
      finally:
        watchdog.leave()
        loop.write_goodput()
        spent, outcome = goodput.to_json(), masked(outcome)
        page = _Page(directory.path, outcome, guard.report, config_yaml, env, spent, progress.unwritten)
        unwritten = files.end(REPORT, page.render)
        for line in unwritten:
          progress.say(line)
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
        raise _out_of_memory(error, program, need, limit) from error
      if not stop.training or not _DEVICE_FAULT.match(str(error)):
        raise
      raise RetryableError(f"the device failed: {str(error).strip().splitlines()[0]}; the same command goes on") from error
    progress.say(f"time    {summary(goodput.to_json())}\n{outcome}")
    if not any(line.startswith(REPORT) for line in unwritten):
      progress.say(str(_from_here(directory.path / REPORT)))


def use_compilation_cache(directory: str | None) -> None:
  """Keeps compiled programs between runs in ``directory``; None: not."""
  if directory is None:
    jax.config.update("jax_enable_compilation_cache", False)
    return
  path = os.path.expanduser(directory)
  try:
    os.makedirs(path, exist_ok=True)
  except OSError as error:
    _log.warning("compilation_cache_dir %s: %s; compiled programs are not kept", directory, error.strerror)
    jax.config.update("jax_enable_compilation_cache", False)
    return
  jax.config.update("jax_compilation_cache_dir", path)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def open_data(
  program: TrainProgram,
  split: Any,
  settings: DataConfig,
  alive: Callable[[], None] = lambda: None,
  waiting: Callable[[], None] = lambda: None,
) -> DataSource:
  """This process's batches of one split. Raises UserError as ``make_data`` does.

  Args:
    program: of the run.
    split: "train" or "eval".
    settings: the ``data:`` section, with its tokenizer resolved.
    alive: called now and then while every record is looked at.
    waiting: called now and then while a batch does not come; what it raises ends the wait.
  """
  config = program.config
  return make_data(
    settings,
    vocab_size=config.model.vocab_size,
    length=config.training.max_target_length,
    global_batch=program.global_batch if split == "train" else program.microbatch,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
    split=split,
    vision=config.vision,
    stall_limit_seconds=config.watchdog.watchdog_data_seconds or float("inf"),
    lookup=program.model.decoder.cfg.lookup,
    alive=alive,
    waiting=waiting,
  )


def _open_mirror(config: Config, directory: RunDirectory) -> Mirror | None:
  """The second place of the checkpoints, from which what is lost here was copied back; None: there is none.

  Raises:
    UserError, RetryableError: as ``Mirror.bring_back``.
  """
  c = config.checkpoint
  if c.checkpoint_mirror is None:
    return None
  mirror = Mirror(c.checkpoint_mirror, directory.path.name, directory.checkpoints, c.max_to_keep)
  steps = StepDirectories(directory.checkpoints, directory.exclusive)
  if (step := mirror.bring_back(steps, resume=c.resume)) is not None:
    print(f"mirror  step {step} copied back from {mirror}, its newest one; {directory.checkpoints} had none as new")
  return mirror


def _manager(
  config: Config, directory: RunDirectory, data: DataSource, watchdog: Watchdog, mirror: Mirror | None
) -> CheckpointManager:
  c = config.checkpoint

  def saved(step: int) -> None:
    directory.require_held()
    standing.remember_newest(directory.path, step)

  return CheckpointManager(
    directory.checkpoints,
    config=config,
    interval=c.checkpoint_interval,
    max_to_keep=c.max_to_keep,
    asynchronous=c.async_checkpointing,
    tokenizer=companions.of_tokenizer(data.tokenizer.files) if data.tokenizer else None,
    fence=directory.exclusive,
    saved=saved,
    watch=watchdog.watch,
    mirror=mirror,
    mirror_seconds=min(watchdog.limit("exit") / 2, 24 * 3600),
  )


def finished_step(program: TrainProgram, manager: CheckpointManager) -> int | None:
  """The newest complete step, when it is the last of the configuration or beyond; None when there is work to do.

  Raises:
    UserError: the directory belongs to another model.
  """
  newest, config = manager.latest_complete(), program.config
  if newest is None or newest < config.training.steps:
    return None
  path = manager.directory / str(newest)
  restore.check(
    path, manifest.read(path), flatten(program.abstract_state),
    config=manager.config, allow_dtype_change=config.checkpoint.allow_dtype_change,
  )  # fmt: skip
  return newest


def _from_here(path: Path) -> Path:
  here = Path.cwd()
  return path.relative_to(here) if path.is_relative_to(here) else path


def _shares(trained: int, evaluated: int | None, settings: DataConfig) -> str:
  """How many documents are for what."""
  if evaluated is None:
    unused = f"; eval_fraction={settings.eval_fraction:g} counts with eval_interval" if settings.eval_fraction else ""
    return f"{trained:,} documents train, none are held out: nothing evaluates{unused}"
  whence = "of eval_path" if settings.eval_path else f"held out: eval_fraction={settings.eval_fraction:g}"
  return f"{trained:,} documents train, {evaluated:,} evaluate ({whence})"


def _introduce(
  progress: Progress, program: TrainProgram, directory: RunDirectory, need: memory.MemoryEstimate, limit: memory.Limit | None
) -> None:
  t, p = program.config.training, program.config.precision
  total, trained = count(program.spec), count(program.selection.split(program.spec)[0])
  some = f", {trained:,} trained" if trained != total else ""
  kind = f"{p.dtype}, weights {p.weight_dtype}, {t.module_api}"
  devices = f"{program.model.mesh.size} x {program.model.devices[0].device_kind}"
  available = f" of {limit.bytes / memory.GB:.1f} GB" if limit else ""
  progress.say(
    f"model   {program.config.model.model_name}: {total:,} parameters{some}, {kind}\n"
    f"device  {devices}, about {need.total / memory.GB:.2f} GB{available} on each\n"
    f"batch   {program.global_batch} x {t.max_target_length} tokens of {program.config.data.dataset}, {t.opt_type}\n"
    f"run     {_from_here(directory.path)}"
  )
  if t.lr_schedule_steps is not None and t.lr_schedule_steps < t.steps:
    rate = float(make_schedule(t)(jnp.asarray(t.lr_schedule_steps)))
    progress.say(f"note    the schedule ends after step {t.lr_schedule_steps}: from there the learning rate stays {rate:.3g}")
  if any(use.worth_telling for use in program.model.kernels):
    progress.say("\n".join(f"kernel  {use}" for use in program.model.kernels))


def _prepare(
  program: TrainProgram,
  manager: CheckpointManager | None,
  data: DataSource,
  progress: Progress,
  goodput: Goodput,
  spikes: Spikes | None,
  reading: Callable[[str], contextlib.AbstractContextManager[None]],
) -> tuple[Callable[..., Any], Callable[..., Any], int, State]:
  """The compiled step and look, the number of finished steps, and the state: restored, from given weights, or fresh.

  What it reads is read inside ``reading(what)``.
  """
  begin = time.monotonic()
  config = program.config
  with _compile_notice(progress), ThreadPoolExecutor(1, "compile") as pool:
    restored = None
    if manager is not None and config.checkpoint.resume:
      with goodput.phase("restore"), reading("the restore"):
        restored = manager.restore(program.abstract_state, allow_dtype_change=config.checkpoint.allow_dtype_change)
    if restored is not None:
      for line in changes(restored, program):
        progress.say(masked(line))
      with goodput.phase("restore"):
        data.set_state(restored.extra["data"], accept_changes=config.checkpoint.allow_data_change)
      if spikes is not None:
        spikes.set_state(restored.extra.get(SPIKES))
    # Given weights are read first: what is wrong with them shows before minutes of compilation.
    source = config.checkpoint.init_from if restored is None else None
    with goodput.phase("restore"), reading("the reading of weights"):
      params = None if source is None else read_weights(Path(source), program.model)
    # XLA works outside Python's lock, so the programs compile side by side.
    with goodput.phase("compile"):
      initial = pool.submit(program.lower_init().compile) if restored is None and params is None else None
      looking = pool.submit(program.lower_look().compile)
      train_step = program.lower_step().compile()
      if initial is not None:
        state, start = initial.result()(np.uint32(config.training.seed % 2**32)), 0
      elif restored is None:
        state, start = program.lower_around().compile()(params), 0
      look = looking.result()
    if restored is not None:
      state, start = restored.state, restored.step
  what = f"from step {start} in {manager.directory}" if manager is not None and restored is not None else "from step 0"
  progress.say(f"start   {what}, compiled in {duration(time.monotonic() - begin)}")
  return train_step, look, start, state


@contextlib.contextmanager
def _compile_notice(progress: Progress) -> Iterator[None]:
  """A line every 30 s, so that a long compilation does not look like a hang."""
  done = threading.Event()

  def tell():
    begin = time.monotonic()
    while not done.wait(COMPILE_NOTICE_SECONDS):
      progress.say(f"still compiling the train step, {duration(time.monotonic() - begin)}")

  thread = threading.Thread(target=tell, name="compile-notice", daemon=True)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()


class Evaluation:
  """The held-out loss: the mean over the real targets of ``eval_steps`` batches, always the same ones."""

  def __init__(
    self, program: TrainProgram, data: DataSource, progress: Progress, stop: StopRequest, goodput: Goodput, watchdog: Watchdog
  ):
    self._program, self._data, self._progress = program, data, progress
    self._stop, self._goodput, self._watchdog = stop, goodput, watchdog
    self._compiled: Any = None

  def __call__(self, params: Any) -> float | None:
    """The loss of these parameters; None when a stop was asked for before it was there."""
    if self._compiled is None:
      try:
        with self._goodput.phase("compile"), _compile_notice(self._progress):
          self._compiled = self._stop.interruptible(lambda: self._program.lower_eval().compile())
      except StopAsked:
        return None
    sums = []
    try:
      self._data.reset()
      for _ in range(self._program.config.data.eval_steps):
        self._watchdog.again()
        self._stop.check()
        sums.append(self._compiled(params, self._program.place(next(self._data))))
        if len(sums) > 1:
          jax.block_until_ready(sums[-2])  # not all batches at once in the device's memory
    except StopAsked:
      return None
    losses, counts = zip(*jax.device_get(sums), strict=True)
    return float(np.sum(losses, dtype=np.float64) / max(int(np.sum(counts)), 1))


@dataclasses.dataclass
class _Page:
  """What report.html is made of, when all else is written."""

  directory: Path
  outcome: str
  finiteness: Report
  config_yaml: str
  environment: dict[str, Any]
  goodput: dict[str, Any]
  output: str | None

  def render(self, unwritten: list[str]) -> str:
    return report.render(
      name=self.directory.name,
      outcome=self.outcome,
      rows=read(self.directory / METRICS),
      samples=read(self.directory / SAMPLES),
      finiteness=self.finiteness,
      config_yaml=self.config_yaml,
      environment=self.environment,
      unwritten=[*unwritten, *([self.output] if self.output else [])],
      goodput=self.goodput,
    )


def _out_of_memory(
  error: Exception, program: TrainProgram, need: memory.MemoryEstimate, limit: memory.Limit | None
) -> DoesNotFitError:
  """The runtime's error as one with the estimate and remedies."""
  first = str(error).strip().splitlines()[0]
  return DoesNotFitError(
    f"out of memory: {first}\nestimated for each device:\n{memory.table(need, limit)}\n{memory.remedies(program, need, limit)}"
  )


logging.getLogger("absl").setLevel(logging.ERROR)
