"""Tests the note on a learning rate that is too high for loaded weights."""

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.training.run.start import high_rate_note


@pytest.mark.parametrize(
  ("model", "words", "noted"),
  [
    ("gemma3-4b", (), True),
    ("gemma3-4b", ("learning_rate=1e-4",), True),
    ("gemma3-4b", ("learning_rate=5e-5",), False),
    ("gemma3-4b", ("recipes/full.yml",), False),
    ("gemma3-4b", ("lora_rank=4",), False),
    ("gemma3-4b", ("lora_from=y",), False),
    ("gemma3-4b", ('trainable_parameters_mask=[".*mlp.*"]',), False),
    ("deepseek3.2-671b", ("indexer_sparse_training=false",), False),  # trains only the new indexer
    ("deepseek3.2-671b", ("indexer_sparse_training=true",), True),
  ],
)
def test_a_rate_for_random_weights_is_noted_if_all_loaded_weights_are_trained(model, words, noted):
  note = high_rate_note(load_config(model, ["init_from=x", *words]).config)
  assert (note is not None) == noted
  if note is not None:
    assert "recipes/full.yml" in note
