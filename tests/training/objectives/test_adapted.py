"""An adapter on sparse attention with an indexer, for rows that are longer than a tile of queries."""

import jax
import numpy as np
import pytest

from maxtext_like.layers.attention import sparse_attention_tiles
from maxtext_like.layers.attention.mla import MLA
from tests.training.meshes import LENGTH, ONE, apart, descend

SMALL = ["num_decoder_layers=1", "first_num_dense_layers=1", "emb_dim=32", "mlp_dim=48", "indexer_topk=3", "lora_rank=3", ONE]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("words", "gathers"),
  [
    (["lora_modules=[all-linear]"], False),
    (["lora_modules=[all-linear]", "base_weights=int8"], False),
    (["lora_modules=[mlp.down]", "base_weights=fp8_block"], False),
    (["lora_modules=[mlp.down]"], True),
  ],
)
def test_trained_in_tiles_it_has_the_losses_and_gradients_of_the_whole_row(words, gathers, monkeypatch):
  """Rows of 16 positions with two documents and padding, in tiles of 5, give the losses and gradients of one tile. The selected
  keys are gathered only if kv_b is neither adapted nor quantized."""
  taken, gather = [], MLA._gathered
  monkeypatch.setattr(MLA, "_gathered", lambda *given: taken.append(given) or gather(*given))
  assert LENGTH <= sparse_attention_tiles.TILE
  losses, gradients, start = descend("deepseek3.2-tiny", [*SMALL, *words], jax.devices()[:1])
  wanted = jax.device_get(gradients)
  assert not taken
  monkeypatch.setattr(sparse_attention_tiles, "TILE", 5)
  tiled, gradients, _ = descend("deepseek3.2-tiny", [*SMALL, *words], jax.devices()[:1], start)
  assert bool(taken) == gathers
  assert losses[2] < losses[0]
  np.testing.assert_allclose(tiled, losses, rtol=1e-5)
  assert apart(gradients, wanted) < 1e-5
