"""Saves the steps of a run: the contents of a checkpoint, and the check of its state before it is written."""

from dataclasses import dataclass
from typing import Any

import jax

from maxtext_like.checkpoint.adapters.adapter_step import EXTRA as BASE
from maxtext_like.checkpoint.adapters.adapter_step import Base
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.training.loop.best import EXTRA as BEST
from maxtext_like.training.loop.best import Best
from maxtext_like.training.loop.divergence import EXTRA as DIVERGENCE
from maxtext_like.training.loop.divergence import Divergence
from maxtext_like.training.loop.finiteness import FinitenessGuard
from maxtext_like.training.loop.resume_diff import batch_of
from maxtext_like.training.loop.spikes import EXTRA as SPIKES
from maxtext_like.training.loop.spikes import Spikes
from maxtext_like.training.loop.watchdog import Watchdog
from maxtext_like.training.step.program import Stepper, TrainProgram
from maxtext_like.training.step.train_step import State


@dataclass(frozen=True)
class Saver:
  """Saves steps with everything that a resumed run needs. The attributes are those of ``Loop``."""

  program: TrainProgram
  stepper: Stepper
  manager: CheckpointManager
  data: Any
  guard: FinitenessGuard
  watchdog: Watchdog
  divergence: Divergence
  spikes: Spikes | None
  best: Best | None
  base: Base | None

  def best_to_keep(self) -> tuple[int, float] | None:
    """The best step and its loss; None unless checkpoints of the best step are kept."""
    if not self.program.config.checkpoint.keep_best or self.best is None or self.best.step is None:
      return None
    return self.best.step, self.best.loss

  def is_best(self, step: int) -> bool:
    """Return True if this step has the best evaluation so far and its checkpoint is to be kept."""
    best = self.best_to_keep()
    return best is not None and best[0] == step

  def save(self, step: int, state: State, *, finite: bool) -> None:
    """Start to save a step between two others.

    Args:
      step: number of the step.
      state: state after it.
      finite: True if the metrics of the step show a finite state.

    Raises:
      NonFiniteError: the check found a non-finite number.
      RetryableError: an earlier save failed.
    """
    self._check(step, state, finite)
    if self.is_best(step):
      self.manager.wait()  # ``save`` may skip a step while another is being written; the best step must be saved
    saved, best = self.program.checkpoint_state(state), self.best_to_keep()
    self.manager.save(step, saved, self._extra(), finite=finite, best=best)

  def save_and_wait(self, step: int, state: State, *, finite: bool) -> str | None:
    """Save the last step of a run and wait for the write.

    Returns:
      The path of the checkpoint, or None if nothing was saved.

    Raises:
      NonFiniteError: the check found a non-finite number.
    """
    self._check(step, state, finite)
    saved, best = self.program.checkpoint_state(state), self.best_to_keep()
    if not self.manager.save_and_wait(step, saved, self._extra(), finite=finite, best=best):
      return None
    return str(self.manager.directory / str(step))

  def _check(self, step: int, state: State, finite: bool) -> None:
    """Read every number of the state. A step proves that its update is finite but cannot detect memory errors."""
    if not finite:
      return  # the manager refuses to save such a state
    with self.watchdog.watch("step", f"the check of step {step} before its save"):
      found = jax.device_get(self.stepper.check_state(state))
    if (error := self.guard.before_save(step, found)) is not None:
      raise error

  def _extra(self) -> dict[str, Any]:
    """Return the values that a checkpoint stores in addition to arrays: the position in the data, and records of the loop."""
    # Every record continues from here if the run is resumed.
    extra = {"data": self.data.get_state(), "batch": batch_of(self.program), DIVERGENCE: self.divergence.get_state()}
    if self.spikes is not None:
      self.spikes.documents = self.data.counts()["documents"]
      extra[SPIKES] = self.spikes.get_state()
    if self.best is not None:
      extra[BEST] = self.best.get_state()
    return extra if self.base is None else extra | {BASE: self.base.to_json()}
