"""Adafactor (Shazeer and Stern 2018): a factored second moment and no first one."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.training.optimizers.rule import Bound


def build(training: TrainingConfig) -> "Adafactor":
  del training  # no value of it is Adafactor's
  return Adafactor()


@dataclass(frozen=True)
class Adafactor:
  """The update is clipped to an rms of 1 and not scaled by the parameter's size, so that a learning rate means what it means
  for the others. An array of stacked layers is factored over its two largest dimensions and clipped as one."""

  bounded_to: ClassVar[float] = 2.0
  whole: ClassVar[bool] = True  # its rms
  smaller: ClassVar[str | None] = None
  first: ClassVar[str | None] = None
  second: ClassVar[str | None] = None

  def direction(self, mu_dtype: Any) -> optax.GradientTransformation:
    del mu_dtype
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))

  def bound(self, gradient: jax.Array, state: jax.Array) -> Bound:
    # Second moments are at least 1e-30 * (1 - decay), which is 6e-8 or 0 (they stay as they are), so neither factor is
    # above 1e19 where none is above 4. Clipping leaves at most the root of an array's size.
    direction = jnp.where((gradient <= self.bounded_to) & (state <= 4), 1e6, jnp.inf)
    kept = jnp.maximum(state, jnp.square(gradient) + 1e-30)
    return Bound(direction=direction, moment=gradient, state=jnp.maximum(gradient, kept), computed=gradient)
