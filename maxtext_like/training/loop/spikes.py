"""Loss spikes: detects them, counts the rollbacks to a checkpoint, and records which data were skipped."""

import statistics
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.errors import NoProgressError

FILE_NAME = "spikes.json"
EXTRA = "spikes"  # name in a checkpoint's extra values


@dataclass(frozen=True)
class Spike:
  """A step whose loss was too high.

  Attributes:
    step: number of the step.
    loss: its loss.
    median: median of the losses before it.
    back_to: step of the checkpoint that was restored; None if there was none and training continued.
    batches: number of skipped batches.
    documents: number of documents read before the first skipped batch and after the last one.
  """

  step: int
  loss: float
  median: float
  back_to: int | None = None
  batches: int = 0
  documents: tuple[int, int] = (0, 0)

  def __str__(self) -> str:
    return f"step {self.step}: loss {self.loss:.4g} is a spike (median of the losses before it: {self.median:.4g})"


class Spikes:
  """Detects loss spikes of a run.

  A step is a spike if its loss is more than ``spike_factor`` times the median of the last ``spike_window`` losses of steps
  whose updates were applied. There are no spikes before the window is full. The window is part of every checkpoint and is
  restored with it, so steps that were rolled back do not count, and a resumed run behaves like an uninterrupted one.

  Args:
    training: the ``training:`` section.

  Attributes:
    found: every spike so far, oldest first.
    documents: number of documents read when the newest checkpoint was made, or when the run started.
  """

  def __init__(self, training: TrainingConfig):
    self._factor, self._limit = training.spike_factor, training.max_spike_rollbacks
    self._losses: deque[float] = deque(maxlen=training.spike_window)
    self.found: list[Spike] = []
    self.documents = 0

  @property
  def rollbacks(self) -> int:
    """Number of rollbacks to a checkpoint."""
    return sum(spike.back_to is not None for spike in self.found)

  def observe(self, step: int, loss: float) -> Spike | None:
    """Record the loss of a step. If it is a spike, return it instead of recording it."""
    # A spike is not recorded, so that it does not raise the median.
    if len(self._losses) == self._losses.maxlen:
      median = statistics.median(self._losses)
      if loss > self._factor * median:
        return Spike(step, loss, median)
    self._losses.append(loss)
    return None

  def more_batches(self, spike: Spike, back_to: int) -> int:
    """Return the number of batches to skip after that of the spike.

    It is 0 for the first rollback to a checkpoint, then one window of batches, then three, seven, and so on, because bad data
    often come in long stretches.

    Raises:
      NoProgressError: the run was already rolled back ``max_spike_rollbacks`` times to this checkpoint.
    """
    # Skip more data at each rollback to the same checkpoint.
    times = self._times(back_to)
    if times >= self._limit:
      raise NoProgressError(
        f"{spike}. The run was already rolled back to step {back_to} {times} times (max_spike_rollbacks={self._limit}), and "
        "skipping data did not help\n  fix: lower learning_rate, check the data, or raise spike_factor; the same "
        f"command resumes from step {back_to}"
      )
    return (2**times - 1) * (self._losses.maxlen or 0)

  def add(self, spike: Spike) -> str:
    """Record a spike. Return a line that describes it."""
    self.found.append(spike)
    # Training continues, so the loss counts like any other.
    if spike.back_to is None:
      self._losses.append(spike.loss)
      return f"{spike}. There is no checkpoint to roll back to yet, so training continues"
    first, last = spike.documents
    return (
      f"{spike}. Rolled back to step {spike.back_to}; the {spike.batches} batches since then are skipped: documents "
      f"{first + 1} to {max(last, first + 1)} in reading order (rollback {self._times(spike.back_to)} of {self._limit} to this "
      "step)"
    )

  def _times(self, back_to: int) -> int:
    return sum(s.back_to == back_to for s in self.found)

  def get_state(self) -> dict[str, Any]:
    """Return the state for a checkpoint."""
    return {"losses": list(self._losses), "found": self.to_json(), "documents": self.documents}

  def set_state(self, state: dict[str, Any] | None, *, found: bool = True) -> None:
    """Continue from the state of a checkpoint; None if it stored none.

    Args:
      state: result of ``get_state``.
      found: also restore the recorded spikes; False after a rollback, which must not forget them.
    """
    # The window is that of the checkpoint.
    self._losses.clear()
    if state is None:
      return
    self._losses.extend(state["losses"])
    self.documents = state["documents"]
    if found:
      self.found = [Spike(**spike | {"documents": tuple(spike["documents"])}) for spike in state["found"]]

  def to_json(self) -> list[dict[str, Any]]:
    """Return the recorded spikes, for ``spikes.json``."""
    return [asdict(spike) for spike in self.found]
