"""A checkpoint that is loaded into a model with a larger vocabulary: the rows of new tokens are the mean of the others, and all
other weights are unchanged."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from maxtext_like.api.config import load_config
from maxtext_like.checkpoint.added_rows import fewer_rows
from maxtext_like.checkpoint.read_weights import read_weights
from maxtext_like.errors import UserError
from maxtext_like.models.model import make_model

GOLDEN = Path(__file__).parents[1] / "golden"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def model_of(name: str, **keys: object):
  loaded = load_config(GOLDEN / name / "checkpoint", weight_dtype="float32", dtype="float32", max_target_length=8, **keys)
  return make_model(loaded.config, runs_attention=False)


@pytest.mark.parametrize(("name", "tied"), [("gemma3_text", True), ("qwen3", True), ("deepseek3", False), ("gemma4_e2b", True)])
def test_new_rows_are_the_mean_of_the_others(name, tied, caplog):
  directory = GOLDEN / name / "checkpoint"
  plain = model_of(name)
  size = plain.config.model.vocab_size
  larger = model_of(name, vocab_size=size + 5)
  before, after = read_weights(directory, plain), read_weights(directory, larger)
  assert f"fewer token ids than vocab_size={size + 5}: rows are added to embedding.table ({size}, " in caplog.text
  assert jax.tree.map(jnp.shape, after) == jax.tree.map(lambda x: x.shape, larger.abstract_params)
  stored = load_file(directory / "model.safetensors")
  table = np.asarray(stored[next(key for key in stored if key.endswith("embed_tokens.weight"))], np.float32)
  np.testing.assert_array_equal(after["embedding"]["table"][:size], table)
  np.testing.assert_allclose(after["embedding"]["table"][size:], [table.mean(0)] * 5, rtol=1e-5, atol=1e-7)
  assert ("head" in after) is not tied
  if not tied:
    head = np.asarray(stored[HEAD], np.float32).T
    np.testing.assert_array_equal(after["head"]["kernel"][:, :size], head)
    np.testing.assert_allclose(after["head"]["kernel"][:, size:], np.stack([head.mean(1)] * 5, 1), rtol=1e-5, atol=1e-7)
  for key in before:
    if key not in ("embedding", "head"):
      jax.tree.map(np.testing.assert_array_equal, after[key], before[key])


def test_rows_that_a_checkpoint_lacks_are_counted(tmp_path):
  directory = GOLDEN / "gemma4_e2b" / "checkpoint"
  model: Any = model_of("gemma4_e2b").config.model
  rows, per_layer = model.vocab_size, model.vocab_size_per_layer_input
  larger: Any = model_of("gemma4_e2b", vocab_size=rows + 5, vocab_size_per_layer_input=per_layer + 6).config.model
  assert fewer_rows(directory, model) == {}
  assert fewer_rows(directory, larger) == {
    "vocab_size": (rows, rows + 5), "vocab_size_per_layer_input": (per_layer, per_layer + 6),
  }  # fmt: skip
  assert fewer_rows(directory, model_of("qwen3").config.model) == {}
  assert fewer_rows(tmp_path / "gone", larger) == {}


def test_the_rows_that_every_layer_reads_grow_by_their_own_key():
  plain: Any = model_of("gemma4_e2b").config.model
  rows = plain.vocab_size_per_layer_input or plain.vocab_size
  keys = {"vocab_size": plain.vocab_size + 5, "vocab_size_per_layer_input": rows + 5}
  model = model_of("gemma4_e2b", **keys)
  found = read_weights(GOLDEN / "gemma4_e2b" / "checkpoint", model)
  assert jax.tree.map(jnp.shape, found) == jax.tree.map(lambda x: x.shape, model.abstract_params)


def test_null_rows_of_the_table_of_every_layer_are_those_of_the_vocabulary():
  plain: Any = model_of("gemma4_e2b").config.model
  assert plain.vocab_size_per_layer_input == plain.vocab_size  # config.json sets both
  for size in (plain.vocab_size, plain.vocab_size + 5):
    model = model_of("gemma4_e2b", vocab_size=size, vocab_size_per_layer_input=None)
    found = read_weights(GOLDEN / "gemma4_e2b" / "checkpoint", model)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(lambda x: x.shape, model.abstract_params)


def test_a_smaller_vocabulary_is_another_model():
  with pytest.raises(UserError, match=r"vocab_size: config.json 144, this run 16"):
    read_weights(GOLDEN / "qwen3" / "checkpoint", model_of("qwen3", vocab_size=16))
