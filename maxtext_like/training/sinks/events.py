"""TensorBoard: the numbers of metrics.jsonl as event files.

Only the format is tensorboardX's. Its own writer hands events to a thread through a short queue; that thread ends at the
first error, and then the queue is full for ever and whoever logs waits with it.
"""

import math
import os
import platform
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from maxtext_like.training.sinks.appended import AppendedFile
from maxtext_like.training.sinks.metrics import Row

DIRECTORY = "tensorboard"
_PERF = ("step_seconds", "tokens_per_second", "data_seconds", "tflops_per_device", "mfu", "memory_gb", "memory_peak_gb")
_TAGS = {"eval_loss": "eval/loss", "eval_perplexity": "eval/perplexity"} | {name: f"perf/{name}" for name in _PERF}


class Events:
  """One event file, made with its first row.

  Args:
    directory: of the run.
    step: finished steps when the run starts or goes on; TensorBoard then forgets what it has of later ones.
  """

  def __init__(self, directory: Path, step: int):
    self._directory, self._step = directory / DIRECTORY, step
    self._file: AppendedFile | None = None

  def forget(self, step: int) -> None:
    """TensorBoard forgets what it has of steps after ``step``. Raises OSError as ``write``."""
    if self._file is None:
      self._step = step
      return
    self._file.append(_start(step))

  def write(self, row: Row) -> None:
    """A finite row (``metrics.finite``) as one event. Raises OSError as ``AppendedFile.append``."""
    # Here and not at the top: the import takes a third of a second, and the first step is done by now.
    from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

    now = time.time()
    self._directory.mkdir(exist_ok=True)
    if self._file is None:
      header = _record(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
      if self._step:
        header += _start(self._step)
      name = f"events.out.tfevents.{now:.0f}.{platform.node()}.{os.getpid()}"
      self._file = AppendedFile(self._directory / name, header)
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=number) for tag, number in scalars(row)])
    self._file.append(_record(Event(wall_time=now, step=row["step"], summary=summary).SerializeToString()))


def scalars(row: Row) -> Iterator[tuple[str, float]]:
  """(tag, number) of a row, in groups train/, eval/, perf/ and numerics/; a list has a tag for each layer, null has none."""
  for name, value in row.items():
    if name == "step":
      continue
    tag = (
      name
      if name.startswith("numerics/")
      else _TAGS.get(name, f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}")
    )
    layers = {f"{tag}/layer_{i:02d}": v for i, v in enumerate(value)} if isinstance(value, list) else {tag: value}
    yield from ((tag, number) for tag, number in layers.items() if number is not None)
  loss = row.get("cross_entropy", row.get("loss"))  # beside other terms the loss is not the cross entropy
  if loss is not None and loss < 700:  # e^700 is near float64's limit
    yield "train/perplexity", math.exp(loss)


def _start(step: int) -> bytes:
  """The event at which TensorBoard forgets what comes after ``step``."""
  from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]

  start = SessionLog(status=SessionLog.START)
  return _record(Event(wall_time=time.time(), step=step + 1, session_log=start).SerializeToString())


def _record(event: bytes) -> bytes:
  """An event as TFRecord has it: its length and its bytes, each with a checksum."""
  from tensorboardX.record_writer import masked_crc32c

  length = struct.pack("<Q", len(event))
  return length + struct.pack("<I", masked_crc32c(length)) + event + struct.pack("<I", masked_crc32c(event))
