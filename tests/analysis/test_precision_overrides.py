"""Remedies: the candidate keys of a configuration, and the configuration with remedies, which can be written and loaded."""

import dataclasses

import pytest

from maxtext_like.analysis.precision_overrides import (
  Remedy,
  applied,
  candidates,
  groups,
  last_resorts,
  layers_of,
  reference,
  words,
  yaml,
)
from maxtext_like.config.load import load_config

OFF = ["float32_qk_product=false", "float32_logits=false", "float32_gate_product=false", "cast_logits_to_fp32=false"]
OFF += ["residual_dtype=bfloat16", "grad_dtype=bfloat16", "weight_dtype=bfloat16"]


def keys(found):
  return [r.key for r in found]


def test_every_key_that_is_not_safe_and_acts_is_a_candidate():
  common = ["float32_gate_product", "float32_qk_product", "float32_logits", "cast_logits_to_fp32", "residual_dtype"]
  common += ["grad_dtype", "weight_dtype", "logits_dot_in_fp32"]
  for name, own in (
    ("gemma3-tiny", []),
    ("gemma4-moe-tiny", ["float32_gate_logits", "float32_weight_sum"]),
    ("deepseek3-tiny", ["float32_gate_logits", "float32_weight_sum"]),
    ("deepseek3.2-tiny", ["indexer_float32_logits", "float32_gate_logits", "float32_weight_sum"]),
  ):
    config = load_config(name, ["dtype=bfloat16", *OFF, *(f"{key}=false" for key in own)]).config
    assert set(keys(candidates(config))) == {*common, *own}, name


def test_what_depends_on_dtype_and_machine():
  sixteen = load_config("gemma4-tiny", ["dtype=float16", "float16_clamp=false"]).config
  assert keys(candidates(sixteen)) == ["logits_dot_in_fp32", "loss_scale_init", "float16_clamp"]
  assert "matmul_precision" in keys(candidates(sixteen, "gpu"))
  assert keys(candidates(load_config("gemma4-tiny").config)) == []
  assert keys(candidates(load_config("gemma4-tiny", ["weight_dtype=bfloat16"]).config)) == ["weight_dtype"]
  pool = load_config("gemma4-tiny", ["dtype=float16", "use_multimodal=true", "float32_vision_pool=false"]).config
  assert "float32_vision_pool" in keys(candidates(pool))
  off = load_config("gemma4-tiny", ["dtype=float16", "float32_vision_pool=false"]).config
  assert "float32_vision_pool" not in keys(candidates(off))


def test_last_resorts_are_what_the_kernel_takes():
  assert [str(r) for r in last_resorts(load_config("gemma4-tiny", ["dtype=float16"]).config)] == [
    "dtype=bfloat16",
    "dtype=float32",
  ]
  fused = load_config("gemma4-tiny", ["dtype=bfloat16", "attention=cudnn_flash"]).config
  assert last_resorts(fused) == ()
  assert last_resorts(load_config("gemma4-tiny").config) == ()
  assert reference(fused).training.attention == "dot_product"


@pytest.mark.parametrize(
  "remedies",
  [
    (Remedy("float32_logits", True), Remedy("residual_dtype", "float32")),
    (Remedy("float32_gate_product", True, 1), Remedy("float32_gate_product", True, 2), Remedy("dtype", "float32", 4)),
    (Remedy("float32_qk_product", True), Remedy("float32_logits", True, 5)),
    (Remedy("dtype", "float32"),),
  ],
)
def test_what_is_printed_loads_as_what_was_measured(remedies):
  given = ["dtype=bfloat16", "float32_logits=false", "float32_qk_product=false"]
  given += ["layer_precision=[0 float32_qk_product=true, 4-5 float32_gate_product=true]"]
  before = load_config("gemma4-tiny", given).config
  after = applied(before, remedies)
  assert after != before
  again = load_config("gemma4-tiny", [*given, *words(before, after)]).config
  assert dataclasses.replace(again, model=before.model) == after


def test_a_key_of_the_whole_model_takes_the_place_of_those_of_layers():
  config = load_config("gemma4-tiny", ["dtype=bfloat16", "layer_precision=[2 float32_logits=false]"]).config
  remedy = Remedy("float32_logits", True)
  assert layers_of(config, remedy) == (2,)
  assert applied(config, [remedy]).precision.layer_precision == ()
  assert yaml(config, applied(config, [remedy])) == "precision:\n  layer_precision: []"


def test_the_loss_scale_is_a_key_of_training():
  config = load_config("gemma4-tiny", ["dtype=float16"]).config
  after = applied(config, [Remedy("loss_scale_init", None)], 64.0)
  assert yaml(config, after) == "training:\n  loss_scale_init: 64.0"


def test_groups_of_layers():
  assert groups(range(3), 8) == [(0,), (1,), (2,)]
  assert groups(range(10), 4) == [(0, 1), (2, 3, 4), (5, 6), (7, 8, 9)]
