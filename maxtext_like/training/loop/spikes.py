"""Spikes of the loss: which step is one, how often the run went back for one, and which data it left out."""

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
    step: its number.
    loss: of the step.
    median: of the losses before.
    back_to: the checkpoint that the run went back to; None: there was none, so it went on.
    batches: that were left out.
    documents: read before the first of them, and after the last one.
  """

  step: int
  loss: float
  median: float
  back_to: int | None = None
  batches: int = 0
  documents: tuple[int, int] = (0, 0)

  def __str__(self) -> str:
    return f"step {self.step}: loss {self.loss:.4g}, where the median before it is {self.median:.4g}"


class Spikes:
  """Watches the losses of a run.

  A step is a spike when its loss is more than ``spike_factor`` times the median of the last ``spike_window`` losses, as many
  of which there must be: those of the steps before it whose updates were taken over. What happened to steps that were gone
  back over counts in no window: the losses are those of the checkpoint, which keeps them, so that a run that was stopped
  and goes on does as one that was not.

  Args:
    training: the ``training:`` section.

  Attributes:
    found: every spike so far, oldest first.
    documents: read when the newest checkpoint was made, or the run begun.
  """

  def __init__(self, training: TrainingConfig):
    self._factor, self._limit = training.spike_factor, training.max_spike_rollbacks
    self._losses: deque[float] = deque(maxlen=training.spike_window)
    self.found: list[Spike] = []
    self.documents = 0

  @property
  def rollbacks(self) -> int:
    """How often the run went back."""
    return sum(spike.back_to is not None for spike in self.found)

  def look(self, step: int, loss: float) -> Spike | None:
    """Takes note of a step's loss, or returns the step as a spike, of which no note is taken."""
    if len(self._losses) == self._losses.maxlen:
      median = statistics.median(self._losses)
      if loss > self._factor * median:
        return Spike(step, loss, median)
    self._losses.append(loss)
    return None

  def more_batches(self, spike: Spike, back_to: int) -> int:
    """How many batches after that of the spike are left out too: none the first time at a checkpoint, then one window of
    batches, then three, seven, ...: bad data come in stretches.

    Raises:
      NoProgressError: the run went back to that checkpoint ``max_spike_rollbacks`` times already.
    """
    times = self._times(back_to)
    if times >= self._limit:
      raise NoProgressError(
        f"{spike}: the run went back to step {back_to} {times} times already (max_spike_rollbacks), and other data did not "
        "help\n  fix: a lower learning_rate, a look at the data, or a higher spike_factor; the same command goes on from "
        f"step {back_to}"
      )
    return (2**times - 1) * (self._losses.maxlen or 0)

  def add(self, spike: Spike) -> str:
    """Enters a spike; returns what to tell about it."""
    self.found.append(spike)
    if spike.back_to is None:
      self._losses.append(spike.loss)
      return f"{spike}; there is no checkpoint to go back to yet, so the run goes on"
    first, last = spike.documents
    return (
      f"{spike}; back to step {spike.back_to}, without the {spike.batches} batches since then: documents {first + 1} to "
      f"{max(last, first + 1)} in the order of reading (time {self._times(spike.back_to)} of {self._limit} to this step)"
    )

  def _times(self, back_to: int) -> int:
    return sum(s.back_to == back_to for s in self.found)

  def get_state(self) -> dict[str, Any]:
    """What a checkpoint keeps."""
    return {"losses": list(self._losses), "found": self.to_json(), "documents": self.documents}

  def set_state(self, state: dict[str, Any] | None, *, found: bool = True) -> None:
    """Goes on as a checkpoint had it; None: from one that kept nothing.

    Args:
      state: of ``get_state``.
      found: the spikes too; False where the run went back to it and remembers them.
    """
    self._losses.clear()
    if state is None:
      return
    self._losses.extend(state["losses"])
    self.documents = state["documents"]
    if found:
      self.found = [Spike(**spike | {"documents": tuple(spike["documents"])}) for spike in state["found"]]

  def to_json(self) -> list[dict[str, Any]]:
    """The spikes, for ``spikes.json``."""
    return [asdict(spike) for spike in self.found]
