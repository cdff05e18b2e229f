"""Tracks the best evaluation loss of a run for ``keep_best`` and early stopping."""

from dataclasses import dataclass
from typing import Any

from maxtext_like.checkpoint.store.manifest import Manifest
from maxtext_like.config.training_keys import TrainingConfig

EXTRA = "best"  # name in a checkpoint's extra values


@dataclass
class Best:
  """Records the evaluations of a run. Its state is part of every checkpoint, so interruptions do not change its decisions.

  Attributes:
    patience: number of evaluations in a row without improvement after which the run ends; 0 turns early stopping off.
    threshold: minimum decrease of the loss that counts as an improvement.
    step: step with the lowest loss; None if no loss was finite so far.
    loss: the lowest loss.
    waited: number of evaluations since the last improvement.
    evaluated: newest step that was evaluated.
  """

  patience: int = 0
  threshold: float = 0.0
  step: int | None = None
  loss: float = float("inf")
  waited: int = 0
  evaluated: int = 0

  @classmethod
  def of(cls, training: TrainingConfig) -> "Best":
    """Return an empty record with the configured patience and threshold."""
    return cls(training.early_stopping_patience, training.early_stopping_threshold)

  def observe(self, step: int, loss: float) -> None:
    """Record an evaluation. A NaN loss is never an improvement."""
    self.evaluated = step
    self.waited = 0 if loss < self.loss - self.threshold else self.waited + 1
    if loss < self.loss:
      self.step, self.loss = step, loss

  @property
  def exhausted(self) -> bool:
    """True if the run has waited ``patience`` evaluations for an improvement."""
    return 0 < self.patience <= self.waited

  def why_stopped(self, step: int, steps: int) -> str:
    """Return the line that explains why the run ended after ``step`` of ``steps`` steps."""
    lowest = f"the lowest is {self.loss:.4f} after step {self.step}" if self.step is not None else "none was finite"
    by = f" by more than {self.threshold:g}" if self.threshold else ""
    count = "1 evaluation" if self.waited == 1 else f"{self.waited} evaluations"
    return f"stopped early at step {step} of {steps}: eval_loss has not fallen{by} in {count}, {lowest}"

  def get_state(self) -> dict[str, Any]:
    """Return the state for a checkpoint, as JSON."""
    loss = None if self.step is None else self.loss
    return {"step": self.step, "eval_loss": loss, "waited": self.waited, "evaluated": self.evaluated}

  def set_state(self, state: dict[str, Any] | None, step: int) -> None:
    """Continue from the state in the checkpoint of ``step``. None: it stored none, so the next evaluation is the first."""
    # A checkpoint of an earlier version or without evaluations has no state.
    state = state or {"step": None, "eval_loss": None, "waited": 0, "evaluated": step}
    self.step, self.waited, self.evaluated = state["step"], state["waited"], state["evaluated"]
    self.loss = float("inf") if self.step is None else state["eval_loss"]


def stopped_early(newest: Manifest, training: TrainingConfig) -> str | None:
  """Return why the run with this newest checkpoint ended early, or None if it did not end early or patience was raised.

  Args:
    newest: manifest of the checkpoint.
    training: the current ``training:`` section.
  """
  best = Best.of(training)
  best.set_state(newest.extra.get(EXTRA), newest.step)
  return best.why_stopped(newest.step, training.steps or newest.config["training"]["steps"]) if best.exhausted else None
