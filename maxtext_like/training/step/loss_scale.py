"""Dynamic loss scaling for float16, whose gradients underflow below 6e-8 (Micikevicius et al. 2018).

The loss is multiplied by a power of two before the backward pass and the gradients are divided by it afterwards, both without
rounding. A gradient overflow skips the step and halves the scale; 2000 finite steps in a row double it.
"""

from typing import Any

import jax
import jax.numpy as jnp

GROWTH_STEPS = 2000
LARGEST = 2.0**24
SMALLEST = 2.0**-14

LossScale = dict[str, Any]  # {"scale": float32 scalar, "good_steps": int32 scalar}


def initial(scale: float) -> LossScale:
  """Return the loss scale at the start of a run."""
  return {"scale": jnp.asarray(scale, jnp.float32), "good_steps": jnp.zeros((), jnp.int32)}


def updated(state: LossScale, finite: jax.Array) -> LossScale:
  """Return the loss scale after a step. ``finite`` (bool scalar): the gradients were finite."""
  # Count finite steps; after GROWTH_STEPS of them double the scale and count again.
  good = jnp.where(finite, state["good_steps"] + 1, 0)
  grow = good >= GROWTH_STEPS
  grown = jnp.where(grow, jnp.minimum(state["scale"] * 2, LARGEST), state["scale"])
  return {
    "scale": jnp.where(finite, grown, jnp.maximum(state["scale"] / 2, SMALLEST)),
    "good_steps": jnp.where(grow, 0, good).astype(jnp.int32),
  }
