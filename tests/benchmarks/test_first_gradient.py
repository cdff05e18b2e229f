"""benchmarks/first_gradient.py computes the gradient of the train step, layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.first_gradient import drawing, first_gradient
from maxtext_like.config.load import load_config
from maxtext_like.training.run.batches import first_batch
from maxtext_like.training.step.program import make_program


@pytest.mark.nightly
@pytest.mark.parametrize("words", [["gemma4-e2b-tiny"], ["deepseek3.2-tiny", "load_balance_loss_weight=0.1"]])
def test_it_is_the_gradient_of_the_train_step(words, tmp_path):
  """Shared keys and values, per-layer inputs and a tied head; losses of the router and the indexer, and a frozen bias."""
  config = load_config(words[0], ["max_target_length=24", "per_device_batch_size=2", *words[1:]])
  program, batch = first_batch(make_program(config.config), config.config.checkpoint, tmp_path)
  draw = drawing(program, 3)
  found = first_gradient(program, batch, draw)
  # The same weights in the stacks of the train step.
  params, layers = draw(None), {}
  for s in program.objective.decoder.stacks:
    period = len(s.layers)
    rows = lambda j, s=s, period=period: [draw(s.first + r * period + j) for r in range(s.repeats)]
    layers[s.name] = {f"layer_{j}": jax.tree.map(lambda *x: jnp.stack(x), *rows(j)) for j in range(period)}
  gradients, out = program.step.gradients(*program.selection.split(params | layers), batch, None)
  norm = lambda tree: np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(tree)))
  np.testing.assert_allclose(found.loss, sum(map(float, out["loss"].values())), rtol=1e-6)
  np.testing.assert_allclose(found.norm, norm(gradients), rtol=1e-6)
  np.testing.assert_allclose(found.norms[None], norm({n: g for n, g in gradients.items() if n not in layers}), rtol=1e-6)
