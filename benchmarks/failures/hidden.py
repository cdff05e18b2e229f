"""Undetected non-finite numbers: masked by nan_to_num, applied by an optimizer, or sampled from."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxtext_like.errors import NonFiniteError
from maxtext_like.generation.engine import Prompts, generate
from maxtext_like.generation.sampling import Sampling, draw
from maxtext_like.layers.decoder import Decoder, DecoderConfig
from maxtext_like.layers.embedding import EmbeddingConfig
from maxtext_like.layers.moe.router_losses import RouterLosses
from maxtext_like.layers.norms import NormConfig
from maxtext_like.layers.precision import Precision
from maxtext_like.numerics.xray import xray
from maxtext_like.training.objectives.language_modeling import LanguageModeling
from maxtext_like.training.optimizers.adamw import AdamW
from maxtext_like.training.optimizers.optimizer import Optimizer
from maxtext_like.training.step.train_step import UNKNOWN, TrainStep
from maxtext_like.training.step.trainable import Selection

from .row import Row, drawn, finite_share, normal


def masked_loss(w: jax.Array, x: jax.Array) -> jax.Array:
  """Returns an entropy. One logit is 200 below the others, so it contains 0 * log(0), which nan_to_num masks."""
  probs = jax.nn.softmax(x @ w - jnp.array([0.0, 0.0, 200.0]))
  return -jnp.sum(jnp.nan_to_num(probs * jnp.log(probs)))


def nan_to_num() -> Row:
  """The loss is finite because nan_to_num masks a NaN, but its gradient is not."""
  w, x = jnp.asarray(normal(0, 5, 3)), jnp.asarray(normal(1, 4, 5))
  loss, grads = jax.jit(jax.value_and_grad(masked_loss))(w, x)
  cause = xray(masked_loss)(w, x).first_cause
  assert cause is not None
  numbers = {"loss_finite": finite_share(loss), "gradient_finite": finite_share(grads), "masked": float(cause.masked)}
  numbers["is_log"] = float(cause.op == "log")
  return Row(
    "NaN hidden by nan_to_num",
    f"the loss, {float(loss):.3g}, passes every check; {1 - numbers['gradient_finite']:.0%} of the gradient is NaN",
    f"x-ray of the loss alone names the masked cause: {cause.op} at {cause.source}",
    numbers,
  )


def apply_if_finite(limit: int = 3, steps: int = 5) -> Row:
  """optax.apply_if_finite applies a non-finite update after more errors in a row than its limit."""
  params, bad = {"w": jnp.ones(2)}, {"w": jnp.full(2, jnp.nan)}
  optimizer = optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=limit)
  state = optimizer.init(params)
  plain: Any = params
  for _ in range(steps):
    updates, state = optimizer.update(bad, state, plain)
    plain = optax.apply_updates(plain, updates)

  def apply(p, *_):
    loss = jnp.sum(p["w"] * jnp.nan)
    return loss, jnp.float32(2), {"clamped": jnp.zeros((), jnp.int32), "terms": {"cross_entropy": loss}, "means": {}}

  rule: Any = AdamW(0.9, 0.999, 1e-8)
  optimizer = Optimizer(rule, 0.0, "float32", "float32", "float32", None)
  decoder: Any = SimpleNamespace(router_losses=(RouterLosses(), 0))  # all that a step needs from a decoder except ``apply``
  step = TrainStep(
    apply=apply,
    objective=LanguageModeling(decoder),
    selection=Selection({"w": True}, (None,)),
    optimizer=optimizer,
    schedule=lambda _: jnp.float32(0.1),
    clip=1.0,
    parts=1,
    grad_dtype="float32",
  )
  batch = {"targets": jnp.ones((1, 2), jnp.int32), "segments": jnp.ones((1, 2), jnp.int32)}
  ours = {"step": jnp.zeros((), jnp.int32), "params": params, "opt_state": optimizer.init(params)}
  run, skipped = jax.jit(step), 0
  for _ in range(steps):
    ours, metrics = run(ours, batch, UNKNOWN)
    skipped += int(metrics["skipped"])
  kept = float(jnp.all(ours["params"]["w"] == params["w"]))
  numbers = {"their_finite": finite_share(plain["w"]), "our_kept": kept, "our_skipped": float(skipped)}
  return Row(
    f"optax.apply_if_finite, limit {limit}, {steps} NaN gradients",
    f"parameters {float(plain['w'][0])}",
    f"parameters as they were, {skipped} steps skipped and counted (max_skipped_steps ends the run)",
    numbers,
  )


def sampling() -> Row:
  """jax.random.categorical returns an ordinary index for NaN logits."""
  logits = jnp.full((1, 11), jnp.nan)
  token = int(jax.random.categorical(jax.random.key(0), logits)[0])
  how = Sampling()
  found = draw(logits, jax.random.split(jax.random.key(0), 1), how.rule(), how.values(logits.shape[1]))
  cfg = DecoderConfig(embedding=EmbeddingConfig(vocab_size=11, emb_dim=4), norm=NormConfig(dim=4))
  decoder = Decoder(cfg, Precision(dtype="float32"), ())
  params = jax.tree.map(lambda x: x * jnp.nan, drawn(decoder.params()))
  said = ""
  try:
    list(generate(decoder, params, Prompts([[1, 2]]), max_tokens=1, stop=frozenset(), sampling=Sampling()))
  except NonFiniteError as error:
    said = str(error).splitlines()[0]
  numbers = {"token": float(token), "flagged": float(not bool(found["finite"][0])), "raised": float(bool(said))}
  return Row("sampling from NaN logits", f"token {token}, no error", f"exit code 3: {said}", numbers)


ROWS = (nan_to_num, apply_if_finite, sampling)
