"""Lion (Chen et al. 2023): the sign of a moving average of the gradients."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.training.optimizers.rule import Bound


def build(training: TrainingConfig) -> "Lion":
  return Lion(training.adam_b1, training.adam_b2)


@dataclass(frozen=True)
class Lion:
  """One moment, and a direction whose elements are all -1, 0 or 1."""

  b1: float
  b2: float

  bounded_to: ClassVar[float] = math.inf
  whole: ClassVar[bool] = False
  smaller: ClassVar[str | None] = None
  first: ClassVar[str | None] = "mu"
  second: ClassVar[str | None] = None

  def direction(self, mu_dtype: Any, spec: Any) -> optax.GradientTransformation:
    del spec
    return optax.scale_by_lion(self.b1, self.b2, mu_dtype=mu_dtype)

  def bound(self, gradient: jax.Array, state: jax.Array) -> Bound:
    # The moment is an average of gradients; the direction is a sign.
    moment = jnp.maximum(state, gradient)
    return Bound(direction=jnp.float32(1), moment=moment, state=moment, computed=moment)
