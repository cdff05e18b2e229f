"""Settings of peft's adapter_config.json: types, and modules that the settings leave out although they have tensors."""

import pytest

from maxtext_like.checkpoint.huggingface.peft_settings import require_target, require_valid
from maxtext_like.errors import UserError

MODULE = "model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
  ("config", "said"),
  [
    ({"use_rslora": "false"}, "use_rslora = 'false' is not true or false"),
    ({"use_rslora": "yes"}, "use_rslora = 'yes' is not true or false"),
    ({"use_rslora": 1}, "use_rslora = 1 is not true or false"),
    ({"use_dora": "true"}, "use_dora = 'true' is not true or false"),
    ({"ensure_weight_tying": 0}, "ensure_weight_tying = 0 is not true or false"),
    ({"lora_dropout": 1.5}, "lora_dropout = 1.5 is not a number from 0 to below 1"),
    ({"lora_dropout": -0.1}, "lora_dropout = -0.1 is not a number from 0 to below 1"),
    ({"lora_dropout": "0.1"}, "lora_dropout = '0.1' is not a number"),
    ({"lora_dropout": float("nan")}, "lora_dropout = nan is not a number"),
    ({"target_modules": 3}, "target_modules = 3 is neither a text nor a list of texts"),
    ({"exclude_modules": [None]}, "exclude_modules = \\[None\\] is neither a text nor a list of texts"),
    ({"layers_to_transform": "1"}, "layers_to_transform = 1 is neither a layer nor a list of layers"),
    ({"layers_to_transform": [True]}, "layers_to_transform = \\[True\\] is neither a layer nor"),
  ],
)
def test_a_value_of_another_type_is_refused(config, said):
  with pytest.raises(UserError, match=f"file: {said}"):
    require_valid(config, "file")


def test_values_that_peft_writes_are_accepted():
  require_valid({"use_rslora": None, "use_dora": False, "lora_dropout": 0.1, "layers_to_transform": 3}, "file")
  require_valid({"target_modules": r".*\.q_proj", "layers_to_transform": [0, 1], "layers_pattern": "layers"}, "file")
  require_valid({"lora_dropout": 0, "target_modules": ["q_proj"], "exclude_modules": None, "use_rslora": True}, "file")


@pytest.mark.parametrize(
  ("config", "left_out_by"),
  [
    ({}, None),
    ({"target_modules": ["q_proj"]}, None),
    ({"target_modules": ["self_attn.q_proj"]}, None),
    ({"target_modules": [MODULE]}, None),
    ({"target_modules": ["model.language_model.layers.3.self_attn.q_proj"]}, None),  # the name in another class
    ({"target_modules": "all-linear"}, None),
    ({"target_modules": r".*layers\.[0-3]\..*q_proj"}, None),
    ({"target_modules": ["q_proj"], "layers_to_transform": [3]}, None),
    ({"target_modules": ["q_proj"], "layers_to_transform": 3, "layers_pattern": ["blocks", "layers"]}, None),
    ({"target_modules": ["q_proj"], "layers_to_transform": [], "exclude_modules": ["k_proj"]}, None),
    ({"target_modules": []}, "target_modules"),
    ({"target_modules": ["proj", "v_proj"]}, "target_modules"),
    ({"target_modules": "q_proj"}, "target_modules"),  # a regular expression matches the complete name
    ({"target_modules": ["q_proj"], "layers_to_transform": [0, 1]}, "layers_to_transform"),
    ({"target_modules": ["q_proj"], "layers_to_transform": 0}, "layers_to_transform"),
    ({"target_modules": ["q_proj"], "layers_to_transform": [3], "layers_pattern": "blocks"}, "layers_to_transform"),
    ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "exclude_modules"),
    ({"target_modules": ["q_proj"], "exclude_modules": r".*\.3\..*"}, "exclude_modules"),
  ],
)
def test_a_module_with_tensors_that_the_settings_leave_out_is_refused(config, left_out_by):
  if left_out_by is None:
    return require_target(config, MODULE, "file")
  with pytest.raises(UserError, match=rf"file: {left_out_by} = .* leaves out '{MODULE}', which has tensors in the adapter"):
    require_target(config, MODULE, "file")


def test_a_wrong_expression_is_refused():
  with pytest.raises(UserError, match=r"file: exclude_modules '\(': .*"):
    require_target({"exclude_modules": "("}, MODULE, "file")
