"""The learning-rate schedule: a linear warm-up, then cosine, linear, constant, or constant with a final decay (wsd)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxtext_like.config.training_keys import TrainingConfig

Schedule = Callable[[jax.Array | int], jax.Array]


def make_schedule(training: TrainingConfig) -> Schedule:
  """Return the learning rate as a function of the number of finished steps, for use inside the compiled step.

  N = lr_schedule_steps (default: steps) and W = round(N * warmup_steps_fraction). Warm-up step s (from 0) has the rate
  peak * (s + 1) / W, so that no update has a rate of 0. After the warm-up u = (s - W) / (N - W) rises from 0 to 1 and stays
  at 1 from step N on. While the steps of an epoch are not counted yet, N is 1; no step is taken with that value.

    cosine:   final + (peak - final) * (1 + cos(pi u)) / 2            (Loshchilov and Hutter 2017)
    linear:   peak + (final - peak) * u
    constant: peak
    wsd:      peak, then linearly to final over the last round(N * wsd_decay_steps_fraction) steps (Hu et al. 2024)

  Returns:
    A function from an int32 scalar (or int) to a float32 scalar.
  """
  # Lengths in steps.
  steps, peak = training.lr_schedule_steps or training.steps or 1, training.learning_rate
  final = peak * training.learning_rate_final_fraction
  warmup = round(steps * training.warmup_steps_fraction)
  kind = training.lr_schedule_type
  # The decay of wsd starts late; other schedules start after the warm-up.
  if kind == "wsd":
    begin = steps - round(steps * training.wsd_decay_steps_fraction)
  else:
    begin = warmup
  length = max(steps - begin, 1)

  def schedule(step: jax.Array | int) -> jax.Array:
    # Progress through the decay, from 0 to 1.
    step = jnp.asarray(step, jnp.float32)
    u = jnp.clip((step - begin) / length, 0.0, 1.0)
    if kind == "cosine":
      rate = final + (peak - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * u))
    elif kind == "constant":
      rate = jnp.full((), peak, jnp.float32)
    else:
      rate = peak + (final - peak) * u
    # The warm-up replaces the first steps.
    if warmup == 0:
      return rate
    return jnp.where(step < warmup, peak * (step + 1.0) / warmup, rate)

  return schedule
