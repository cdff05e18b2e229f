"""The train step with another objective than language modeling. It has two rows per sample and a frozen reference model."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.param import Param, init
from maxtext_like.targets import IGNORED
from maxtext_like.training.objectives.language_modeling import token_losses
from maxtext_like.training.objectives.objective import Objective
from maxtext_like.training.step.train_step import UNKNOWN, TrainStep
from maxtext_like.training.step.trainable import select
from tests.training.toy import B, T, V, toy_batch, toy_config, toy_decoder, toy_step


@dataclass(frozen=True)
class Preference:
  """Minus log sigmoid of the margin: how much more the model prefers the first of two rows than the reference model does."""

  decoder: Any

  @property
  def evaluated(self) -> str:
    return "preference"

  def params(self):
    own = self.decoder.params()
    frozen = jax.tree.map(lambda p: dataclasses.replace(p, trainable=False), own, is_leaf=lambda p: isinstance(p, Param))
    return own | {"reference": frozen}

  def batch(self, inputs):
    return {
      name: jax.ShapeDtypeStruct((x.shape[0], 2, *x.shape[1:]), x.dtype)
      for name, x in (inputs | {"targets": inputs["tokens"]}).items()
    }

  def tokens(self, batch):
    return jnp.sum(batch["targets"] != IGNORED)

  def weight(self, batch):
    return batch["tokens"].shape[0]

  def __call__(self, p, batch, cotangent=None, probes=None):
    rows = {name: x.reshape(-1, T) for name, x in batch.items()}

    def likelihoods(params):
      x, aux = self.decoder.hidden(params, rows)
      losses, _ = token_losses(self.decoder.head(params, x), rows["targets"], 0.0)
      return -losses.sum(-1).reshape(-1, 2), aux

    (ours, aux), (theirs, _) = likelihoods(p), likelihoods(p["reference"])
    margin = (ours - theirs) @ jnp.array([1.0, -1.0])
    loss = jnp.sum(jax.nn.softplus(-margin))
    return loss, self.weight(batch), aux | {"terms": {"preference": jax.lax.stop_gradient(loss)}, "means": {}}

  def with_decoder(self, decoder):
    return Preference(decoder)

  def logit_bytes(self, rows, length):
    return 2 * 2 * rows * length * V * 4

  def made_in_forward(self, p):
    return None


def pairs() -> dict[str, np.ndarray]:
  """Return two batches stacked as pairs of rows, [B, 2, T]."""
  first, second = toy_batch(0), toy_batch(1)
  return {name: np.stack([first[name], second[name]], axis=1) for name in first}


@pytest.mark.slow
def test_two_rows_a_sample_and_a_reference_train_in_parts_as_in_one():
  found = []
  for parts in (1, 2):
    config = toy_config(
      "opt_type=sgd",
      "sgd_momentum=0",
      "learning_rate=0.5",
      f"gradient_accumulation_steps={parts}",
      f"per_device_batch_size={B // parts}",
    )
    plain, _ = toy_step(config, decoder=toy_decoder())
    objective: Objective = Preference(toy_decoder())
    spec = objective.params()
    selection = select(toy_decoder(), spec, config.model, ())
    optimizer = dataclasses.replace(plain.optimizer, spec=selection.split(spec)[0])
    step: TrainStep = dataclasses.replace(plain, apply=objective, objective=objective, selection=selection, optimizer=optimizer)
    params = init(spec, jax.random.key(3))
    state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt_state": optimizer.init(selection.split(params)[0])}
    new, metrics = jax.jit(step)(state, pairs(), UNKNOWN)
    assert not bool(metrics["skipped"])
    assert int(metrics["tokens"]) == 2 * (B * T - 5)
    jax.tree.map(np.testing.assert_array_equal, new["params"]["reference"], params["reference"])
    again, later = jax.jit(step)(new, pairs(), metrics["magnitude_bound"])
    assert float(later["loss"]) < float(metrics["loss"])
    found.append(again["params"])
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), *found)
