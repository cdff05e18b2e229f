"""Adafactor (Shazeer and Stern 2018): a factored second moment, and no first one or one of low rank."""

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
  """The update is clipped to an rms of 1 and not scaled by the parameter's size, so that a learning rate means what it means
  for the others. An array of stacked layers is factored over its two largest dimensions and clipped as one.

  Attributes:
    rank: of the momentum that the clipped update then has (``low_rank_moment``); 0: none.
    b1: its decay.
  """

  rank: int
  b1: float

  bounded_to: ClassVar[float] = 2.0
  whole: ClassVar[bool] = True  # its rms
  smaller: ClassVar[str | None] = None
  first: ClassVar[str | None] = None
  second: ClassVar[str | None] = None

  def direction(self, mu_dtype: Any, spec: Any) -> optax.GradientTransformation:
    del mu_dtype
    if not self.rank:
      return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    # The momentum clips by itself, in fewer passes; states keep the place of the clipping, which checkpoints name theirs by.
    return optax.chain(optax.scale_by_factored_rms(), optax.identity(), low_rank_moment(self.b1, self.rank, spec))

  def bound(self, gradient: jax.Array, state: jax.Array) -> Bound:
    # Second moments are at least 1e-30 * (1 - decay), which is 6e-8 or 0 (they stay as they are), so neither factor is
    # above 1e19 where none is above 4. Clipping leaves at most the root of an array's size, of 1e12 numbers; momentum adds as
    # much of what it has without its bias, and takes at most as much away; what it keeps is at most 1.
    most = 1e6 * (2 + 1 / (1 - self.b1)) if self.rank else 1e6
    direction = jnp.where((gradient <= self.bounded_to) & (state <= 4), most, jnp.inf)
    kept = jnp.maximum(state, jnp.square(gradient) + 1e-30)
    if self.rank:
      kept = jnp.maximum(kept, 1.0)
    return Bound(direction=direction, moment=gradient, state=jnp.maximum(gradient, kept), computed=gradient)
