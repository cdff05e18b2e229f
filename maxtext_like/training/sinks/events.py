"""TensorBoard: writes the rows of metrics.jsonl to event files."""

import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from maxtext_like.training.sinks import event_format
from maxtext_like.training.sinks.appended import AppendedFile
from maxtext_like.training.sinks.metrics import Row

DIRECTORY = "tensorboard"
_PERF = ("step_seconds", "tokens_per_second", "data_seconds", "tflops_per_device", "mfu", "memory_gb", "memory_peak_gb")
_TAGS = {"eval_loss": "eval/loss", "eval_perplexity": "eval/perplexity"} | {name: f"perf/{name}" for name in _PERF}


class Events:
  """One event file, created with its first row.

  Args:
    directory: directory of the run.
    step: finished steps when the run starts or resumes. TensorBoard then discards its data of later steps.
  """

  def __init__(self, directory: Path, step: int):
    self._directory, self._step = directory / DIRECTORY, step
    self._file: AppendedFile | None = None

  def forget(self, step: int) -> None:
    """Make TensorBoard discard its data of steps after ``step``. Raises OSError as ``write`` does."""
    if self._file is None:
      self._step = step
      return
    self._file.append(_start(step))

  def write(self, row: Row) -> None:
    """Write a finite row (``metrics.finite``) as one event. Raises OSError as ``AppendedFile.append`` does."""
    now = time.time()
    self._directory.mkdir(exist_ok=True)
    if self._file is None:
      header = event_format.record(event_format.file_version(now))
      if self._step:
        header += _start(self._step)
      name = f"events.out.tfevents.{now:.0f}.{platform.node()}.{os.getpid()}"
      self._file = AppendedFile(self._directory / name, header)
    self._file.append(event_format.record(event_format.scalars(now, row["step"], scalars(row))))


def scalars(row: Row) -> Iterator[tuple[str, float]]:
  """Yield (tag, number) of a row, in groups train/, eval/, perf/ and numerics/. A list has a tag for each layer; null values
  are skipped."""
  for name, value in row.items():
    if name == "step":
      continue
    tag = (
      name
      if name.startswith("numerics/")
      else _TAGS.get(name, f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}")
    )
    # One tag per layer, sorted by number.
    layers = {f"{tag}/layer_{i:02d}": v for i, v in enumerate(value)} if isinstance(value, list) else {tag: value}
    yield from ((tag, number) for tag, number in layers.items() if number is not None)
  loss = row.get("cross_entropy", row.get("loss"))  # if there are other terms, the loss is not the cross entropy
  if loss is not None and loss < 700:  # e^700 is near float64's limit
    yield "train/perplexity", math.exp(loss)


def _start(step: int) -> bytes:
  """Return the event that makes TensorBoard discard its data after ``step``."""
  return event_format.record(event_format.session_start(time.time(), step + 1))
