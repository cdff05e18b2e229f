"""Rules over sections: conflicts are listed together with both places and a remedy; keys without effect are refused (F54)."""

from typing import Any

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.config.precision_keys import foreign_keys
from maxtext_like.config.schema import FAMILIES_OF_KEY, LEAVES
from maxtext_like.errors import UserError


def error(name, *words):
  with pytest.raises(UserError) as refused:
    load_config(name, words)
  return str(refused.value)


def test_every_conflict_is_listed_with_places_and_remedies():
  text = error("gemma4-tiny", "num_query_heads=5", "steps=-1", "sliding_window_size=0", "max_target_length=9000")
  assert text.startswith("4 problems in the configuration\n")
  for part in (
    "num_query_heads = 5 is not divisible by num_kv_heads = 2",
    'where: argument "num_query_heads=5"; configs/models/gemma4-tiny.yml:10 (num_kv_heads)',
    "steps = -1 is below 1",
    "fix: set steps to 1 or more",
    "sliding_window_size = 0",
    "max_target_length = 9000 is more than max_position_embeddings = 8192",
  ):
    assert part in text


def test_one_conflict_is_one_message():
  what, where, fix = error("gemma4-tiny", "resume=true", "enable_checkpointing=false").splitlines()
  assert what == "resume: true with enable_checkpointing: false"
  assert where == '  where: argument "resume=true"; argument "enable_checkpointing=false"'
  assert fix.startswith("  fix: set enable_checkpointing=true or resume=false")


def test_turning_checkpoints_off_turns_resume_off():
  loaded = load_config("gemma4-tiny", ["enable_checkpointing=false"])
  assert loaded.config.checkpoint.resume is False
  assert loaded.origins["checkpoint.resume"] == "follows from enable_checkpointing: false"


@pytest.mark.parametrize(
  ("name", "words", "reason"),
  [
    ("gemma4-tiny", ["num_decoder_layers=5"], "the last of 5 layers would be sliding"),
    ("gemma4-tiny", ["layer_types=[global, global, global, global, global, sliding]"], "the last of 6 layers"),
    ("gemma4-tiny", ["use_double_wide_mlp=true"], "there are none"),
    ("gemma4-tiny", ["share_kv_projections=false"], "global_num_kv_heads = 1 without share_kv_projections"),
    ("gemma4-tiny", ["vocab_size_per_layer_input=512"], "without a per-layer embedding"),
    ("gemma4-tiny", ["rope_type=linear"], "rope_type: linear is not supported by decoder_block gemma4"),
    ("gemma3-tiny", ["rope_type=default"], "rope_type: default with rope_linear_scaling_factor = 8"),
    ("gemma3-tiny", ["rope_linear_scaling_factor=1"], "rope_type: linear with rope_linear_scaling_factor = 1"),
    ("deepseek3-tiny", ["num_kv_heads=2"], "num_kv_heads = 2 differs from num_query_heads = 4"),
    ("deepseek3-tiny", ["beta_slow=32"], "beta_fast = 32 is not above beta_slow = 32"),
    (
      "gemma4-tiny",
      ["optimizer_memory_host_offload=true"],
      "optimizer_memory_host_offload = true without optimizer_in_backward",
    ),
    ("gemma4-tiny", ["eos_token_id=[1,-5]"], "eos_token_id = -5 is below 0"),
    ("gemma4-tiny", ["pad_token_id=512"], "pad_token_id = 512 is outside the vocabulary of 512"),
    ("gemma4-tiny", ["sample_every=5", "dataset=synthetic"], "sample_every = 5 with dataset: synthetic"),
    (
      "gemma4-tiny",
      ["eval_tasks=[a]", "eval_tasks_interval=5", "dataset=synthetic"],
      "eval_tasks_interval = 5 with dataset: synthetic",
    ),
    ("gemma4-tiny", ["eval_tasks=[a, b]"], "eval_tasks = [a, b] with eval_tasks_interval = 0"),
    ("gemma4-tiny", ["eval_tasks_interval=5"], "eval_tasks = [] with eval_tasks_interval = 5"),
    ("gemma4-tiny", ["sample_every=5", "sample_prompts=[]"], "sample_every = 5, but sample_prompts is empty"),
    ("gemma4-tiny", ["sample_tokens=0"], "sample_tokens = 0"),
    ("gemma4-tiny", ["sample_temperature=-1"], "sample_temperature = -1"),
    ("deepseek3-tiny", ["sliding_window_size=16"], "sliding_window_size = 16 has no effect in decoder_block deepseek"),
    ("gemma3-tiny", ["num_experts=4"], "num_experts = 4 has no effect in decoder_block gemma3"),
    ("gemma4-tiny", ["use_indexer=true"], "use_indexer = true has no effect in decoder_block gemma4"),
  ],
)
def test_conflicts(name, words, reason):
  assert reason in error(name, *words)


@pytest.mark.parametrize(
  ("words", "fix"),
  [
    (["optimizer_memory_host_offload=true"], "fix: set optimizer_in_backward=true"),
    (["optimizer_memory_host_offload=true", "lora_rank=4"], "fix: leave it out: "),
    (["optimizer_memory_host_offload=true", "gradient_accumulation_steps=2"], "fix: leave it out"),
    (["optimizer_memory_host_offload=true", "numerics_every=5"], "fix: leave it out"),
    (["remat_policy=none", "remat_offload=kept"], "as in remat_policy=save_outputs"),
    (["remat_policy=none", "remat_offload=layer_inputs"], "as in remat_policy=full"),
    (["eval_interval=2", "eval_fraction=0"], "as in eval_fraction=0.05, or set eval_interval=0"),
    (["eval_interval=2", "eval_path=/tmp/a.txt"], "fix: leave eval_path out, or set dataset to "),
    (["dataset=jsonl"], "as in dataset_path=/data/*.jsonl"),
    (["dataset=text"], "as in dataset_path=/data/*.txt"),
  ],
)
def test_a_fix_is_one_that_the_next_rule_takes(words, fix):
  assert fix in error("gemma3-tiny", *words)


def test_moments_that_a_rule_has_not_got_are_not_judged():
  """Lion has no second moment, so this rule does not judge nu_dtype. The optimizer refuses the key itself when it is made."""
  assert load_config("gemma3-tiny", ["opt_type=lion", "nu_dtype=bfloat16", "adam_b2=0.999"]).config
  assert "set nu_dtype=dynamic8" in error("gemma3-tiny", "nu_dtype=bfloat16", "adam_b2=0.999")


@pytest.mark.parametrize(
  ("word", "said"),
  [
    ("optimizer_in_backward=true", "{adapter} with optimizer_in_backward: true"),
    ("trainable_parameters_mask=[layers]", "trainable_parameters_mask with {adapter}"),
  ],
)
def test_an_adapter_is_named_by_the_key_that_was_given(word, said, tmp_path):
  """An adapter from ``lora_from`` has the same conflicts without lora_rank, because nothing else is trained there either."""
  for key, value, more in (("lora_from", tmp_path, []), ("lora_rank", 4, ["lora_modules=[q_proj]"])):
    text = error("gemma3-tiny", f"{key}={value}", *more, word)
    assert said.format(adapter=f"{key} = {value}") in text
    assert f'argument "{key}={value}"' in text


@pytest.mark.parametrize(
  ("name", "key"),
  [
    ("gemma3-tiny", "indexer_float32_logits"),
    ("gemma3-tiny", "float32_vision_pool"),
    ("gemma3-tiny", "float32_gate_logits"),
    ("gemma4-tiny", "indexer_float32_logits"),
    ("gemma4-tiny", "float32_gate_logits"),
    ("gemma4-tiny", "float32_weight_sum"),
    ("deepseek3-tiny", "float32_vision_pool"),
  ],
)
@pytest.mark.parametrize("value", ["true", "false"])
def test_a_precision_flag_that_the_model_has_no_use_for_is_refused(name, key, value):
  text = error(name, f"{key}={value}")
  assert f"{key} = {value} has no effect: the model does not have" in text
  assert f'where: argument "{key}={value}"' in text


@pytest.mark.parametrize("value", ["true", "false"])
def test_the_indexer_flag_belongs_to_every_deepseek(value):
  config = load_config("deepseek3-tiny", [f"indexer_float32_logits={value}"]).config
  assert config.precision.indexer_float32_logits is (value == "true")
  assert not config.model.has("indexer")


def test_foreign_precision_keys_are_keys():
  config = load_config("gemma3-tiny").config
  assert all(LEAVES[key][0] == "precision" for key in foreign_keys(config.model))


def test_keys_of_families_are_model_keys():
  assert {LEAVES[key][0] for key in FAMILIES_OF_KEY} == {"model", "vision"}


def test_what_nothing_looks_up_may_lie_beyond_the_vocabulary():
  model = load_config("gemma4-tiny", ["bos_token_id=600", "eos_token_id=512"]).config.model
  assert (model.bos_token_id, model.eos_token_id) == (600, 512)


def test_numbers_of_experts_mean_what_they_say_outside_maxtexts_files():
  one: Any = load_config("gemma4-moe-tiny", ["num_experts=1", "num_experts_per_tok=1"]).config.model
  assert one.num_experts == 1
  none: Any = load_config("deepseek3-tiny", ["shared_experts=0"]).config.model
  assert none.shared_experts == 0
