"""config.json: both forms give the same model, omitted fields have Hugging Face's defaults, and the rest is refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from maxtext_like.checkpoint.huggingface.config import (
  export_config,
  interpret,
  lost_losses,
  read_config,
  require_same_model,
)
from maxtext_like.config.load import load_config, make_section
from maxtext_like.config.model import ModelConfig
from maxtext_like.errors import UserError

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config_as_saved_by_transformers.json"))


def build(values: dict[str, Any]) -> ModelConfig:
  return make_section("model", values)


def hub(case: str) -> dict[str, Any]:
  return json.loads((GOLDEN / case / "checkpoint" / "config.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_both_forms_give_the_same_model(case: str):
  saved = json.loads((GOLDEN / case / "config_as_saved_by_transformers.json").read_text())
  from_hub, from_saved = read_config(GOLDEN / case / "checkpoint"), interpret(saved, "saved")
  assert from_hub.model == from_saved.model
  assert from_hub.vision == from_saved.vision
  assert build(from_hub.model) == build(from_saved.model)


@pytest.mark.parametrize("case", CASES)
def test_exported_config_gives_the_model_back(case: str):
  values = read_config(GOLDEN / case / "checkpoint").model
  model = build(values)
  again = interpret(json.loads(json.dumps(export_config(model, "bfloat16"))), "exported")
  assert again.dtype == "bfloat16"
  difference = {key: (values[key], again.model[key]) for key in values if values[key] != again.model[key]}
  difference.pop("model_name", None)
  if case == "gemma3_vision":  # the text model is exported, which has no images
    assert difference.pop("use_bidirectional_image_attn") == (True, False)
  assert not difference


def values(config: dict[str, Any]) -> dict[str, Any]:
  return interpret(config, "config.json").model


def test_sparse_gemma3_takes_the_class_defaults():
  text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
  text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
  model = values({"model_type": "gemma3", "text_config": text})
  assert (model["vocab_size"], model["head_dim"]) == (262208, 256)
  assert (model["num_query_heads"], model["num_kv_heads"]) == (8, 4)
  assert (model["query_pre_attn_scalar"], model["rope_linear_scaling_factor"]) == (256.0, 8.0)
  assert (model["rope_max_timescale"], model["local_rope_max_timescale"]) == (1e6, 1e4)
  assert (model["layer_types"], model["inhomogeneous_layer_cycle_interval"]) == (None, 6)
  assert model["logits_via_embedding"]
  assert values({"model_type": "gemma3", "text_config": {}})["sliding_window_size"] == 4096


def test_gemma4_defaults_that_surprise():
  model = values({"model_type": "gemma4_text", "num_hidden_layers": 8})
  assert model["global_head_dim"] == 512  # does not follow head_dim
  assert model["hidden_size_per_layer_input"] == 256  # per-layer embeddings are on by default
  assert model["num_kv_shared_layers"] == 0
  assert model["global_rope_proportion"] == 0.25
  assert model["layer_types"] == (*("sliding",) * 5, "global", "sliding", "global")  # the last layer is always global
  config = {"model_type": "gemma4_text", "num_global_key_value_heads": 2}
  assert values(config)["global_num_kv_heads"] is None  # used only with attention_k_eq_v
  assert values(config | {"attention_k_eq_v": True})["global_num_kv_heads"] == 2


# The meaning of null in transformers 5.23, found by running it. Most classes refuse null, these do not.
NULLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
  ({"model_type": "deepseek_v3", "norm_topk_prob": None}, {"norm_topk_prob": False}),
  ({"model_type": "deepseek_v3", "rope_interleave": None}, {"rope_interleave": False}),
  ({"model_type": "deepseek_v3", "q_lora_rank": None}, {"q_lora_rank": 0}),
  ({"model_type": "deepseek_v3", "pad_token_id": None, "bos_token_id": None}, {"pad_token_id": None, "bos_token_id": None}),
  (
    {"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": None, "mscale": None}},
    {"beta_fast": 32.0, "mscale": 0.0},
  ),
  ({"model_type": "deepseek_v32", "rope_interleave": None}, {"rope_interleave": True}),  # not a field of this class
  ({"model_type": "gemma3_text", "final_logit_softcapping": None, "layer_types": None}, {"final_logits_soft_cap": None}),
  ({"model_type": "gemma3_text", "rope_parameters": None, "eos_token_id": None}, {"eos_token_id": None}),
  ({"model_type": "gemma3", "text_config": {}, "tie_word_embeddings": None}, {"logits_via_embedding": False}),
  ({"model_type": "gemma4_text", "num_global_key_value_heads": None, "attention_k_eq_v": True}, {"global_num_kv_heads": None}),
]


@pytest.mark.parametrize(("config", "expected"), NULLS)
def test_null_is_what_it_is_in_transformers(config: dict[str, Any], expected: dict[str, Any]):
  found = values(config)
  assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
  ("model_type", "change"),
  [
    ("gemma3_text", {"hidden_size": None}),
    ("gemma3_text", {"sliding_window": None}),
    ("gemma3_text", {"hidden_activation": None}),
    ("gemma3_text", {"tie_word_embeddings": None}),
    ("gemma3_text", {"rope_theta": None}),
    ("gemma4_text", {"num_kv_shared_layers": None}),
    ("gemma4_text", {"global_head_dim": None}),
    ("gemma4_text", {"enable_moe_block": None}),
    ("deepseek_v3", {"n_group": None}),
    ("deepseek_v3", {"num_experts_per_tok": None}),
    ("deepseek_v3", {"v_head_dim": None}),
    ("deepseek_v32", {"norm_topk_prob": None}),
  ],
)
def test_null_where_transformers_fails_is_refused(model_type: str, change: dict[str, Any]):
  with pytest.raises(UserError, match=f"{next(iter(change))}: is null, which transformers"):
    values({"model_type": model_type} | change)
  values({"model_type": model_type})


def test_yarn_that_is_not_truncated_is_refused_in_either_spelling():
  for no in (None, False):
    with pytest.raises(UserError, match="truncate"):
      values({"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "factor": 4, "truncate": no}})


def test_the_class_with_the_head_decides_whether_it_is_tied():
  """transformers never reads ``tie_word_embeddings`` in text_config, because the class with the head is the outer one."""
  yes, no = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
  for top, text, tied in [({}, False, True), (yes, False, True), (no, True, False)]:
    for model_type in ("gemma3", "gemma4"):
      config = {"model_type": model_type, "text_config": {"tie_word_embeddings": text}} | top
      assert values(config)["logits_via_embedding"] == tied


def test_keys_that_override_or_do_nothing():
  yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
  config = {"model_type": "deepseek_v3", "rope_scaling": yarn, "original_max_position_embeddings": 32}
  assert values(config)["original_max_position_embeddings"] == 32  # as in transformers, the top level wins
  assert values({"model_type": "gemma3_text", "_sliding_window_pattern": 2})["inhomogeneous_layer_cycle_interval"] == 6
  for config in ({"model_type": "deepseek_v3"}, {"model_type": "gemma3_text"}):
    with pytest.raises(UserError, match=r"partial_rotary_factor: 0\.5 is not supported"):
      values(config | {"partial_rotary_factor": 0.5})
  with pytest.raises(UserError, match="rope_parameters: sliding_attention: is missing"):
    values({"model_type": "gemma4_text", "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}})


@pytest.mark.parametrize(
  ("written", "read"), [(1, 1), ([1], 1), ([1, 106], (1, 106)), ([106, 1, 106], (106, 1)), (10**6, 10**6), (None, None)]
)
def test_tokens_that_end_an_answer(written: object, read: object):
  assert values({"model_type": "gemma3_text", "eos_token_id": written})["eos_token_id"] == read
  assert values({"model_type": "gemma3", "text_config": {"eos_token_id": written}})["eos_token_id"] == read
  if written is not None:
    assert values({"model_type": "gemma3", "text_config": {"eos_token_id": 7}, "eos_token_id": written})["eos_token_id"] == read


def test_deepseek_defaults_differ_between_v3_and_v32():
  assert values({"model_type": "deepseek_v3"})["max_position_embeddings"] == 4096
  model = values({"model_type": "deepseek_v32"})
  assert model["max_position_embeddings"] == 163840
  assert (model["indexer_topk"], model["indexer_n_heads"], model["indexer_head_dim"]) == (2048, 64, 128)
  assert model["rope_interleave"]
  assert values({"model_type": "deepseek_v3", "q_lora_rank": None})["q_lora_rank"] == 0
  assert values({"model_type": "deepseek_v3"})["q_lora_rank"] == 1536
  yarn = {"type": "yarn", "factor": 40, "mscale": 1.0}
  model = values({"model_type": "deepseek_v3", "rope_scaling": yarn, "max_position_embeddings": 8192})
  assert (model["original_max_position_embeddings"], model["mscale_all_dim"]) == (8192, 0.0)


@pytest.mark.parametrize(
  ("case", "change", "message"),
  [
    ("gemma3_text", {"model_type": "llama"}, "model_type 'llama' is not supported; .*gemma3"),
    ("gemma3_text", {"model_type": None}, "model_type missing"),
    ("gemma3_text", {"model_type": "gemma3"}, "text_config is missing"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation: 'gelu' is not supported"),
    ("gemma3_text", {"attention_bias": True}, "attention_bias: True is not supported"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"hidden_size": "48"}, "hidden_size: '48' is not an integer"),
    ("gemma3_text", {"hidden_size": -1}, "hidden_size: -1 is not an integer from 1"),
    ("gemma3_text", {"hidden_size": True}, "hidden_size: True is not"),
    ("gemma3_text", {"hidden_size": 2**40}, "hidden_size"),
    ("gemma3_text", {"rms_norm_eps": 0}, "rms_norm_eps: 0 is not a number above 0"),
    ("qwen3_moe", {"router_aux_loss_coef": -0.1}, "router_aux_loss_coef: -0.1 is not a number that is 0 or above"),
    ("qwen3_moe", {"router_aux_loss_coef": True}, "router_aux_loss_coef: True is not a number"),
    ("deepseek3", {"aux_loss_alpha": -1}, "aux_loss_alpha: -1 is not a number that is 0 or above"),
    ("gemma3_text", {"rope_scaling": {"rope_type": "yarn", "factor": 8}}, "'yarn' is not supported for Gemma 3"),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear"}}, "factor: is missing"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8}}, "type: transformers 5 .*rope_type"),
    ("gemma3_text", {"rope_scaling": [1]}, "rope_scaling: .* is not an object"),
    ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types: has 1 entries, .* 7 layers"),
    ("gemma3_text", {"layer_types": ["chunked_attention"] * 7}, "'chunked_attention' is not one of"),
    ("gemma3_text", {"tie_word_embeddings": "yes"}, "is not true or false"),
    ("gemma4_dense", {"use_bidirectional_attention": "all"}, "only null and 'vision'"),
    ("gemma4_dense", {"num_kv_shared_layers": 6}, "num_kv_shared_layers: 6 of 6"),
    ("gemma4_dense", {"enable_moe_block": True}, "num_experts: is missing"),
    ("gemma4_dense", {"per_layer_config": {"x": {}}}, "x: is not the number of a layer"),
    ("gemma4_dense", {"per_layer_config": {"9": {}}}, "9: is not the number of a layer"),
    ("gemma4_dense", {"per_layer_config": {"1": {"head_dim": 4}}}, "1: a sliding layer"),
    ("gemma4_dense", {"per_layer_config": {"2": {"head_dim": 4}}}, "global layers differ"),
    ("gemma4_dense", {"per_layer_config": {"2": {"intermediate_size": 4}}}, "'intermediate_size' cannot differ"),
    ("gemma4_dense", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "sliding layers"),
    ("gemma4_dense", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn' is not supported"),
    ("deepseek3", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
    ("deepseek3", {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported"),
    ("deepseek3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek3", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' is not supported for DeepSeek"),
    ("deepseek3", {"rope_scaling": {"type": "yarn"}}, "factor: is missing"),
    ("deepseek3", {"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 1.1}}, "attention_factor"),
    ("deepseek3", {"quantization_config": {"quant_method": "awq"}}, "quant_method: 'awq' is not supported"),
    ("deepseek3", {"quantization_config": {"bits": 4}}, "quant_method: 'missing'"),
    ("deepseek3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, "list of two"),
    ("deepseek32", {"q_lora_rank": None}, "q_lora_rank: is null"),
    ("deepseek32", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "dense layers followed by sparse"),
  ],
)
def test_what_is_not_supported_is_refused_by_name(case: str, change: dict[str, Any], message: str):
  with pytest.raises(UserError, match=message) as error:
    interpret(hub(case) | change, f"{case}/config.json")
  assert str(error.value).startswith(f"{case}/config.json")


@pytest.mark.parametrize(
  ("content", "reason"),
  [
    (b"", "JSON"),
    (b"[1]", "not a JSON object"),
    (b'{"model_type": ', "JSON"),
    (b"\xff", "UTF-8"),
    (b'{"model_type": "gemma3", "model_type": "gemma4"}', "listed twice"),
    (b'{"a": NaN}', "NaN"),
    (b"[" * 100_000, "nested too deeply"),
    (b" " * (5 << 20), "more than the"),
  ],
)
def test_malformed_config(tmp_path: Path, content: bytes, reason: str):
  (tmp_path / "config.json").write_bytes(content)
  with pytest.raises(UserError, match=reason) as error:
    read_config(tmp_path)
  assert str(tmp_path) in str(error.value)


def test_missing_config(tmp_path: Path):
  with pytest.raises(UserError, match="has no config"):
    read_config(tmp_path)


def test_code_of_the_repository_is_data(tmp_path: Path):
  (tmp_path / "modeling_x.py").write_text("raise SystemExit('ran')")
  config = hub("gemma3_text") | {"auto_map": {"AutoModelForCausalLM": "modeling_x.Model"}}
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert read_config(tmp_path).model == values(hub("gemma3_text"))


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_the_one_of_its_own_config(case: str):
  config = read_config(GOLDEN / case / "checkpoint")
  model = build(config.model)
  require_same_model(config, model, GOLDEN)
  require_same_model(config, dataclasses.replace(model, model_name="mine", eos_token_id=7), GOLDEN)


@pytest.mark.parametrize(
  ("case", "change"),
  [
    ("gemma3_text", {"query_pre_attn_scalar": None}),
    ("deepseek3", {"routed_scaling_factor": 1.0}),
    ("deepseek3", {"mscale_all_dim": 0.5}),
  ],
)
def test_another_model_of_the_same_shapes_is_refused_unless_that_is_allowed(case: str, change: dict[str, Any]):
  config, key = read_config(GOLDEN / case / "checkpoint"), next(iter(change))
  model = dataclasses.replace(build(config.model), **change)
  with pytest.raises(
    UserError, match=rf"other results than the checkpoint's.*:\n  {key}: config.json .*\n  why: .*\n  fix: {key}="
  ):
    require_same_model(config, model, GOLDEN)
  require_same_model(config, model, GOLDEN, allow_model_change=True)


def test_other_stacks_of_layers_are_refused_in_any_case():
  config = read_config(GOLDEN / "gemma3_text" / "checkpoint")
  model = dataclasses.replace(build(config.model), layer_types=("sliding",) * 7)
  with pytest.raises(UserError, match=r"another model configuration.*:\n  layer_types: config.json"):
    require_same_model(config, model, GOLDEN, allow_model_change=True)


@pytest.mark.parametrize(
  ("case", "change", "line"),
  [
    ("gemma3_text", {"rope_max_timescale": 5e5}, "rope_theta (rope_max_timescale): config.json 1000000.0, this run 500000.0"),
    ("gemma4_dense", {"final_logits_soft_cap": 30.0}, "final_logit_softcapping (final_logits_soft_cap): config.json 8.0, this"),
    ("gemma4_dense", {"normalization_layer_epsilon": 1e-5}, "rms_norm_eps (normalization_layer_epsilon): config.json 1e-06, t"),
    ("deepseek3", {"n_routing_groups": 2}, "n_group (n_routing_groups): config.json 4, this run 2"),
  ],
)
def test_another_model_is_told_in_the_files_names_and_ours(case: str, change: dict[str, Any], line: str):
  config = read_config(GOLDEN / case / "checkpoint")
  with pytest.raises(UserError) as error:
    require_same_model(config, dataclasses.replace(build(config.model), **change), GOLDEN)
  assert f"\n  {line}" in str(error.value)


def test_other_placeholders_are_refused_unless_they_never_occur():
  config = read_config(GOLDEN / "gemma4_e2b" / "checkpoint")  # its placeholders are beyond the vocabulary of 128
  model = build(config.model)
  vision = load_config("gemma4-tiny").config.vision  # placeholders 260, 263 and 264
  require_same_model(config, model, GOLDEN, vision)
  with pytest.raises(UserError, match=r"\n  audio_token_id: config.json null, this run 7"):
    require_same_model(config, model, GOLDEN, dataclasses.replace(vision, audio_token_id=7))


def test_values_that_mean_the_same_are_the_same():
  config = read_config(GOLDEN / "gemma4_dense" / "checkpoint")  # head_dim 8, interval 3
  spelled_out = {"layer_types": ("sliding", "sliding", "global") * 2, "inhomogeneous_layer_cycle_interval": 6}
  require_same_model(config, dataclasses.replace(build(config.model), **spelled_out), GOLDEN)


def test_another_family_is_refused():
  config = read_config(GOLDEN / "gemma4_dense" / "checkpoint")
  with pytest.raises(
    UserError, match=r'decoder_block\): config.json "gemma4", this run "deepseek"\n.*\n  fix: .* import .*golden OUT writes it'
  ):
    require_same_model(config, build(read_config(GOLDEN / "deepseek3" / "checkpoint").model), GOLDEN)


_GEMMA3 = {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
_GEMMA4 = {"rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0}
_GEMMA4 |= {"layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10, "attention_k_eq_v": True}
_YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
RELEASED: dict[str, dict[str, Any]] = {
  "gemma3-4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, **_GEMMA3},
  "gemma3-27b": {
    **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32},
    **{"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, **_GEMMA3},
  },
  "gemma4-31b": {
    **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32},
    **{"num_key_value_heads": 16, "num_global_key_value_heads": 4, "global_head_dim": 512, "sliding_window": 1024},
    **{"hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, **_GEMMA4},
    "use_bidirectional_attention": "vision",
  },
  "deepseek3-671b": {"max_position_embeddings": 163840, "rope_scaling": {**_YARN, "original_max_position_embeddings": 4096}},
  "deepseek3.2-671b": {"rope_scaling": {**_YARN, "original_max_position_embeddings": 4096}},
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_config_is_the_model_file_of_that_name(name: str):
  """``init_from`` accepts a released model: its config.json, which omits many fields, agrees with the file in
  configs/models."""
  family = {"gemma3": "gemma3", "gemma4": "gemma4", "deepseek3": "deepseek_v3", "deepseek3.2": "deepseek_v32"}
  text, model_type = RELEASED[name], family[name.rpartition("-")[0]]
  config = text if "deepseek" in name else {"text_config": text, "vision_config": None}
  found = interpret({"model_type": model_type, **config}, "config.json")
  require_same_model(found, load_config(name).config.model, GOLDEN)


@pytest.mark.parametrize(
  ("change", "definition", "weight"),
  [
    ({}, "deepseek_sequence", 0.0),
    ({"aux_loss_alpha": 0.002}, "deepseek_sequence", 0.002),
    ({"aux_loss_alpha": 0.002, "seq_aux": True}, "deepseek_sequence", 0.002),
    ({"aux_loss_alpha": 0.002, "seq_aux": False}, "switch", 0.002),
  ],
)
def test_deepseek_s_coefficient_of_the_load_balancing_loss_is_kept(change, definition, weight):
  """``aux_loss_alpha`` weights the mean over sequences with ``seq_aux``, and the loss over the batch without it."""
  values = hub("deepseek3")
  base = {key: value for key, value in values.items() if key not in ("aux_loss_alpha", "seq_aux")}
  model = make_section("model", interpret(base | change, "config.json").model)
  assert (model.load_balance_loss, model.load_balance_loss_weight) == (definition, weight)
  again = interpret(export_config(model, "bfloat16"), "config.json").model
  assert again["load_balance_loss_weight"] == weight
  assert not weight or again["load_balance_loss"] == definition


def test_tokens_beyond_the_vocabulary_are_reported():
  values = json.loads((GOLDEN / "gemma3_text" / "checkpoint" / "config.json").read_text())
  assert values["vocab_size"] == 160
  never = "file: eos_token_id 999 never occurs: the vocabulary has the ids 0 to 159"
  assert interpret(values | {"eos_token_id": [1, 999]}, "file").notes == (never,)
  assert interpret(values | {"eos_token_id": 160, "bos_token_id": 2000}, "file").notes == (
    "file: bos_token_id 2000 never occurs: the vocabulary has the ids 0 to 159",
    never.replace("999", "160"),
  )
  assert interpret(values | {"eos_token_id": [1, 159], "bos_token_id": None}, "file").notes == ()


@pytest.mark.parametrize(
  ("model", "words", "lost"),
  [
    ("qwen3-moe-tiny", "load_balance_loss=huggingface load_balance_loss_weight=0.3", False),
    ("qwen3-moe-tiny", "load_balance_loss=switch load_balance_loss_weight=0.3", True),
    ("qwen3-moe-tiny", "load_balance_loss=switch load_balance_loss_weight=0", False),
    ("qwen3-tiny", "load_balance_loss=switch load_balance_loss_weight=0.3", False),
    ("deepseek3-tiny", "load_balance_loss=switch load_balance_loss_weight=0.3", False),
    ("deepseek3-tiny", "load_balance_loss=deepseek_sequence load_balance_loss_weight=0.3", False),
    ("deepseek3-tiny", "load_balance_loss=maxtext load_balance_loss_weight=2", True),
    ("deepseek3-tiny", "router_z_loss_weight=0.01", True),
    ("gemma4-26b", "load_balance_loss=maxtext load_balance_loss_weight=0.001", True),
  ],
)
def test_losses_of_routers_that_config_json_cannot_express_are_reported(model, words, lost):
  note = lost_losses(load_config(model, words.split()).config.model)
  assert (note is not None) == lost
  assert note is None or f" has no field for {words}; a training that starts from this export needs these keys" in note
