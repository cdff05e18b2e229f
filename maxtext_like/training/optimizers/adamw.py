"""AdamW (Loshchilov and Hutter 2019); its decay of the weights is the optimizer's, as every rule's is."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.training.optimizers.feedback import MOST_OWED, Payment
from maxtext_like.training.optimizers.rule import Bound


def build(training: TrainingConfig) -> "AdamW":
  return AdamW(training.adam_b1, training.adam_b2, training.adam_eps, training.rounding_feedback)


@dataclass(frozen=True)
class AdamW:
  """The mean of the gradients over the root of that of their squares.

  Attributes:
    b1, b2, eps: as in the paper.
    owes: the first moment owes what rounding takes from the weights (``rounding_feedback``).
  """

  b1: float
  b2: float
  eps: float
  owes: bool = False

  usually_bounded: ClassVar[bool] = True
  whole: ClassVar[bool] = False
  smaller: ClassVar[str | None] = (
    "mu_dtype=dynamic8 nu_dtype=dynamic8: moments of 8 bits; or opt_type=adafactor, whose second one takes next to nothing and "
    "which has no first one"
  )
  first: ClassVar[str | None] = "mu"
  second: ClassVar[str | None] = "nu"

  def direction(self, mu_dtype: Any) -> optax.GradientTransformation:
    return optax.scale_by_adam(self.b1, self.b2, self.eps, mu_dtype=mu_dtype)

  @property
  def payment(self) -> Payment | None:
    if not self.owes or not self.b1:
      return None

    def owe(state: Any, owed: jax.Array) -> Any:
      # As the direction has it: the mean over this, without what the mean is divided by for its bias.
      below = jnp.sqrt(state.nu / (1 - self.b2**state.count)) + self.eps
      return state._replace(mu=state.mu + (1 - self.b1) / self.b1 * owed * below)

    return Payment(self.b1, owe)

  def bound(self, gradient: jax.Array, state: jax.Array) -> Bound:
    b1, b2, eps = (np.float32(x) for x in (self.b1, self.b2, self.eps))
    first, second = jnp.maximum(state, gradient), jnp.maximum(state, jnp.square(gradient))
    if self.owes:  # (1 - b1) / b1 of so many steps in every one of them, of which the moment keeps b1 each time
      first += MOST_OWED / b1 * (jnp.sqrt(second / (1 - b2)) + eps)
    direction = first / (1 - b1) / eps  # without its bias, over the smallest denominator
    computed = jnp.maximum(first / (1 - b1), second / (1 - b2))
    return Bound(direction=direction, moment=first, state=jnp.maximum(first, second), computed=computed)
