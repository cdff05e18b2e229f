"""Names of other trainers: a value is printed only if meaning and unit are the same, and nothing is guessed."""

import json
import re
from pathlib import Path

import pytest

from maxtext_like.checkpoint.huggingface.config import interpret
from maxtext_like.config import foreign_names, maxtext
from maxtext_like.config.foreign_exact import RENAMED
from maxtext_like.config.foreign_names import find
from maxtext_like.config.load import load_config
from maxtext_like.config.overrides import UnknownKeyError, leaf_of
from maxtext_like.config.schema import LEAVES
from maxtext_like.errors import UserError

HERE = Path(__file__).parent
_LINES = (line.partition(" ") for line in (HERE / "trainer_keys.txt").read_text().splitlines())
TRAINER_KEYS = {name: words for name, _, words in _LINES}
"""Keys of MaxText, transformers, TRL, peft, torchtitan, Megatron-LM, LLaMA-Factory, Axolotl, Unsloth, NeMo, DeepSpeed,
torchtune and nanoGPT, collected from their sources in November 2026, with the words to write where the translation is exact."""


def answer(word: str, model: str = "gemma4-tiny") -> tuple[str, str]:
  """Return the error about ``key=value``, and its ``fix:``."""
  with pytest.raises(UserError) as refused:
    load_config(model, [word])
  says, _, fix = str(refused.value).partition("\n  fix: ")
  return says, fix


NO_VALUES = (
  "=true or false",
  "keep_best=true",
  "offload=true",
  "mlflow_experiment=NAME",
)  # endings of hints that contain "true" or a value themselves
# The same quantity under nearly the same name.
MISSPELLED = {"decoder_num_layers": "num_decoder_layers", "step": "steps"}


@pytest.mark.slow
def test_of_3369_keys_of_other_trainers_only_exact_translations_print_a_value():
  found, offered = dict.fromkeys(TRAINER_KEYS, ""), {}
  for name in TRAINER_KEYS:
    try:
      leaf_of(name)
    except UnknownKeyError as error:
      if offer := re.search(r"did you mean '(.*)'", error.what):
        offered[name] = offer[1]
      for value in ("731", "true"):
        words = error.problem("", value).fix.removeprefix("write ")
        if re.search(rf"(^|\s)[\w.]+=\[?{value}\b", words) and not words.endswith(NO_VALUES):
          found[name] = words.replace(value, "{}")
          break
  # A name that is a slip of the keyboard away from a key of ours keeps its value.
  assert found == TRAINER_KEYS | {name: f"{key}={{}}" for name, key in MISSPELLED.items()}
  assert offered == MISSPELLED


@pytest.mark.parametrize(
  ("word", "fix"),
  [
    # The unit is the same, so the value is carried over.
    ("lr=2e-5", "write learning_rate=2e-5"),
    ("warmup_ratio=0.03", "write warmup_steps_fraction=0.03"),
    ("lr_warmup_fraction=0.01", "write warmup_steps_fraction=0.01"),
    ("lr_decay_iters=600000", "write lr_schedule_steps=600000"),
    ("cosine_min_lr_ratio=0.1", "write learning_rate_final_fraction=0.1"),
    ("num_train_epochs=3.0", "write epochs=3"),
    ("save_steps=5e2", "write checkpoint_interval=500"),
    ("optimizer.eps=1e-8", "write adam_eps=1e-8"),
    ("model.optim.weight_decay=0.01", "write adam_weight_decay=0.01"),
    ("--num-train-epochs=3", "write epochs=3"),
    ("rope_local_base_freq=10000", "write local_rope_max_timescale=10000"),
    ("moe_ffn_hidden_size=2048", "write moe_mlp_dim=2048"),
    ("moe_router_group_topk=4", "write topk_routing_group=4"),
    ("vision_config.hidden_size=1152", "write hidden_size_for_vit=1152"),
    ("text_config.hidden_size=2560", "write emb_dim=2560"),
    ("target_modules=q_proj,v_proj", "write lora_modules=[q_proj,v_proj]"),
    # Values with another spelling here.
    ("optim=adamw_torch", "write opt_type=adamw"),
    ("optim=adamw_torch_fused", "write opt_type=adamw"),
    ("lr_scheduler_type=cosine", "write lr_schedule_type=cosine learning_rate_final_fraction=0"),
    ("lr_scheduler_type=constant", "write lr_schedule_type=constant warmup_steps_fraction=0"),
    ("lr_scheduler_type=constant_with_warmup", "write lr_schedule_type=constant"),
    ("hidden_act=gelu_pytorch_tanh", "write mlp_activation=gelu"),
    ("bf16=true", "write dtype=bfloat16 weight_dtype=float32"),
    ("bf16=false", "write dtype=float32 weight_dtype=float32"),
    ("tf32=false", "write matmul_precision=highest"),
    ("gradient_checkpointing=false", "write remat_policy=none"),
    ("untie_embeddings_and_output_weights=true", "write logits_via_embedding=false"),
    ("train_on_inputs=false", "write data_format=chat train_on=assistant"),
    ("max_steps=-1", "leave it out"),
    ("max_grad_norm=none", "write gradient_clipping_threshold=0"),
    # Values that select one of our choices.
    ("seq_aux=true", "write load_balance_loss=deepseek_sequence"),
    ("seq_aux=false", "write load_balance_loss=switch"),
    ("moe_router_load_balancing_type=aux_loss", "write load_balance_loss=switch"),
    ("moe_router_load_balancing_type=global_aux_loss", "write load_balance_loss=switch"),
    ("moe_router_load_balancing_type=seq_aux_loss", "write load_balance_loss=deepseek_sequence"),
    ("moe_router_load_balancing_type=none", "write load_balance_loss_weight=0"),
    ("output_router_logits=true", "write load_balance_loss=huggingface load_balance_loss_weight=WEIGHT"),
    ("output_router_logits=false", "write load_balance_loss_weight=0"),
    ("moe_router_pre_softmax=true", "write norm_topk_prob=false"),
    ("moe_router_dtype=fp32", "write float32_gate_logits=true float32_weight_sum=true"),
    ("finetuning_type=lora", "write lora_rank=RANK"),
    ("finetuning_type=full", "leave it out"),
    ("stage=sft", "leave it out"),
    ("sr=false", "write stochastic_rounding=false"),
    ("grad_reduce_in_bf16=true", "write reduction_dtype=dtype"),
    ("grad_reduce_in_bf16=false", "write reduction_dtype=float32"),
    ("completion_only_loss=false", "write data_format=chat train_on=all"),
    # Values that switch a setting off.
    ("eval_strategy=no", "write eval_interval=0"),
    ("eval_strategy=steps", "write eval_interval=STEPS"),
    ("save_strategy=no", "write enable_checkpointing=false"),
    ("report_to=none", "write enable_tensorboard=false"),
    ("use_gradient_checkpointing=False", "write remat_policy=none"),
    ("load_best_model_at_end=false", "leave it out"),
    ("load_in_4bit=false", "leave it out"),
    ("use_peft=false", "leave it out"),
    ("use_wsd=false", "leave it out"),
    # Values that the key does not accept.
    ("rslora=true", "write lora_rslora=true"),
    ("save_steps=0.1", "write checkpoint_interval=INT"),
    ("compute_dtype=fp8", "write dtype=float32 | bfloat16 | float16"),
  ],
)  # fmt: skip
def test_exact_translations(word, fix):
  assert answer(word)[1] == fix


@pytest.mark.parametrize(
  "word",
  [
    "hidden_act=gelu",
    "optim=muon",
    "optimizer=muon",
    "optim=adamw_8bit",
    "lr_scheduler_type=polynomial",
    "moe_router_load_balancing_type=sinkhorn",
  ],
)
def test_a_value_without_a_counterpart_is_answered_with_the_choices(word):
  _, fix = answer(word)
  assert fix.startswith("choose ")
  assert "there is no other" in fix


# Names that look like a key here, but whose values have another meaning.
SIMILAR = {
  "warmup_steps": "it counts steps; warmup_steps_fraction is a share",
  "min_lr": "it is a learning rate; learning_rate_final_fraction is the last rate divided by the peak",
  "batch_size": "per_device_batch_size counts rows per device",
  "global_batch_size": "the rows of all devices",
  "lr_wsd_decay_iters": "it counts steps; wsd_decay_steps_fraction is the share",
  "val_set_size": "a count, a share or a percentage",
  "layer_norm_eps": "the norms of these models are RMSNorms",
  "moe_shared_expert_intermediate_size": "the width of all shared experts together",
  "rope_scaling_factor": "rope_type is default, linear",
  "decoupled_weight_decay": "its strength is adam_weight_decay",
  "torch_dtype": "weight_dtype is the dtype of the stored parameters",
  "out_dir": "it is the directory of one run",
  "logits_soft_cap": "attn_logits_soft_cap caps the scores of attention",
  "tensorboard": "enable_tensorboard writes",
  "rope_local_theta": "the base of layers with a sliding window",
  "aux_loss_coef": "the weight of the loss that load_balance_loss defines",
  "data_path": "another trainer has prepared",
  "hidden_dim": "others for the width of the MLP",
  "qk_head_dim": "transformers those with it too",
  "initial_scale_power": "not a power of 2",
  "load_in_4bit": "training quantizes weights only below an adapter",
}


@pytest.mark.parametrize("name", SIMILAR)
def test_a_look_alike_is_called_one_and_its_value_is_not_carried_over(name):
  says, fix = answer(f"{name}=731")
  assert "similar to a key here, but not the same: " in says
  assert SIMILAR[name] in says
  assert fix
  assert "731" not in fix


ABSENT = {
  "num_nextn_predict_layers": "does not train multi-token prediction",
  "use_grpo": "no preference or reinforcement learning",
  "grpo": "no preference or reinforcement learning",
  "dpo": "no preference or reinforcement learning",
  "kto_beta": "no preference or reinforcement learning",
  "qk_clip_threshold": "does not clip attention weights",
  "ema": "no moving average of the weights",
  "ema_decay": "no moving average of the weights",
  "loraplus_lr_ratio": "one learning rate applies to all",
  "embedding_lr": "one learning rate applies to all",
  "embedding_learning_rate": "one learning rate applies to all",
  "num_cycles": "without restarts",
  "pipeline_model_parallel_size": "no pipeline parallelism",
  "hidden_dropout": "only an adapter has dropout",
  "label_smoothing_factor": "no label smoothing",
  "moe_expert_capacity_factor": "no capacity limit",
  "push_to_hub": "downloads and uploads nothing",
  "cache_dir": "downloads nothing",
  "sa_block_q": "no result here depends on it",
  "index_topk_freq": "does not exist here",
  "bf16_full_eval": "with the dtypes and batches of training",
  "enable_goodput_recording": "metrics.jsonl",
  "lm_head_lr": "one learning rate applies to all",
  "matrix_lr": "one learning rate applies to all",
  "llrd": "one learning rate applies to all",
  "polyak_decay": "no moving average of the weights",
  "expert_capacity_factor": "no capacity limit",
  "resid_pdrop": "only an adapter has dropout",
  "ns_steps": "optimizers are adamw, adafactor, lion and sgd",
  "muon_momentum": "optimizers are adamw, adafactor, lion and sgd",
  "chat_template_kwargs": "a field of a record",
  "max_grad_value": "clipped by their global norm",
  "qk_norm": "which layers have biases, gates and norms",
  "alibi": "other models does not exist here",
}


@pytest.mark.parametrize("name", ABSENT)
def test_what_the_project_lacks_is_said_in_a_sentence(name):
  says, fix = answer(f"{name}=731")
  assert ABSENT[name] in says
  assert (fix, "did you mean" in says) == ("leave it out", False)


@pytest.mark.parametrize("word", ["critic.lr=1", "rollout.max_length=1", "teacher.hidden_size=1", "muon.momentum=1", "xyzzy=1"])
def test_a_section_of_something_else_is_not_passed_over(word):
  says, fix = answer(word)
  assert "no key has this or a similar name" in says
  assert "--help-keys" in fix


def interpreted(case: str, change: dict[str, object]) -> dict[str, object]:
  config = json.loads((HERE.parent / "golden" / case / "checkpoint" / "config.json").read_text())
  read = interpret(config | change, "config.json")
  return read.model | read.vision


@pytest.mark.parametrize(
  ("case", "field", "value"),
  [
    ("qwen3", "rms_norm_eps", 3e-5),
    ("qwen3", "rope_theta", 7e5),
    ("qwen3", "intermediate_size", 88),
    ("qwen3", "tie_word_embeddings", True),
    ("qwen3_moe", "moe_intermediate_size", 24),
    ("gemma3_text", "rope_local_base_freq", 5e3),
    ("gemma3_text", "final_logit_softcapping", 12.5),
    ("gemma3_text", "sliding_window", 5),
    ("deepseek3", "n_group", 1),
    ("deepseek3", "topk_group", 1),
    ("deepseek3", "n_shared_experts", 3),
    ("deepseek3", "n_routed_experts", 8),
    ("deepseek3", "first_k_dense_replace", 2),
    ("deepseek32", "index_topk", 9),
    ("deepseek32", "index_n_heads", 2),
    ("deepseek32", "index_head_dim", 32),
    ("gemma3_vision", "mm_tokens_per_image", 4),
    ("gemma3_vision", "boi_token_index", 7),
  ],
)
def test_fields_of_config_json_mean_what_an_import_reads(case, field, value):
  answered = find(field)
  ours = answered.key if answered else field
  assert interpreted(case, {field: value})[ours] == value


def test_a_list_that_is_to_be_written_is_taken():
  for word, ours in [
    ("lora_target=q_proj,v_proj", "[q_proj,v_proj]"),
    ("lora_target=all", "[all-linear]"),
    ("lora_target=[q_proj, v_proj]", "[q_proj, v_proj]"),
    ("lora_modules=all", "[all-linear]"),
    ("lora_modules=q_proj, v_proj", "[q_proj, v_proj]"),
    (r"lora_modules=mlp\..*", r'["mlp\\..*"]'),
  ]:
    with pytest.raises(UserError) as refused:
      load_config("gemma4-tiny", ["lora_rank=2", word])
    assert re.search(r"write (?:lora_modules=)?(\[.*\])$", str(refused.value))[1] == ours  # pyright: ignore[reportOptionalSubscript]
    assert load_config("gemma4-tiny", ["lora_rank=2", f"lora_modules={ours}"]).config.adapter.lora_modules


def test_a_weight_names_the_definition_that_another_key_of_its_trainer_selects():
  for word, other in [
    ("moe_aux_loss_coeff=0.1", "with moe_router_load_balancing_type=seq_aux_loss, load_balance_loss=deepseek_sequence"),
    ("aux_loss_alpha=0.1", "with seq_aux=false, load_balance_loss=switch"),
  ]:
    assert other in answer(word)[0]


def test_unknown_keys_are_listed_all_at_once(tmp_path):
  words = ["lr=1", "--fast", "3", "stepz=2", "steps=five", "lora_r=8", "seed="]
  with pytest.raises(UserError) as refused:
    load_config("gemma4-tiny", words)
  text = str(refused.value)
  assert text.startswith("6 problems in the configuration")
  for name in ("'lr'", "'fast'", "'stepz', did you mean 'steps'?", "'five' is not an int", "'lora_r'", "seed=VALUE"):
    assert name in text
  (tmp_path / "m.yml").write_text("lr: 1\nlora_r: 8\ndecoder_block: gemma3\n")
  with pytest.raises(UserError, match=r"(?s)m.yml:1: unknown key 'lr'.*write learning_rate=1.*m.yml:2: unknown key 'lora_r'"):
    load_config(tmp_path / "m.yml")


def test_the_tables_are_sound():
  assert not set(foreign_names.NAMES) & {*LEAVES, *maxtext.KNOWN}
  assert all(name == foreign_names.fold(name) for name in foreign_names.NAMES)
  assert set(RENAMED) <= set(LEAVES)
  for name, said in foreign_names.NAMES.items():
    for text in (said.write, *(said.values or {}).values()):
      for key in re.findall(r"(\w+)=", text):
        assert key in {*LEAVES, "XLA_FLAGS"}, f"{name} leads to {key}"


@pytest.mark.parametrize(
  ("name", "meant"),
  [
    ("flaot32_logits", "float32_logits"),
    ("q_lora_rnak", "q_lora_rank"),
    ("learningrate", "learning_rate"),
    ("gradint_acumulation_steps", "gradient_accumulation_steps"),
    ("lora_rank_patern", "lora_rank_pattern"),
    ("mask_trainable_parameters", "trainable_parameters_mask"),
    ("Max-Target-Length", "max_target_length"),
    ("learning_rat", "learning_rate"),
    ("lora_rnk", "lora_rank"),
    ("data_shuffle_sed", "data_shuffle_seed"),
    ("dataset_pth", "dataset_path"),
    ("training.stepz", "training.steps"),
    ("trainer.learning_rate", "training.learning_rate"),
  ],
)
def test_misspellings_are_recognized(name, meant):
  with pytest.raises(KeyError, match=f"did you mean '{meant}'"):
    leaf_of(name)


@pytest.mark.parametrize(
  "name", ["adam_beta3", "adam_b3", "patch_sise", "batch_sise", "type", "mode", "rate", "ema", "data_sharding_x", "lora"]
)
def test_other_words_are_not_taken_for_misspellings(name):
  with pytest.raises(KeyError) as error:
    leaf_of(name)
  assert "did you mean" not in str(error.value)
