"""``layer_precision``: accepted entries, refusals and their messages, and the conversion back to text."""

import pytest

from maxtext_like.config.layer_precision import layer_values, written
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError


def error(name, *words):
  with pytest.raises(UserError) as refused:
    load_config(name, words)
  return str(refused.value)


def test_ranges_and_single_layers_are_read():
  values = layer_values(("1-2 dtype=float32", "4 float32_gate_product=auto matmul_precision=high"), 6)
  two = {"dtype": "float32"}
  assert values == [{}, two, two, {}, {"float32_gate_product": "auto", "matmul_precision": "high"}, {}]


def test_what_is_written_is_read_as_the_same():
  own = {"float32_gate_product": True, "float32_logits": False}
  values = [{}, own, own, {"dtype": "float32"}, {}, {"dtype": "float32"}]
  entries = written(values)
  assert entries == ("1-2 float32_gate_product=true float32_logits=false", "3 dtype=float32", "5 dtype=float32")
  assert layer_values(entries, 6) == values
  assert written([{}, {}]) == ()


def test_the_resolved_configuration_can_be_used_again(tmp_path):
  words = ["dtype=bfloat16", "layer_precision=[0-1 dtype=float32, 3 float32_gate_product=true float32_logits=false]"]
  loaded = load_config("gemma4-tiny", words)
  assert loaded.config.precision.layer_precision == ("0-1 dtype=float32", "3 float32_gate_product=true float32_logits=false")
  path = tmp_path / "gemma4-tiny.yml"
  path.write_text(loaded.to_yaml())
  assert load_config(path).config == loaded.config


@pytest.mark.parametrize(
  ("name", "entries", "reason"),
  [
    ("gemma4-tiny", "[6 float32_logits=false]", "the model has layers 0 to 5"),
    ("gemma4-tiny", "[3-2 float32_logits=false]", "the model has layers 0 to 5"),
    ("gemma4-tiny", "[0-2 float32_logits=false, 2 dtype=float32]", "layer 2 is also in '0-2 float32_logits=false'"),
    ("gemma4-tiny", "[1]", "'1': expected a layer or a range"),
    ("gemma4-tiny", "[-1 dtype=float32]", "expected a layer or a range"),
    ("gemma4-tiny", "[dtype=float32]", "expected a layer or a range"),
    ("gemma4-tiny", '[""]', "expected a layer or a range"),
    ("gemma4-tiny", "[1 dtype]", "'dtype' is not key=value"),
    ("gemma4-tiny", "[1 dtype=float64]", "dtype: 'float64' is not one of float32, bfloat16, float16"),
    ("gemma4-tiny", "[1 dtype=float32 dtype=bfloat16]", "dtype is set twice"),
    ("gemma4-tiny", "[1 flaot32_logits=true]", "unknown key 'flaot32_logits', did you mean 'float32_logits'?"),
    ("gemma4-tiny", "[1 residual_dtype=float32]", "residual_dtype applies to the model"),
    ("gemma4-tiny", "[1 dtype=bfloat16]", "dtype=bfloat16 in layer 1: the model has that value"),
    ("gemma4-tiny", "[1 dtype=float16]", "float16 needs a loss scale"),
    ("gemma4-tiny", "[1-2 float32_logits=true]", "float32_logits=true in layers 1-2: the model has that value"),
    ("gemma4-tiny", "[1 float32_gate_product=auto]", "the model has that value"),
    ("gemma4-tiny", "[1 float32_gate_product=false]", "the model has that value"),
    ("gemma4-tiny", "[1 dtype=float32 float32_logits=false]", "everything in float32"),
    ("gemma4-tiny", "[1 float16_clamp=false]", "only with dtype float16"),
    ("gemma4-tiny", "[1 float32_gate_logits=false]", "it has no experts"),
    ("gemma4-tiny", "[1 indexer_float32_logits=false]", "the model has no sparse indexer"),
    ("deepseek3-tiny", "[0-2 float32_gate_logits=false]", "float32_gate_logits=false in layer 0: it has no experts"),
    ("deepseek3-tiny", "[1 indexer_float32_logits=false]", "the model has no sparse indexer"),
  ],
)
def test_what_cannot_be_or_does_nothing_is_refused(name, entries, reason):
  text = error(name, "dtype=bfloat16", f"layer_precision={entries}")
  assert reason in text
  assert "layer_precision=" in text  # the error names its place


def test_auto_means_what_it_means_for_the_layer_s_dtype():
  words = ["dtype=float16", "layer_precision=[1 dtype=bfloat16 float32_gate_product=true]"]
  assert load_config("gemma4-tiny", words).config.precision.layer_precision
  assert "the model has that value" in error("gemma4-tiny", "dtype=float16", "layer_precision=[1 float32_gate_product=true]")
