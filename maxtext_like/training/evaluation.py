"""The held-out loss of a run."""

from typing import Any

import jax
import numpy as np

from maxtext_like.data.loader import DataSource
from maxtext_like.training.goodput import Goodput
from maxtext_like.training.program import TrainProgram
from maxtext_like.training.progress import Progress, compile_notice
from maxtext_like.training.signals import StopAsked, StopRequest
from maxtext_like.training.watchdog import Watchdog


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
        with self._goodput.phase("compile"), compile_notice(self._progress):
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
