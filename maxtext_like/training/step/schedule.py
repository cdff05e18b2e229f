"""The learning rate of every step: a linear warm-up, then cosine, linear, constant, or constant with a decay (wsd)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxtext_like.config.training_keys import TrainingConfig

Schedule = Callable[[jax.Array | int], jax.Array]


def make_schedule(training: TrainingConfig) -> Schedule:
  """The learning rate as a function of the number of finished steps, for use inside the compiled step.

  Over N = lr_schedule_steps (steps, when it is null) with W = round(N * warmup_steps_fraction): in the warm-up step s
  (from 0) has peak * (s + 1) / W, so that no update is spent on a rate of 0. After it u = (s - W) / (N - W), from 0 at the
  end of the warm-up towards 1, where it stays from step N on (while the steps of epochs are not counted N is 1: no step is
  taken with that):

    cosine:   final + (peak - final) * (1 + cos(pi u)) / 2            (Loshchilov and Hutter 2017)
    linear:   peak + (final - peak) * u
    constant: peak
    wsd:      peak until the last round(N * wsd_decay_steps_fraction) of N steps, then linearly to final (Hu et al. 2024)

  Returns:
    A function of an int32 scalar (or int) that gives a float32 scalar.
  """
  steps, peak = training.lr_schedule_steps or training.steps or 1, training.learning_rate
  final = peak * training.learning_rate_final_fraction
  warmup = round(steps * training.warmup_steps_fraction)
  kind = training.lr_schedule_type
  if kind == "wsd":
    begin = steps - round(steps * training.wsd_decay_steps_fraction)
  else:
    begin = warmup
  length = max(steps - begin, 1)

  def schedule(step: jax.Array | int) -> jax.Array:
    step = jnp.asarray(step, jnp.float32)
    u = jnp.clip((step - begin) / length, 0.0, 1.0)
    if kind == "cosine":
      rate = final + (peak - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * u))
    elif kind == "constant":
      rate = jnp.full((), peak, jnp.float32)
    else:
      rate = peak + (final - peak) * u
    if warmup == 0:
      return rate
    return jnp.where(step < warmup, peak * (step + 1.0) / warmup, rate)

  return schedule
