"""The compiled programs of generation."""

import re

import jax
import jax.numpy as jnp
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.generation import slots
from maxtext_like.generation.sampling import Sampling
from maxtext_like.layers.cache import Step
from maxtext_like.layers.param import abstract
from maxtext_like.models.build import build_decoder, precision_of


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="before JAX 0.11, XLA for CPUs turns a scatter into a loop")
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_caches_of_rows_apart_are_updated_in_place(name: str):
  """No array of a cache is copied, sliced or concatenated: the only results of that size are updates of the array itself."""
  words = ["dtype=float32", "num_decoder_layers=2", "layer_types=[sliding,global]", "sliding_window_size=5", "emb_dim=24"]
  config = load_config("gemma3-tiny", [*words, "mlp_dim=40", "vocab_size=97"]).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  params = jax.eval_shape(decoder.apart, abstract(decoder.params()))
  state = jax.eval_shape(lambda: slots.empty_state(decoder, 3, 37, apart=True, penalties=False))
  sampling, one = Sampling(), jnp.int32(1)
  values = jax.tree.map(jnp.asarray, sampling.values(97))
  stops = jnp.zeros(1, jnp.int32)
  if name == "decode":
    lowered = slots.decode.lower(decoder, sampling.rule(), params, state, values, stops, one, one)
  else:
    # A later chunk of two prompts, which reads the entries of the chunks before it.
    tokens, rows = jnp.zeros((2, 16), jnp.int32), jnp.arange(2)
    lowered = slots.prefill.lower(decoder, params, state, {"tokens": tokens, "positions": tokens}, Step(rows, rows, rows))
  program = lowered.compile()
  arrays = jax.tree.leaves(state.cache)
  sizes = {",".join(map(str, x.shape)) for x in arrays}
  assert len(sizes) == 2
  lines = (program.as_text() or "").splitlines()
  kinds = [re.search(rf"= f32\[(?:{'|'.join(sizes)})\]\S* ([\w-]+)\(", line) for line in lines]
  found = {kind[1] for kind in kinds if kind}
  assert "scatter" in found
  assert found <= {"scatter", "fusion", "parameter", "get-tuple-element", "bitcast"}
  # A fusion of that size is such an update.
  fused = [line for line in lines if re.search(rf"= f32\[(?:{'|'.join(sizes)})\]\S* fusion\(", line)]
  assert all("scatter" in line for line in fused)
