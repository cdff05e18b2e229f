"""The best of a run by its held-out loss: which step it was, and how long nothing has been better."""

from dataclasses import dataclass
from typing import Any

from maxtext_like.checkpoint.store.manifest import Manifest
from maxtext_like.config.training_keys import TrainingConfig

EXTRA = "best"  # name in a checkpoint's extra values


@dataclass
class Best:
  """Watches the evaluations of a run. Its state is part of every checkpoint: a run in pieces counts as one that never stopped.

  Attributes:
    patience: evaluations in a row without a better one, after which the run ends; 0: it never does for that.
    threshold: by how much a loss has to be below the best one for the wait to begin anew.
    step: of the lowest loss; None: there was none that is finite.
    loss: the lowest.
    waited: evaluations since one was lower by more than the threshold.
    evaluated: the newest step that was evaluated.
  """

  patience: int = 0
  threshold: float = 0.0
  step: int | None = None
  loss: float = float("inf")
  waited: int = 0
  evaluated: int = 0

  @classmethod
  def of(cls, training: TrainingConfig) -> "Best":
    """As configured."""
    return cls(training.early_stopping_patience, training.early_stopping_threshold)

  def look(self, step: int, loss: float) -> None:
    """Takes note of an evaluation. A loss that is not a number is never better."""
    self.evaluated = step
    self.waited = 0 if loss < self.loss - self.threshold else self.waited + 1
    if loss < self.loss:
      self.step, self.loss = step, loss

  @property
  def exhausted(self) -> bool:
    """Nothing was better for as long as the run was to wait."""
    return 0 < self.patience <= self.waited

  def why_stopped(self, step: int, steps: int) -> str:
    """What a run says that ends early, after ``step`` of ``steps``."""
    lowest = f"the lowest is {self.loss:.4f} after step {self.step}" if self.step is not None else "none was finite"
    by = f" by more than {self.threshold:g}" if self.threshold else ""
    count = "1 evaluation" if self.waited == 1 else f"{self.waited} evaluations"
    return f"stopped early at step {step} of {steps}: eval_loss has not fallen{by} in {count}, {lowest}"

  def get_state(self) -> dict[str, Any]:
    """What a checkpoint keeps; JSON."""
    loss = None if self.step is None else self.loss
    return {"step": self.step, "eval_loss": loss, "waited": self.waited, "evaluated": self.evaluated}

  def set_state(self, state: dict[str, Any] | None, step: int) -> None:
    """Goes on as the checkpoint of a step had it; None: that kept nothing, so what comes next is the first."""
    state = state or {"step": None, "eval_loss": None, "waited": 0, "evaluated": step}
    self.step, self.waited, self.evaluated = state["step"], state["waited"], state["evaluated"]
    self.loss = float("inf") if self.step is None else state["eval_loss"]


def stopped_early(newest: Manifest, training: TrainingConfig) -> str | None:
  """Why a run with this newest checkpoint has ended early; None: it has not, or is to wait longer now.

  Args:
    newest: the checkpoint's manifest.
    training: the ``training:`` section of whoever asks.
  """
  best = Best.of(training)
  best.set_state(newest.extra.get(EXTRA), newest.step)
  return best.why_stopped(newest.step, training.steps or newest.config["training"]["steps"]) if best.exhausted else None
