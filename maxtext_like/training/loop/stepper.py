"""The compiled steps as the loop takes them: in their usual form, and again in the careful one where nothing was proved.

A step in the usual form that cannot prove its update finite leaves the state as it is, to the last bit. Whoever reads its
metrics then takes it again (``TrainStep``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from maxtext_like.sharding import processes
from maxtext_like.training.loop.watchdog import Watchdog
from maxtext_like.training.step.program import TrainProgram
from maxtext_like.training.step.train_step import NO_UPDATE, UNKNOWN, Batch, Metrics, State


@dataclass
class Stepper:
  """Takes steps, and knows what each proved for the next.

  Attributes:
    program: of the run.
    step: compiled ``TrainProgram.lower_step``.
    look: compiled ``TrainProgram.lower_look``.
    norm: parameter norm of the state that the steps began with; None before the first.
  """

  program: TrainProgram
  step: Callable[..., tuple[State, Metrics]]
  look: Callable[..., dict[str, jax.Array]]
  norm: float | None = field(default=None, init=False)
  _known: Any = field(default=None, init=False)
  _careful: Callable[..., tuple[State, Metrics]] | None = field(default=None, init=False)
  _retaken: int | None = field(default=None, init=False)  # the newest step that was right, and not proved

  def begin(self, state: State, batch: Batch) -> tuple[State, Metrics]:
    """Starts a step, which takes the state's memory."""
    if self._known is None:
      seen = self.seen(state)
      self._known, self.norm = seen["known"], float(seen["param_norm"])
    state, metrics = self.step(state, batch, self._known)
    self._known = metrics.pop("known")
    return state, metrics

  def again(self, number: int, state: State, batch: Batch, watchdog: Watchdog) -> tuple[State, Metrics]:
    """Takes the step of this number in the careful form, and waits for it."""
    with watchdog.watch("first_step", f"step {number}, looked at closely"):
      careful = self._careful
      if careful is None:
        careful = self._careful = self.program.lower_step(careful=True).compile()
        processes.await_compiled("the careful step", self.program.config.watchdog.watchdog_compile_seconds)
      state, metrics = careful(state, batch, UNKNOWN)
      self._known = metrics.pop("known")
      metrics = jax.block_until_ready(metrics)
    if not metrics["skipped"]:
      if self._retaken == number - 1:  # what no proof holds for does not pass from one step to the next
        self.step = careful
      self._retaken = number
    return state, metrics

  def loss(self, state: State, batch: Batch) -> tuple[State, jax.Array]:
    """Measures the loss of a batch with the compiled step, so nothing else has to be compiled.

    The state is returned unchanged, in the memory of the given one.
    """
    state, metrics = self.step(state, batch, NO_UPDATE)
    self.forget()
    return state, metrics["loss"]

  def seen(self, state: State) -> dict[str, jax.Array]:
    """What is to be seen of a state without a step."""
    return self.look(state["params"], state["opt_state"])

  def forget(self) -> None:
    """Before a step from another state than the last one left."""
    self._known = None
