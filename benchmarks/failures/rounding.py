"""Casts to float8, and updates that rounding swallows."""

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.training.step.rounding import StochasticRounding, stochastic_round

from .row import Row, finite_share, normal


def float8_casts() -> Row:
  """A cast of a number above 464 gives NaN in e4m3, and above 61440 infinity in e5m2."""
  x = jnp.array([500.0, -1e5])
  numbers, theirs, ours = {}, [], []
  for name, dtype in (("e4m3", jnp.float8_e4m3fn), ("e5m2", jnp.float8_e5m2)):
    plain = x.astype(dtype)
    mine = stochastic_round(x, dtype, jnp.zeros(x.shape, jnp.uint32))
    numbers |= {f"{name}_their_finite": finite_share(plain.astype(jnp.float32))}
    numbers |= {f"{name}_our_finite": finite_share(mine.astype(jnp.float32))}
    theirs.append(f"{name} {[float(v) for v in plain]}")
    ours.append(f"{name} {[float(v) for v in mine]}")
  return Row("float8 casts of 500 and -1e5", ", ".join(theirs), "clipped first: " + ", ".join(ours), numbers)


def swallowed_updates(name: str, steps: int = 200) -> Row:
  """Adds a small update in many steps and measures the share that arrives. In bfloat16: 1e-5 to weights of about 0.02."""
  dtype = {"bfloat16": jnp.bfloat16, "e4m3": jnp.float8_e4m3fn}[name]
  # float8 weights are stored scaled, so that they use the range of the format.
  size, rate = (0.02, 1e-5) if name == "bfloat16" else (10.0, 5e-3)
  start = jnp.asarray(normal(0, 64, 64, size=size)).astype(dtype)
  rounding = StochasticRounding(seed=0)

  @jax.jit
  def run(start):
    def body(carry, step):
      nearest, ours = carry
      nearest = (nearest.astype(jnp.float32) + rate).astype(dtype)
      ours = rounding({"w": ours.astype(jnp.float32) + rate}, {"w": ours}, step)["w"]
      return (nearest, ours), None

    return jax.lax.scan(body, (start, start), jnp.arange(steps))[0]

  shares = [float(np.mean(np.asarray(x.astype(jnp.float32) - start.astype(jnp.float32)))) / (steps * rate) for x in run(start)]
  return Row(
    f"small updates, {name} weights, {steps} steps",
    f"nearest: {shares[0]:.1%} of the intended update arrives",
    f"stochastic_rounding: {shares[1]:.1%}",
    {"theirs": shares[0], "ours": shares[1]},
  )


def turning_updates(steps: int = 400, rate: float = 1e-5) -> Row:
  """Updates weights of about 0.02 by a first moment of random gradients, at the learning rate of a fine-tune.

  Measures the distance from float32 weights at the end, divided by the distance that those have moved.
  """
  start = jnp.asarray(normal(0, 64, 64, size=0.02)).astype(jnp.bfloat16)
  gradients = jnp.asarray(normal(1, steps, 64, 64))
  rounding = StochasticRounding(seed=0)

  @jax.jit
  def run(start, gradients):
    def body(carry, x):
      step, gradient = x
      exact, nearest, random, finer, moment = carry
      moment = 0.9 * moment + 0.1 * gradient
      moved = lambda w: w.astype(jnp.float32) - rate * moment
      rounded = lambda w: rounding({"w": moved(w)}, {"w": w}, step)["w"]
      return (moved(exact), moved(nearest).astype(nearest.dtype), rounded(random), rounded(finer), moment), None

    begin = (start.astype(jnp.float32), start, start, start.astype(jnp.float16), jnp.zeros(start.shape))
    return jax.lax.scan(body, begin, (jnp.arange(steps), gradients))[0]

  exact, *stored, _ = (np.asarray(x, np.float32) for x in run(start, gradients))
  way = np.std(exact - np.asarray(start, np.float32))
  nearest, random, finer = (float(np.std(w - exact) / way) for w in stored)
  return Row(
    f"updates that turn, at a rate of {rate:g}, {steps} steps: the error beside the way",
    f"bfloat16 weights, nearest: {nearest:.0%}",
    f"stochastic_rounding: bfloat16 weights {random:.0%}, float16 weights {finer:.0%}",
    {"theirs": nearest, "bfloat16": random, "float16": finer},
  )


def bfloat16_updates() -> Row:
  """Updates of bfloat16 weights."""
  return swallowed_updates("bfloat16")


def e4m3_updates() -> Row:
  """Updates of weights stored as e4m3."""
  return swallowed_updates("e4m3")


ROWS = (float8_casts, bfloat16_updates, e4m3_updates, turning_updates)
