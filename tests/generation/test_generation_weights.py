"""Parameters in the form for decoding and back."""

import jax
import numpy as np

from maxtext_like.config.load import load_config
from maxtext_like.generation.weights import DecodingWeights
from maxtext_like.models.build import build_decoder, precision_of


def test_rows_apart_and_stacked_again():
  config = load_config("gemma3-tiny", ["num_decoder_layers=7", "emb_dim=24", "vocab_size=37"]).config
  decoder = build_decoder(config.model, precision_of(config.precision), vision=config.vision)
  params = jax.tree.map(lambda p: np.arange(np.prod(p.shape), dtype=np.float32).reshape(p.shape), decoder.params())
  on_cpu, on_gpu = DecodingWeights(decoder, params, "cpu"), DecodingWeights(decoder, params, "gpu")
  assert on_cpu.for_decoding is params
  apart = on_gpu.for_decoding
  jax.tree.map(np.testing.assert_array_equal, apart, decoder.apart(params))
  rows = [row for stack in decoder.stacks for row in apart[stack.name]]
  assert len(rows) == sum(stack.repeats for stack in decoder.stacks)
  jax.tree.map(np.testing.assert_array_equal, on_gpu.stacked, params)
