"""A step from its launch on the device to its row of metrics.jsonl."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext_like.capacity import memory
from maxtext_like.training.sinks.metrics import Row
from maxtext_like.training.step import update_retention
from maxtext_like.training.step.program import TrainProgram
from maxtext_like.training.step.train_step import Metrics


@dataclass(frozen=True)
class LaunchedStep:
  """A step that the device works on.

  Attributes:
    step: number of the step, starting at 1.
    metrics: its metrics; reading them waits for its end.
    batch: its batch.
    end: time of its end, in seconds of ``time.perf_counter``.
    drawn: when the host began and ended to wait for the batch, in the same seconds.
    read: how far the data were read when the batch was drawn, as ``DataSource.progress`` says.
    position: state of the data after its batch; None if the run never goes back.
  """

  step: int
  metrics: Metrics
  batch: Any
  end: Future[float]
  drawn: tuple[float, float]
  read: dict[str, float]
  position: dict[str, Any] | None

  def starved(self, begin: float, seconds: float) -> float:
    """Seconds of the step in which the device waited for the batch: the host may also wait while the device is busy."""
    return min(max(0.0, self.drawn[1] - max(self.drawn[0], begin)), seconds)

  def row(
    self,
    program: TrainProgram,
    host: dict[str, Any],
    seconds: float,
    starved: float,
    *,
    flops: float,
    peak_tflops: float | None,
  ) -> tuple[Row, dict[str, float]]:
    """The row of the step, and its metrics as Python numbers.

    Args:
      program: program of the run.
      host: metrics as NumPy arrays, without flags.
      seconds: that the step took.
      starved: seconds of them without a batch.
      flops: of one step on all devices.
      peak_tflops: of one device; None: the row has no mfu.
    """
    logging = program.config.logging
    by_layer = {name: host.pop(name).tolist() for name in [n for n in host if n.startswith("numerics/")]}
    survival = host.pop(update_retention.NAME, None)
    # Whole numbers stay whole: a count is not 1024.0.
    scalars = {k: float(v) if np.issubdtype(v.dtype, np.floating) else int(v) for k, v in host.items()}
    row: Row = {"step": self.step} | scalars | {"step_seconds": seconds, "tokens_per_second": scalars["tokens"] / seconds}
    row["data_seconds"] = starved
    row["tflops_per_device"] = flops / program.model.mesh.size / seconds / 1e12
    if peak_tflops:
      row["mfu"] = row["tflops_per_device"] / peak_tflops
    row |= memory.in_use(program.model.devices)
    row |= self.read
    if logging.numerics_every and self.step % logging.numerics_every == 0:
      row |= by_layer
    if survival is not None and self.step % logging.update_survival_every == 0 and not scalars["skipped"]:
      row |= update_retention.metrics(survival, program.labels)
    return row, scalars
