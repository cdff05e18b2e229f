"""Names of other trainers: answered by what they mean, never by a name that only looks alike."""

import re

import pytest

from maxtext_like.config import foreign_names, maxtext
from maxtext_like.config.load import load_config
from maxtext_like.config.overrides import leaf_of
from maxtext_like.config.problems import nearest
from maxtext_like.config.schema import LEAVES
from maxtext_like.errors import UserError

# What MaxText, transformers, TRL, LLaMA-Factory and nanoGPT call it, and a piece of the answer.
ANSWERS = {
  "lr": "learning_rate=7",
  "bf16": "dtype=bfloat16",
  "fp16": "dtype=float16",
  "num_epochs": "epochs=7",
  "num_train_epochs": "epochs=7",
  "batch_size": "per_device_batch_size=7",
  "per_device_train_batch_size": "per_device_batch_size=7",
  "max_seq_len": "max_target_length=7",
  "cutoff_len": "max_target_length=7",
  "warmup_ratio": "warmup_steps_fraction=7",
  "warmup_steps": "warmup_steps_fraction=SHARE",
  "weight_decay": "adam_weight_decay=7",
  "max_grad_norm": "gradient_clipping_threshold=7",
  "gradient_checkpointing": "remat_policy=full",
  "optim": "opt_type=7",
  "lr_scheduler_type": "lr_schedule_type=7",
  "save_steps": "checkpoint_interval=7",
  "logging_steps": "log_interval=7",
  "model_name_or_path": "init_from=7",
  "max_steps": "steps=7",
  "hidden_size": "emb_dim=7",
  "attn_logit_softcapping": "attn_logits_soft_cap=7",
  "rng_seed": "seed=7 data_shuffle_seed=7",
  "lora_r": "lora_rank=7",
  "lora_target_modules": "lora_modules=[7]",
  "use_rslora": "lora_rslora=7",
  "freeze_vision_tower": "vision_tower=frozen",
  "lora_bias": "LoRA, rsLoRA and DoRA, on quantised weights too",
  "use_dora": "lora_dora=7",
  "load_in_4bit": "weights are quantised below an adapter alone",
  "quantization_bit": "weights are quantised below an adapter alone",
  "deepspeed": "ici_fsdp_parallelism",
  "tensor_parallel_size": "ici_tensor_parallelism",
  "ici_diloco_parallelism": "five axes",
  "hidden_dropout": "dropout",
  "use_dpo": "the next token",
  "report_to": "metrics.jsonl",
  "push_to_hub": "nothing is downloaded or uploaded",
  "grain_train_files": "dataset=jsonl",
  "sa_block_q": "no result depends on it",
  "enable_goodput_recording": "metrics.jsonl",
  "NUM-TRAIN-EPOCHS": "epochs=7",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
  with pytest.raises(UserError) as refused:
    load_config("gemma4-tiny", [f"{name}=7"])
  text = str(refused.value)
  assert text.startswith(f'argument "{name}=7": unknown key {name!r}: ')
  assert ANSWERS[name] in text
  assert "did you mean" not in text


def test_a_flag_that_is_off_is_to_be_left_out():
  with pytest.raises(UserError, match="fix: leave it out"):
    load_config("gemma4-tiny", ["bf16=false"])


@pytest.mark.parametrize(
  ("word", "ours"),
  [
    ("lora_target=q_proj,v_proj", "[q_proj,v_proj]"), ("lora_target=all", "[all-linear]"),
    ("lora_target=[q_proj, v_proj]", "[q_proj, v_proj]"), ("lora_modules=all", "[all-linear]"),
    ("lora_modules=q_proj, v_proj", "[q_proj, v_proj]"), (r"lora_modules=mlp\..*", r'["mlp\\..*"]'),
  ],
)  # fmt: skip
def test_a_list_that_is_to_be_written_is_taken(word, ours):
  with pytest.raises(UserError) as refused:
    load_config("gemma4-tiny", ["lora_rank=2", word])
  assert re.search(r"write (?:lora_modules=)?(\[.*\])$", str(refused.value))[1] == ours  # pyright: ignore[reportOptionalSubscript]
  assert load_config("gemma4-tiny", ["lora_rank=2", f"lora_modules={ours}"]).config.adapter.lora_modules


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


def test_the_table_is_sound():
  assert not set(foreign_names.NAMES) & {*LEAVES, *maxtext.KNOWN}
  assert all(name == foreign_names.fold(name) for name in foreign_names.NAMES)
  for name, said in foreign_names.NAMES.items():
    for key in re.findall(r"(\w+)=", said.write):
      assert key in LEAVES, f"{name} leads to {key}"


@pytest.mark.parametrize(
  ("name", "meant"),
  [
    ("flaot32_logits", "float32_logits"),
    ("q_lora_rnak", "q_lora_rank"),  # a slip of the fingers, not an adapter
    ("max_len", "max_target_length"),
    ("btch_size", "per_device_batch_size"),
    ("cache_dir", "compilation_cache_dir"),
    ("mask_trainable_parameters", "trainable_parameters_mask"),
  ],
)
def test_suggestions_compare_words_as_well_as_letters(name, meant):
  with pytest.raises(KeyError, match=f"did you mean '{meant}'"):
    leaf_of(name)


def test_what_is_not_near_is_not_offered():
  assert nearest("data_sharding", LEAVES) == []
  assert nearest("xyzzy", LEAVES) == []
  assert nearest("", LEAVES) == []
