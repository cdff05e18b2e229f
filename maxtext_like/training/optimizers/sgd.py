"""Stochastic gradient descent, with or without heavy-ball momentum."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import optax

from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.training.optimizers.rule import Bound


def build(training: TrainingConfig) -> "SGD":
  return SGD(training.sgd_momentum)


@dataclass(frozen=True)
class SGD:
  """The gradient plus the decayed sum of earlier gradients."""

  momentum: float

  bounded_to: ClassVar[float] = math.inf
  whole: ClassVar[bool] = False
  smaller: ClassVar[str | None] = None
  second: ClassVar[str | None] = None

  @property
  def first(self) -> str | None:
    return "trace" if self.momentum else None

  def direction(self, mu_dtype: Any, spec: Any) -> optax.GradientTransformation:
    del spec
    return optax.trace(self.momentum, accumulator_dtype=mu_dtype) if self.momentum else optax.identity()

  def bound(self, gradient: jax.Array, state: jax.Array) -> Bound:
    # The direction is also the next moment.
    moved = gradient + np.float32(self.momentum) * state
    return Bound(direction=moved, moment=moved, state=moved, computed=moved)
