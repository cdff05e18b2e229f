"""Opens the data of a program, and counts the steps of a run configured by epochs."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext_like.config.data_keys import DataConfig
from maxtext_like.config.schema import CheckpointConfig
from maxtext_like.data.loader import DataSource, make_data
from maxtext_like.models.registry import FAMILIES
from maxtext_like.storage import Place
from maxtext_like.training.run import resolve_tokenizer
from maxtext_like.training.step.program import TrainProgram
from maxtext_like.training.step.train_step import Batch


def open_data(
  program: TrainProgram,
  split: Any,
  settings: DataConfig,
  alive: Callable[[], None] = lambda: None,
  waiting: Callable[[], None] = lambda: None,
  source: str | None = None,
) -> DataSource:
  """Open this process's batches of one split. Raises UserError as ``make_data`` does.

  Args:
    program: program of the run.
    split: "train" or "eval".
    settings: the ``data:`` section, with its tokenizer resolved.
    alive: called repeatedly while records are validated.
    waiting: called repeatedly while waiting for a batch; an exception from it ends the wait.
    source: name of the source to evaluate on, if there are several.
  """
  # Training draws rows for a complete update, evaluation for one forward pass.
  config = program.config
  rows = program.global_batch if split == "train" else program.microbatch
  # The batches depend on the model: its vocabulary, the length of rows, and how the mesh splits rows over processes.
  return make_data(
    settings,
    vocab_size=config.model.vocab_size,
    length=config.training.max_target_length,
    global_batch=rows,
    own_rows=program.model.own_rows(rows),
    split=split,
    source=source,
    vision=config.vision,
    stall_limit_seconds=config.watchdog.watchdog_data_seconds or float("inf"),
    lookup=program.model.decoder.cfg.lookup,
    chat_template=FAMILIES[config.model.decoder_block].chat_template(config.model),
    epochs=config.training.epochs if split == "train" else None,
    alive=alive,
    waiting=waiting,
    smaller_batch=lambda rows: smaller_batch(program, rows),
  )


def smaller_batch(program: TrainProgram, rows: int) -> tuple[str, str]:
  """Return how the size of a global batch is computed, and settings that reduce it to at most ``rows`` rows ("" for none)."""
  t, devices = program.config.training, program.model.mesh.size
  factors = f"per_device_batch_size={t.per_device_batch_size:g} x gradient_accumulation_steps={t.gradient_accumulation_steps}"
  why = f" ({factors} x {devices} device{'s' * (devices > 1)})"
  if parts := rows // program.microbatch:
    return why, f"gradient_accumulation_steps={parts}"
  # One microbatch is too large too. A row per device is the least that every mesh accepts.
  if each := rows // devices:
    return why, f"per_device_batch_size={each}" + " gradient_accumulation_steps=1" * (t.gradient_accumulation_steps > 1)
  return why, ""


@dataclass(frozen=True)
class ResumePoint:
  """The start of a resumed run: its finished steps, and the state of its training data after them."""

  step: int
  data: dict[str, Any]


def with_counted_steps(program: TrainProgram, data: DataSource, resume_point: ResumePoint | None = None) -> TrainProgram:
  """Return the program with its number of steps. With epochs they are as many as the rows need; the last batch is filled up.

  Steps that are already finished count as they are, whatever their batch size was.

  Raises:
    UserError: the data differ from those of ``resume_point``, and allow_data_change is false.
  """
  # The number of steps is configured directly.
  if data.rows is None:
    return program
  # Count the rows that a resumed run has not yet seen; the last step is filled up.
  step, left = 0, data.rows
  if resume_point is not None:
    step, left = (
      resume_point.step,
      data.rows_left(resume_point.data, accept_changes=program.config.checkpoint.allow_data_change) or 0,
    )
  return program.with_steps(step - (-left // program.global_batch))


def first_batch(program: TrainProgram, checkpoint: CheckpointConfig, steps: Path | Place) -> tuple[TrainProgram, Batch]:
  """Return the program with its number of steps, and the first training batch as global arrays.

  Args:
    program: program whose step takes the batch.
    checkpoint: the ``checkpoint:`` section, which decides about the tokenizer.
    steps: directory of the run's steps, which may contain a tokenizer; need not exist.

  Raises:
    UserError: as ``open_data``.
  """
  # The tokenizer may come from a checkpoint.
  settings = resolve_tokenizer.resolve(program.config.data, checkpoint, steps)
  with contextlib.closing(open_data(program, "train", settings)) as data:
    return with_counted_steps(program, data), program.place(next(data))
