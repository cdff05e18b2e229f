"""Error feedback: what rounding takes from an update is owed, by the first moment, which pays within its memory.

Weights of 16 bits that are rounded up or down lose nothing on average, but wander about where they were meant to go, by about a
spacing; as the learning rate falls that does not, and a loss ends higher for it. What a step left out is known before the
moments are stored, so it goes into the first of them, as much as arrives in the steps to come (Nikdan et al. 2026,
arXiv:2601.22101; Seide et al. 2014 for gradients). Two things are other than there:

- A debt is paid at the learning rates that are to come, which the schedule tells, and not at that of the step that made it.
- A spacing may be thousands of steps of a small learning rate. What such a step owed would drown the gradients' mean in a
  moment of 8 bits. So a share is owed that is the same for whatever rounding took, lest the mean be biased, and that leaves
  debts of a whole spacing at ``most`` times a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.training.rounding import Place, StochasticRounding, spacing

MOST_OWED = 1e4  # steps that a debt of a whole spacing counts as, where the moment is in float32
LEAST_RATE = 1e-30  # of a schedule that ends with 0, at which nothing is paid


class Payment(NamedTuple):
  """How a rule of descent pays debts.

  Attributes:
    decay: of its first moment: what it remembers of a number for one more step. Directions are divided by
      ``1 - decay**steps``.
    owe: (a state of moments in float32, what is owed beyond it) -> that state, with debts in the first moment whose payments
      add up to what is owed.
  """

  decay: float
  owe: Callable[[Any, jax.Array], Any]

  def rate_to_come(self, schedule: Callable[[jax.Array], jax.Array], step: jax.Array) -> jax.Array:
    """The mean of the learning rates at which the debts of a step are paid, float32 scalar.

    Args:
      schedule: the learning rate by finished steps.
      step: int32 scalar, finished steps before the one that makes the debts.
    """
    count = int(np.clip(np.ceil(np.log(1e-3) / np.log(self.decay)), 1, 1000))
    later = np.arange(1, count + 1, dtype=np.int32)
    shares = self.decay**later / np.sum(self.decay**later)
    unbiased = 1 - jnp.power(jnp.float32(self.decay), (step + 1 + later).astype(jnp.float32))
    return jnp.sum(shares.astype(np.float32) * schedule(step + later) / unbiased)


class Settling(NamedTuple):
  """What the end of an update needs to know of its step.

  Attributes:
    rounding: of the run.
    masks: of each parameter: bool [rows] where only some layers of its stack are trained, else True.
    schedule: the learning rate by finished steps.
    rate: of this step, float32 scalar.
    step: int32 scalar, finished steps.
    row: int32 scalar, which row of their stack the parameters are; None: all of every stack.
  """

  rounding: StochasticRounding
  masks: Any
  schedule: Callable[[jax.Array], jax.Array]
  rate: jax.Array
  step: jax.Array
  row: jax.Array | None = None


class Ended(NamedTuple):
  """What comes of a direction of descent.

  Attributes:
    direction: with decay of weights, zeros where nothing is trained, float32.
    stored: the parameters behind the update.
    owed: direction that is missing, float32: of a step at the rate to come.
  """

  direction: jax.Array
  stored: jax.Array
  owed: jax.Array


@dataclass(frozen=True)
class End:
  """The end of an update of one array: it is moved and rounded, and what rounding took is told.

  Attributes:
    settling: of the step.
    path: of the parameter.
    mask: its own of the step's.
    decay: of the weights.
    to_come: ``Payment.rate_to_come``.
  """

  settling: Settling
  path: Any
  mask: Any
  decay: float
  to_come: jax.Array

  def __call__(self, param: jax.Array, direction: jax.Array, place: Place, most: float) -> Ended:
    """Of an array, or of a piece of it.

    Args:
      param: before the update.
      direction: float32, of the rule.
      place: of the piece.
      most: steps at the rate to come that a debt of a whole spacing counts as, at most.
    """
    row = self.settling.row if place.row is None else place.row
    before = param.astype(jnp.float32)
    if self.decay:
      direction = direction + self.decay * before
    if self.mask is not True:
      mask = jnp.asarray(self.mask)
      direction = jnp.where(mask.reshape(-1, *(1,) * (param.ndim - 1)) if row is None else mask[row], direction, 0)
    moved = before - self.settling.rate * direction
    stored = self.settling.rounding.array(self.path, moved, param.dtype, self.settling.step, place._replace(row=row))
    steps = 1 / jnp.maximum(self.to_come, LEAST_RATE)
    lost = moved - stored.astype(jnp.float32)
    return Ended(direction, stored, -lost * jnp.minimum(steps, most / spacing(moved, param.dtype)))
