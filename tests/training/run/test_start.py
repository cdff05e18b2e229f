"""Tests the start lines about the weights: their source, and what is unusual about it."""

from pathlib import Path

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.training.run.start import high_rate_note, random_weights_warning, weights_source


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


@pytest.mark.parametrize(
  ("words", "resumed", "line"),
  [
    (["seed=3"], None, "random, init_scheme=depth_scaled, seed=3"),
    (["init_from=x"], None, "from x (init_from)"),
    (["init_from=x", "lora_from=y"], None, "from x (init_from); adapter from y (lora_from)"),
    (["init_from=x"], "runs/a/checkpoints/20", "resumed from runs/a/checkpoints/20"),
    (["init_from=x", "lora_rank=2"], "a/2", "from x (init_from); adapter resumed from a/2"),
  ],
)
def test_the_source_of_the_weights(words, resumed, line):
  assert weights_source(load_config("gemma3-tiny", words).config, resumed and Path(resumed)) == line


@pytest.mark.parametrize(
  ("words", "warned"),
  [
    ([], False),
    (["init_from=x", "lora_rank=2"], False),
    (["lora_rank=2"], True),
    (["recipes/qlora.yml"], True),
    (["dataset=jsonl", "dataset_path=c.jsonl", "data_format=chat"], True),
    (["dataset=jsonl", "dataset_path=c.jsonl", "data_format=chat", "init_from=x"], False),
  ],
)
def test_fine_tuning_of_random_weights_is_a_warning(words, warned):
  warning = random_weights_warning(load_config("gemma3-tiny", words).config)
  assert (warning is not None) == warned
  assert warning is None or "\n  fix: init_from=DIR" in warning
