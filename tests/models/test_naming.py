"""Tests readable names of parameters: each row of each leaf has its own name, with the number of its layer in the model."""

from typing import Any

import jax
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.layers.param import path_keys
from maxtext_like.layers.precision import Precision
from maxtext_like.models.build import build_decoder
from maxtext_like.models.naming import parameter_name, row_names

TINY = ["gemma3-tiny", "gemma4-tiny", "gemma4-moe-tiny", "gemma4-e2b-tiny", "deepseek3-tiny", "deepseek3.2-tiny"]


def decoder_of(name) -> Any:
  return build_decoder(load_config(name).config.model, Precision())


@pytest.mark.parametrize("name", TINY)
def test_every_row_has_one_name_and_every_layer_its_own_parameters(name):
  decoder = decoder_of(name)
  spec = decoder.params()
  names = [row for path, _ in jax.tree_util.tree_leaves_with_path(spec) for row in row_names(decoder, path_keys(path))]
  assert len(names) == len(set(names))
  for i, layer in enumerate(decoder.layers):
    own = {".".join(path_keys(path)) for path, _ in jax.tree_util.tree_leaves_with_path(layer.params())}
    assert {n.removeprefix(f"layers.{i}.") for n in names if n.startswith(f"layers.{i}.")} == own
  rest = {n for n in names if not n.startswith("layers.")}
  assert {n.split(".")[0] for n in rest} <= {"embedding", "ple", "final_norm", "head"}


@pytest.mark.parametrize("name", TINY)
def test_names_and_locate_agree(name):
  decoder = decoder_of(name)
  for i in range(len(decoder.layers)):
    stack, row, layer = decoder.locate(i)
    path = (stack, layer, "pre_attention_norm", "scale")
    assert parameter_name(decoder, path, row) == f"layers.{i}.pre_attention_norm.scale"


def test_a_whole_leaf_names_its_layers():
  decoder = decoder_of("gemma3-4b")  # five blocks of six layers, followed by four sliding layers
  assert parameter_name(decoder, ("embedding", "table")) == "embedding.table"
  assert parameter_name(decoder, ("stack_0", "layer_1", "mlp", "down"), 3) == "layers.19.mlp.down"
  assert parameter_name(decoder, ("stack_0", "layer_1", "mlp", "down")) == "layers.1,7,..,25.mlp.down"
  assert parameter_name(decoder, ("stack_1", "layer_0", "attention", "q_norm", "scale")) == (
    "layers.30,31,32,33.attention.q_norm.scale"
  )
  assert parameter_name(decoder_of("deepseek3-tiny"), ("stack_0", "layer_0", "mlp", "up")) == "layers.0.mlp.up"


def test_a_row_that_is_not_there():
  with pytest.raises(IndexError):
    parameter_name(decoder_of("gemma3-4b"), ("stack_1", "layer_0", "mlp", "up"), 4)
