"""The keys suggested under "what to try": those that act on the failed part or on the named scopes of the cause. Keys that
already have a safe value or act on nothing in the model are not suggested."""

import dataclasses

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.training.loop.remedies import Spot, step_remedies
from tests.training.toy import toy_config, with_precision

OFF = ["float32_qk_product=false", "float32_logits=false", "float32_gate_product=false", "cast_logits_to_fp32=false"]
MOE_OFF = ["float32_gate_logits=false", "float32_weight_sum=false"]


def test_what_is_safe_already_is_left_out():
  config = with_precision(toy_config(), dtype="bfloat16", float32_qk_product=False, residual_dtype=None)
  tips = step_remedies(config, "loss0")
  assert tips[0] == "float32_qk_product=true"
  assert "float32_logits=true" not in tips
  assert "residual_dtype=float32" in tips
  assert tips[-1] == "dtype=float32"
  assert not any("gate_logits" in tip for tip in tips)  # a dense model has no router
  training = dataclasses.replace(config.training, learning_rate=7.0)
  assert step_remedies(dataclasses.replace(config, training=training), "parameters") == ["a lower learning_rate (now 7)"]


def test_what_failed_chooses_the_keys():
  config = load_config("gemma4-tiny", ["dtype=float16", "grad_dtype=bfloat16", "weight_dtype=bfloat16", *OFF]).config
  forward = ["float32_qk_product=true", "float32_logits=true", "float32_gate_product=auto", "cast_logits_to_fp32=true"]
  wider = ["dtype=bfloat16", "dtype=float32"]
  slower, scale = "a lower learning_rate (now 0.003)", "a lower loss_scale_init (now 32768)"
  config = dataclasses.replace(config, training=dataclasses.replace(config.training, learning_rate=0.003))
  assert step_remedies(config, "loss0") == [*forward, *wider]
  assert step_remedies(config, "loss1") == [*forward, *wider, slower]
  assert step_remedies(config, "gradients") == [*forward, "grad_dtype=float32", scale, *wider, slower]
  assert step_remedies(config, "parameters") == ["weight_dtype=float32", slower]
  assert step_remedies(load_config("gemma4-tiny").config, "loss0")[0].startswith("check the weights")


@pytest.mark.parametrize(
  ("scopes", "direction", "dtype", "expected"),
  [
    ("attention/qk_product", "forward", "bfloat16", ["float32_qk_product=true"]),
    ("attention/softmax", "recomputed", "bfloat16", ["float32_logits=true", "grad_dtype=float32"]),
    ("moe/router", "forward", "bfloat16", ["float32_gate_logits=true"]),
    ("moe/experts/gate_product", "forward", "bfloat16", ["float32_gate_product=true"]),
    ("moe/weight_sum", "forward", "bfloat16", ["float32_weight_sum=true"]),
    ("residual", "forward", "bfloat16", ["residual_dtype=float32"]),
    ("mlp/up", "backward", "bfloat16", ["float32_gate_product=true", "grad_dtype=float32", "residual_dtype=float32"]),
    ("attention", "forward", "bfloat16", ["dtype=float32"]),
    ("loss", "forward", "float32", ["dtype=float32", "a lower learning_rate (now 0.003)"]),
  ],
)
def test_the_scopes_of_a_cause_choose_the_keys(scopes, direction, dtype, expected):
  config = load_config("gemma4-moe-tiny", ["dtype=bfloat16", "grad_dtype=bfloat16", *OFF, *MOE_OFF]).config
  spot = Spot(scopes.split("/"), direction, dtype)
  assert step_remedies(config, spot.failed, spot) == expected


def test_weights_that_overflow_want_a_wider_dtype_or_smaller_steps():
  """Moments that overflow in the same update need a wider mu_dtype instead."""
  config = load_config("gemma4-tiny", ["weight_dtype=float16", "dtype=bfloat16"]).config
  slower = f"a lower learning_rate (now {config.training.learning_rate:g})"
  weights, moment = (Spot(scopes, "update", "float16") for scopes in (["optimizer", "parameters"], ["optimizer"]))
  assert step_remedies(config, weights.failed, weights) == ["weight_dtype=float32", slower]
  assert step_remedies(config, moment.failed, moment)[0] == "mu_dtype=float32"
  config = load_config("gemma4-tiny", ["weight_dtype=float16", "dtype=bfloat16", "opt_type=adafactor"]).config
  assert not any("mu_dtype" in key for key in step_remedies(config, moment.failed, moment))  # adafactor has no mu


def test_a_float16_cotangent_has_its_scale():
  config = load_config("gemma4-tiny", ["dtype=float16"]).config
  spot = Spot(["attention", "pv_product"], "backward", "float16")
  assert step_remedies(config, spot.failed, spot) == ["a lower loss_scale_init (now 32768)"]
  spot = Spot(["attention", "pv_product"], "forward", "float16")
  assert step_remedies(config, spot.failed, spot) == ["dtype=bfloat16"]


def test_the_pooler_is_named_where_there_are_images():
  words = ["dtype=float16", "float32_vision_pool=false"]
  for more, expected in ((["use_multimodal=true"], True), ([], False)):
    assert (
      "float32_vision_pool=true" in step_remedies(load_config("gemma4-tiny", [*words, *more]).config, "loss0")
    ) == expected
