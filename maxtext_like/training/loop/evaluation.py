"""The held-out loss of a run."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from maxtext_like.data.loader import DataSource
from maxtext_like.sharding import processes
from maxtext_like.training.loop.goodput import Goodput
from maxtext_like.training.loop.progress import Progress
from maxtext_like.training.loop.signals import StopAsked, StopRequest
from maxtext_like.training.loop.watchdog import Watchdog
from maxtext_like.training.step.program import TrainProgram


class Evaluation:
  """The held-out loss: the mean over the real targets of ``eval_steps`` batches, always the same ones, of each source."""

  def __init__(
    self,
    program: TrainProgram,
    data: Mapping[str, DataSource],
    progress: Progress,
    stop: StopRequest,
    goodput: Goodput,
    watchdog: Watchdog,
  ):
    """``data``: by the name of its source; "" where there are no several."""
    self._program, self._data, self._progress = program, data, progress
    self._stop, self._goodput, self._watchdog = stop, goodput, watchdog
    self._compiled: Any = None

  def __call__(self, params: Any) -> dict[str, float] | None:
    """The losses of these parameters: "eval_loss" over all targets, "eval_loss/web" over those of a source; and
    "eval_perplexity" likewise, the exponential of each.

    None when a stop was asked for before they were there.
    """
    if self._compiled is None:
      try:
        with self._goodput.phase("compile"), self._progress.waiting("compiling the evaluation"):
          self._compiled = self._stop.interruptible(self._compile)
      except StopAsked:
        return None
    try:
      found = {name: self._sums(params, data) for name, data in self._data.items()}
    except StopAsked:
      return None
    means = {f"eval_loss/{name}": loss / max(count, 1) for name, (loss, count) in found.items() if name}
    loss, count = (sum(part) for part in zip(*found.values(), strict=True))
    losses = {"eval_loss": loss / max(count, 1)} | means
    return losses | {name.replace("loss", "perplexity", 1): perplexity(loss) for name, loss in losses.items()}

  def _compile(self) -> Any:
    compiled = self._program.lower_eval().compile()
    processes.await_compiled("the evaluation", self._program.config.watchdog.watchdog_compile_seconds)
    return compiled

  def _sums(self, params: Any, data: DataSource) -> tuple[float, int]:
    """Losses and targets of one source, added up. StopAsked where a stop was asked for."""
    sums = []
    data.reset()
    for part in range(self._program.config.data.eval_steps):
      self._watchdog.again()
      self._stop.check_together(part)
      sums.append(self._compiled(params, self._program.place(next(data))))
      if len(sums) > 1:
        jax.block_until_ready(sums[-2])  # not all batches at once in the device's memory
    losses, counts = zip(*jax.device_get(sums), strict=True)
    return float(np.sum(losses, dtype=np.float64)), int(np.sum(counts))


def perplexity(loss: float) -> float:
  """The exponential of a loss; infinite where float64 ends."""
  return math.exp(loss) if loss < 700 else math.inf
