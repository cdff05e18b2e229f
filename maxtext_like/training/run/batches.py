"""The batches of a program, from the data that its configuration names."""

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
  """This process's batches of one split. Raises UserError as ``make_data`` does.

  Args:
    program: of the run.
    split: "train" or "eval".
    settings: the ``data:`` section, with its tokenizer resolved.
    alive: called now and then while every record is looked at.
    waiting: called now and then while a batch does not come; what it raises ends the wait.
    source: which of several to evaluate on.
  """
  config = program.config
  rows = program.global_batch if split == "train" else program.microbatch
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
  )


@dataclass(frozen=True)
class Begun:
  """A run that goes on: its finished steps, and the state of its training data behind them."""

  step: int
  data: dict[str, Any]


def counted(program: TrainProgram, data: DataSource, begun: Begun | None = None) -> TrainProgram:
  """The program with the number of its steps: of a run by epochs as many as its data's rows take, the last one filled up.

  What was trained before counts as it was, whatever its batches were.

  Raises:
    UserError: the data are not those of ``begun``, and allow_data_change is false.
  """
  if data.rows is None:
    return program
  step, left = 0, data.rows
  if begun is not None:
    step, left = begun.step, data.rows_left(begun.data, accept_changes=program.config.checkpoint.allow_data_change) or 0
  return program.with_steps(step - (-left // program.global_batch))


def first_batch(program: TrainProgram, checkpoint: CheckpointConfig, steps: Path | Place) -> tuple[TrainProgram, Batch]:
  """The program with the number of its steps, and the first batch of the training data, as global arrays.

  Args:
    program: of the step that takes it.
    checkpoint: the ``checkpoint:`` section, which says where the tokenizer comes from.
    steps: the directory of the steps of a run that may have one; need not exist.

  Raises:
    UserError: as ``open_data``.
  """
  settings = resolve_tokenizer.resolve(program.config.data, checkpoint, steps)
  with contextlib.closing(open_data(program, "train", settings)) as data:
    return counted(program, data), program.place(next(data))
