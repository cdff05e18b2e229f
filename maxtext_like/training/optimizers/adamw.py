"""AdamW (Loshchilov and Hutter 2019). The weight decay is applied by ``Optimizer``, as for every rule."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.training.optimizers.rule import Bound


def build(training: TrainingConfig) -> "AdamW":
  return AdamW(training.adam_b1, training.adam_b2, training.adam_eps)


@dataclass(frozen=True)
class AdamW:
  """The mean of the gradients divided by the square root of the mean of their squares."""

  b1: float
  b2: float
  eps: float

  bounded_to: ClassVar[float] = math.inf
  whole: ClassVar[bool] = False
  smaller: ClassVar[str | None] = "opt_type=adafactor adafactor_momentum_rank=32"
  first: ClassVar[str | None] = "mu"
  second: ClassVar[str | None] = "nu"

  @property
  def memory(self) -> int:
    """Number of steps that the first moment averages over."""
    return max(1, round(1 / (1 - self.b1)))

  def direction(self, mu_dtype: Any, spec: Any) -> optax.GradientTransformation:
    del spec
    return optax.scale_by_adam(self.b1, self.b2, self.eps, mu_dtype=mu_dtype)

  def bound(self, gradient: jax.Array, state: jax.Array) -> Bound:
    b1, b2, eps = (np.float32(x) for x in (self.b1, self.b2, self.eps))
    first, second = jnp.maximum(state, gradient), jnp.maximum(state, jnp.square(gradient))
    # The largest direction is the bias-corrected first moment over the smallest denominator, eps.
    direction = first / (1 - b1) / eps
    computed = jnp.maximum(first / (1 - b1), second / (1 - b2))
    return Bound(direction=direction, moment=first, state=jnp.maximum(first, second), computed=computed)
