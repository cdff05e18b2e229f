"""One launched step: its metrics on the device, and the metrics.jsonl row made from them."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext_like.capacity import memory_limits
from maxtext_like.training.sinks.metrics import Row
from maxtext_like.training.step import update_retention
from maxtext_like.training.step.program import TrainProgram
from maxtext_like.training.step.train_step import Metrics


@dataclass(frozen=True)
class LaunchedStep:
  """A step that was launched and whose metrics were not yet read.

  Attributes:
    step: number of the step, starting at 1.
    metrics: metrics on the device; reading them waits for the end of the step.
    batch: the batch of the step.
    end: time when the device finished the step, in seconds of ``time.perf_counter``.
    drawn: when the host started and stopped waiting for the batch, in the same seconds.
    read: progress through the data when the batch was drawn, see ``DataSource.progress``.
    position: state of the data after the batch; None if the run never rolls back.
  """

  step: int
  metrics: Metrics
  batch: Any
  end: Future[float]
  drawn: tuple[float, float]
  read: dict[str, float]
  position: dict[str, Any] | None

  def starved(self, begin: float, seconds: float) -> float:
    """Seconds of the step in which the device waited for the batch. Waits while the device is busy do not count."""
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
    """Make the metrics row of the step. Also returns its scalar metrics as Python numbers.

    Args:
      program: program of the run.
      host: metrics as NumPy arrays, without flags.
      seconds: duration of the step.
      starved: seconds of it without a batch.
      flops: floating-point operations of one step, summed over all devices.
      peak_tflops: peak TFLOP/s of one device; if None, the row has no mfu.
    """
    logging = program.config.logging
    # Arrays per layer are written only in some steps.
    by_layer = {name: host.pop(name).tolist() for name in [n for n in host if n.startswith("numerics/")]}
    survival = host.pop(update_retention.NAME, None)
    # Counts stay integers: 1024, not 1024.0.
    scalars = {k: float(v) if np.issubdtype(v.dtype, np.floating) else int(v) for k, v in host.items()}
    # Speed.
    row: Row = {"step": self.step} | scalars | {"step_seconds": seconds, "tokens_per_second": scalars["tokens"] / seconds}
    row["data_seconds"] = starved
    row["tflops_per_device"] = flops / program.model.mesh.size / seconds / 1e12
    if peak_tflops:
      row["mfu"] = row["tflops_per_device"] / peak_tflops
    # Memory, and the position in the data.
    row |= memory_limits.in_use(program.model.devices)
    row |= self.read
    if logging.numerics_every and self.step % logging.numerics_every == 0:
      row |= by_layer
    if survival is not None and self.step % logging.update_survival_every == 0 and not scalars["skipped"]:
      row |= update_retention.metrics(survival, program.labels)
    return row, scalars
