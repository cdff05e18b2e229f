"""Adafactor (Shazeer and Stern 2018): a factored second moment, and no first moment or one of low rank."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.training.optimizers.low_rank_moment import low_rank_moment
from maxtext_like.training.optimizers.rule import Bound


def build(training: TrainingConfig) -> "Adafactor":
  return Adafactor(training.adafactor_momentum_rank, training.adam_b1)


@dataclass(frozen=True)
class Adafactor:
  """The update is clipped to an RMS of 1 and is not scaled by the parameter's size, so the learning rate has the same meaning
  as for the other optimizers. An array of stacked layers is factored over its two largest dimensions and clipped as one array.

  Attributes:
    rank: rank of the momentum of the clipped update (``low_rank_moment``); 0 for no momentum.
    b1: decay of the momentum.
  """

  rank: int
  b1: float

  bounded_to: ClassVar[float] = 2.0
  whole: ClassVar[bool] = True  # the clipping needs the RMS of the complete array
  smaller: ClassVar[str | None] = None
  first: ClassVar[str | None] = None
  second: ClassVar[str | None] = None

  def direction(self, mu_dtype: Any, spec: Any) -> optax.GradientTransformation:
    del mu_dtype
    if not self.rank:
      return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    # The momentum does the clipping itself, in fewer passes. The identity keeps the position of the clipping in the state,
    # because checkpoints name the states by position.
    return optax.chain(optax.scale_by_factored_rms(), optax.identity(), low_rank_moment(self.b1, self.rank, spec))

  def bound(self, gradient: jax.Array, state: jax.Array) -> Bound:
    # Second moments are at least 1e-30 * (1 - decay). The factor 1 - decay is at least 6e-8 or exactly 0, in which case the
    # moments do not change. So neither factor exceeds 1e19 if no second moment exceeds 4. Clipping leaves at most the square
    # root of the array's size, for arrays of up to 1e12 numbers. Momentum adds at most its bias-corrected mean and subtracts at
    # most as much. The momentum state is at most 1.
    most = 1e6 * (2 + 1 / (1 - self.b1)) if self.rank else 1e6
    # Without these limits on gradient and state there is no bound on the direction.
    direction = jnp.where((gradient <= self.bounded_to) & (state <= 4), most, jnp.inf)
    kept = jnp.maximum(state, jnp.square(gradient) + 1e-30)
    if self.rank:
      kept = jnp.maximum(kept, 1.0)
    return Bound(direction=direction, moment=gradient, state=jnp.maximum(gradient, kept), computed=gradient)
