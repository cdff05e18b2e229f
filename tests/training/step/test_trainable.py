"""The selection of trained parameters: splitting and merging, regular expressions, and refusals."""

import jax
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.layers.param import path_keys
from maxtext_like.training.step.program import make_program
from maxtext_like.training.step.trainable import merge, select
from tests.training.toy import toy_config, toy_decoder

MODEL = toy_config().model


def trained(program) -> set[str]:
  return set(program.labels)


def test_split_and_merge_are_inverse():
  decoder = toy_decoder()
  spec = decoder.params()
  selection = select(decoder, spec, MODEL, ("kernel",))
  trained, frozen = selection.split(spec)
  assert trained["embedding"]["table"] is None
  assert frozen["stack_0"]["layer_0"]["kernel"] is None
  assert frozen["stack_0"]["layer_0"]["bias"] is not None
  assert jax.tree.leaves(merge(trained, frozen)) == jax.tree.leaves(spec)


def test_a_pattern_that_fits_nothing_is_an_error():
  decoder = toy_decoder()
  with pytest.raises(UserError, match=r"'kernl' matches no parameter name; names look like embedding\.table"):
    select(decoder, decoder.params(), MODEL, ("kernel", "kernl"))


def test_nothing_trainable_is_an_error():
  decoder = toy_decoder()
  with pytest.raises(UserError, match="no parameter would be trained"):
    select(decoder, decoder.params(), MODEL, ("bias",))


def test_buffers_are_never_trained():
  program = make_program(load_config("gemma4-tiny").config)
  assert not any("layer_scalar" in name for name in trained(program))
  assert "layers.5.mlp.down" in trained(program)
  assert program.step.router_bias is None


def test_the_dense_warm_up_trains_the_indexer_alone():
  program = make_program(load_config("deepseek3.2-tiny", ["indexer_sparse_training=false"]).config)
  assert trained(program)
  assert all(".indexer." in name for name in trained(program))
  assert program.step.router_bias is None
  paths = [path_keys(path) for path, _ in jax.tree_util.tree_leaves_with_path(program.abstract_state["opt_state"])]
  assert not any("mlp" in keys for keys in paths)
  with pytest.raises(UserError, match="trains only the indexer"):
    make_program(load_config("deepseek3.2-tiny", ["indexer_sparse_training=false", "trainable_parameters_mask=['mlp']"]).config)
