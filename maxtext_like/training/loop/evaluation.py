"""Computes the evaluation loss of a run."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from maxtext_like.data.loader import DataSource
from maxtext_like.sharding import processes
from maxtext_like.training.loop.goodput import Goodput
from maxtext_like.training.loop.progress import Progress
from maxtext_like.training.loop.signals import StopRequest, StopRequested
from maxtext_like.training.loop.watchdog import Watchdog
from maxtext_like.training.step.program import TrainProgram


class Evaluation:
  """The mean loss over the targets of ``eval_steps`` batches of each source. The batches are the same in every evaluation."""

  def __init__(
    self,
    program: TrainProgram,
    data: Mapping[str, DataSource],
    progress: Progress,
    stop: StopRequest,
    goodput: Goodput,
    watchdog: Watchdog,
  ):
    """Args: data: by the name of its source; the name is "" for a single source."""
    self._program, self._data, self._progress = program, data, progress
    self._stop, self._goodput, self._watchdog = stop, goodput, watchdog
    self._compiled: Any = None

  def __call__(self, params: Any) -> dict[str, float] | None:
    """Compute the losses of these parameters.

    Returns:
      "eval_loss" over all targets, "eval_loss/web" over those of a source named web, and "eval_perplexity" for each, the
      exponential of each loss. None if a stop request interrupted the evaluation.
    """
    # Compile at the first evaluation. A stop request interrupts the wait.
    if self._compiled is None:
      try:
        with self._goodput.phase("compile"), self._progress.waiting("compiling the evaluation"):
          self._compiled = self._stop.interruptible(self._compile)
      except StopRequested:
        return None
    try:
      # Losses and numbers of targets of each source.
      found = {name: self._sums(params, data) for name, data in self._data.items()}
    except StopRequested:
      return None
    # Mean losses of each source, and of all targets together.
    means = {f"eval_loss/{name}": loss / max(count, 1) for name, (loss, count) in found.items() if name}
    loss, count = (sum(part) for part in zip(*found.values(), strict=True))
    losses = {"eval_loss": loss / max(count, 1)} | means
    return losses | {name.replace("loss", "perplexity", 1): perplexity(loss) for name, loss in losses.items()}

  def _compile(self) -> Any:
    compiled = self._program.lower_eval().compile()
    processes.await_compiled("the evaluation", self._program.config.watchdog.watchdog_compile_seconds)
    return compiled

  def _sums(self, params: Any, data: DataSource) -> tuple[float, int]:
    """Return the summed loss and the number of targets of one source. Raises StopRequested on a stop request."""
    # Always start from the same batch.
    sums = []
    data.reset()
    for part in range(self._program.config.data.eval_steps):
      # Each batch restarts the time limit and can be interrupted, in all processes at the same batch.
      self._watchdog.restart()
      self._stop.check_together(part)
      sums.append(self._compiled(params, self._program.place(next(data))))
      if len(sums) > 1:
        jax.block_until_ready(sums[-2])  # keeps at most two batches in device memory
    losses, counts = zip(*jax.device_get(sums), strict=True)
    return float(np.sum(losses, dtype=np.float64)), int(np.sum(counts))


def perplexity(loss: float) -> float:
  """Return the exponential of a loss; infinity beyond the range of float64."""
  return math.exp(loss) if loss < 700 else math.inf
