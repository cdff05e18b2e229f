"""Prepares the first step of this process: compiled programs, and a state that is restored, read from weights, or random."""

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_like.checkpoint.adapters.adapter_step import Base
from maxtext_like.checkpoint.adapters.init_adapter import require_base
from maxtext_like.checkpoint.compatibility import LOSS_SCALE
from maxtext_like.checkpoint.read_weights import read_weights
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.checkpoint.store.stored_state import Restored
from maxtext_like.checkpoint.weight_sources import located
from maxtext_like.config.schema import Config
from maxtext_like.data.loader import DataSource
from maxtext_like.errors import RetryableError
from maxtext_like.masking import masked
from maxtext_like.models.initial_values import saturation
from maxtext_like.sharding import processes
from maxtext_like.storage import Place
from maxtext_like.training.loop.best import EXTRA as BEST
from maxtext_like.training.loop.best import Best
from maxtext_like.training.loop.divergence import Divergence, failed_notes
from maxtext_like.training.loop.goodput import Goodput
from maxtext_like.training.loop.progress import Progress, duration
from maxtext_like.training.loop.resume_diff import changes
from maxtext_like.training.loop.spikes import EXTRA as SPIKES
from maxtext_like.training.loop.spikes import Spikes
from maxtext_like.training.run.batches import ResumePoint, with_counted_steps
from maxtext_like.training.step.initial_state import base_weights, with_given_adapter
from maxtext_like.training.step.program import TrainProgram
from maxtext_like.training.step.train_step import State

_log = logging.getLogger(__name__)
RANDOM_WEIGHTS_RATE = 1e-4
"""The lowest rate that gets a note if all loaded weights are trained. Fine-tuning with AdamW usually has 1e-6 to 5e-5."""


@dataclass
class Start:
  """Everything the loop starts with.

  Attributes:
    train_step: compiled ``TrainProgram.lower_step``.
    check: compiled ``TrainProgram.lower_check``.
    step: number of finished steps.
    state: state after these steps; None after the loop has taken it.
    base: identifies the weights below the trained adapter; None if the weights themselves are trained.
  """

  train_step: Callable[..., Any]
  check: Callable[..., Any]
  step: int
  state: State
  base: Base | None


def prepare(
  program: TrainProgram,
  manager: CheckpointManager | None,
  data: DataSource,
  progress: Progress,
  goodput: Goodput,
  spikes: Spikes | None,
  best: Best | None,
  divergence: Divergence,
  reading: Callable[[str], contextlib.AbstractContextManager[None]],
) -> Start:
  """Restore, read or initialize the state, and compile the programs.

  ``data``, ``spikes``, ``best`` and ``divergence`` continue from the restored checkpoint. Files are read inside
  ``reading(what)``, which limits the time.
  """
  begin = time.monotonic()
  c = program.config.checkpoint
  say = lambda line: progress.say(masked(line))
  # 1. Restore the newest checkpoint, and with it the position in the data.
  with ThreadPoolExecutor(1, "compile") as pool:
    with progress.waiting("reading the newest checkpoint"):
      restored = _restore(program, manager, goodput, reading)
    if restored is not None:
      for line in changes(restored, program):
        say(line)
      with goodput.phase("restore"):
        data.set_state(restored.extra["data"], accept_changes=c.allow_data_change)
        _require_counted_from(program, data, restored)
      if spikes is not None:
        spikes.set_state(restored.extra.get(SPIKES))
      if best is not None:
        best.set_state(restored.extra.get(BEST), restored.step)
      divergence.restart(restored.extra, data.identity)
      if reasons := divergence.history.reasons(restored.step):
        progress.say(f"note    the run failed before step {restored.step} and is resumed anyway: {'; '.join(reasons)}")
    say(f"weights {weights_source(program.config, None if restored is None else restored.directory)}")
    if restored is None and processes.primary() and (risk := random_weights_warning(program.config)):
      _log.warning("%s", risk)
    # 2. Read weights. This comes before compilation, so that an error appears early.
    source = c.init_from if restored is None else None
    below, base, params = None, None, None
    with goodput.phase("restore"), reading("reading weights"), progress.waiting("reading weights"):
      if restored is not None and program.adapter is not None:
        below, base = base_weights(program, restored)
      if source is not None:
        opened = lambda stored: [say(f"warning {source}: {note}") for note in failed_notes(stored)]
        params = read_weights(located(source), program.model, starts=say, opened=opened)
      if program.adapter is not None and params is not None:
        base = _below(program, params)
    # 3. Compile. XLA releases Python's lock, so the programs compile in parallel.
    cached = "" if program.config.logging.compilation_cache_dir is None else "; later starts read it from the cache"
    said = f"compile the train step is being compiled{cached}"
    with goodput.phase("compile"), progress.waiting("compiling the train step", said):
      # One thread compiles the initialization and the check, the other one the train step.
      making = None
      if restored is None:
        making = pool.submit((program.lower_init() if params is None else program.lower_around()).compile)
      checking = pool.submit(program.lower_check().compile)
      train_step = program.lower_step().compile()
      check, make = checking.result(), None if making is None else making.result()
      # Other processes may need longer. Wait here instead of in the first collective operation.
      processes.await_compiled("the start", program.config.watchdog.watchdog_compile_seconds)
      # 4. Make the state.
      if make is not None:
        state = make(*(() if params is None else (params,)), np.uint32(program.config.training.seed % 2**32))
      else:
        assert restored is not None
        step, state = restored.step, program.completed(_kept(restored, program.config), below)
      if restored is None:
        step, state = 0, with_given_adapter(program, state)
      if program.adapter is not None and base is None:
        base = _below(program, state["params"])
  # Say where the run starts.
  what = f"from step {step} in {manager.directory}" if manager is not None and restored is not None else "from step 0"
  if restored is None and source is None:
    note = saturation(program.model.decoder.layers, program.config.training.max_target_length)
    if note is not None:
      progress.say(f"warning {note}")
  elif restored is None and (note := high_rate_note(program.config)):
    progress.say(f"note    {note}")
  progress.say(f"start   {what}, compiled in {duration(time.monotonic() - begin)}")
  return Start(train_step, check, step, state, base)


def weights_source(config: Config, resumed: Path | Place | None) -> str:
  """Describe where the weights of a start come from.

  Args:
    config: configuration of the run.
    resumed: step that the run resumes from; None if it starts at step 0.
  """
  source, training, adapter = config.checkpoint.init_from, config.training, config.adapter
  given = (
    f"random, init_scheme={training.init_scheme}, seed={training.seed}" if source is None else f"from {source} (init_from)"
  )
  if resumed is not None:
    # A step of an adapter run holds only the adapter.
    return f"{given}; adapter resumed from {resumed}" if adapter.trained else f"resumed from {resumed}"
  return given + (f"; adapter from {adapter.lora_from} (lora_from)" if adapter.lora_from else "")


def random_weights_warning(config: Config) -> str | None:
  """Return a warning if a run that usually begins with trained weights begins with random ones; else None."""
  kind = "an adapter" if config.adapter.trained else "conversations" if config.data.data_format == "chat" else ""
  if config.checkpoint.init_from is not None or not kind:
    return None
  what = "is trained on top of random weights" if config.adapter.trained else "are learned from random weights"
  return (
    f"{kind} {what}: the name of a model selects only its sizes, and init_from is not set\n"
    "  fix: init_from=DIR, a run or a Hugging Face directory (nothing to change if random weights are intended)"
  )


def high_rate_note(config: Config) -> str | None:
  """Return a note if all of the loaded weights are trained at a rate that is usual for random ones; else None."""
  training, rate = config.training, config.training.learning_rate
  partly = config.adapter.trained or training.trainable_parameters_mask or config.model.trained_part
  if partly or rate < RANDOM_WEIGHTS_RATE:
    return None
  return (
    f"learning_rate={rate:g} is meant for random weights and too high for trained ones; add learning_rate=1e-5 or "
    "recipes/full.yml to the command"
  )


def _require_counted_from(program: TrainProgram, data: DataSource, restored: Restored) -> None:
  """Raise RetryableError if the newest step turned out to be damaged and an older one gives another number of steps."""
  last = with_counted_steps(program, data, ResumePoint(restored.step, restored.extra["data"])).config.training.last_step
  if last != program.config.training.last_step:
    raise RetryableError(
      f"the newest step is damaged; from step {restored.step} the epochs end at step {last}; the same command resumes the run"
    )


def _kept(restored: Restored, config: Config) -> State:
  """Return the restored state. Its loss scale is left out if ``loss_scale_init`` has changed, so that it starts again."""
  was = restored.config.get("training", {}).get("loss_scale_init")
  anew = was not in (None, config.training.loss_scale_init)
  return {name: x for name, x in restored.state.items() if not (anew and name == LOSS_SCALE)}


def _below(program: TrainProgram, params: Any) -> Base:
  """Identify the weights below a fresh adapter. Raises if an adapter from ``lora_from`` was made for other weights."""
  base = Base.of(params, program.config.checkpoint.init_from, program.config.training.seed)
  require_base(program.model, base)
  return base


def _restore(
  program: TrainProgram,
  manager: CheckpointManager | None,
  goodput: Goodput,
  reading: Callable[[str], contextlib.AbstractContextManager[None]],
) -> Restored | None:
  c = program.config.checkpoint
  if manager is None or not c.resume:
    return None
  with goodput.phase("restore"), reading("the restore"):
    return manager.restore(program.abstract_checkpoint, allow_dtype_change=c.allow_dtype_change)
