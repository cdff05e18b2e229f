"""Notes about keys without an effect: each gives its reason. There is none for keys with an effect or keys that are not set."""

import pytest

from maxtext_like.config.idle_keys import IDLE
from maxtext_like.config.load import load_config

NO_EXPERTS = "no layer has experts"
ROWS = {
  "init_scheme": [("gemma3-tiny init_from=some/checkpoint", "maxtext", "init_from loads all weights")],
  "adam_b1": [
    ("gemma3-tiny opt_type=sgd", "0.8", "opt_type is sgd"),
    ("gemma3-tiny opt_type=adafactor", "0.8", "no first moment"),
  ],
  "adam_b2": [("gemma3-tiny opt_type=adafactor", "0.9", "opt_type is adafactor")],
  "adam_eps": [("gemma3-tiny opt_type=lion", "1e-6", "opt_type is lion")],
  "sgd_momentum": [("gemma3-tiny", "0.5", "opt_type is adamw")],
  "adafactor_momentum_rank": [("gemma3-tiny", "8", "opt_type is adamw")],
  "learning_rate_final_fraction": [("gemma3-tiny lr_schedule_type=constant", "0.2", "lr_schedule_type is constant")],
  "wsd_decay_steps_fraction": [("gemma3-tiny", "0.2", "lr_schedule_type is cosine")],
  "lr_schedule_steps": [("gemma3-tiny lr_schedule_type=constant warmup_steps_fraction=0", "9", "lr_schedule_type is constant")],
  "clip": [
    ("gemma3-tiny optimizer_in_backward=true gradient_clipping_threshold=0", "layer", "nothing is clipped"),
    ("gemma3-tiny optimizer_in_backward=true dtype=float16", "running", "clip: exact"),
  ],
  "spike_window": [("gemma3-tiny", "9", "spike_factor is 0.0")],
  "max_spike_rollbacks": [("gemma3-tiny", "9", "spike_factor is 0.0")],
  "loss_scale_init": [("gemma3-tiny", "64", "dtype is float32")],
  "grouped_product": [("gemma3-tiny", "tiles", NO_EXPERTS), ("deepseek3-tiny first_num_dense_layers=4", "tiles", NO_EXPERTS)],
  "routed_bias_update_rate": [
    ("deepseek3-tiny lora_rank=4", "0.1", "an adapter is trained"),
    ("deepseek3-tiny trainable_parameters_mask=[mlp]", "0.1", "trainable_parameters_mask"),
    ("deepseek3.2-tiny indexer_sparse_training=false", "0.1", "trains only the indexer"),
    ("deepseek3-tiny first_num_dense_layers=4", "0.1", NO_EXPERTS),
  ],
  "load_balance_loss": [("deepseek3-tiny", "maxtext", "load_balance_loss_weight is 0"), ("qwen3-tiny", "maxtext", NO_EXPERTS)],
  "load_balance_loss_weight": [
    ("qwen3-tiny", "0.1", NO_EXPERTS),
    ("deepseek3.2-tiny indexer_sparse_training=false", "0.1", "indexer_sparse_training: false"),
  ],
  "router_z_loss_weight": [("gemma4-tiny", "0.1", NO_EXPERTS)],
  "z_loss_multiplier": [("deepseek3.2-tiny indexer_sparse_training=false", "0.1", "trains only the indexer, which the logits")],
  "indexer_loss_scaling_factor": [("deepseek3-tiny", "0.1", "use_indexer is false")],
  "indexer_sparse_training": [("deepseek3-tiny", "true", "use_indexer is false")],
  "eval_steps": [("gemma3-tiny", "3", "eval_interval is 0")],
  "lora_modules": [("gemma3-tiny", "[attention.q]", "no adapter is trained")],
  "text_field": [
    ("gemma3-tiny", "content", "which has no fields"),
    ("gemma3-tiny data_format=chat dataset=jsonl dataset_path=x.jsonl", "content", "reads conversations"),
  ],
  "on_bad_record": [("gemma3-tiny", "skip", "no bad records"), ("gemma3-tiny dataset=synthetic", "skip", "no bad records")],
  "images_field": [("gemma3-tiny", "photos", "use_multimodal is false")],
  "max_images_per_row": [("gemma3-tiny", "3", "use_multimodal is false")],
  "float16_clamp": [("gemma3-tiny dtype=bfloat16", "false", "dtype is bfloat16")],
  "data_shuffle_seed": [("gemma3-tiny shuffle=false", "3", "shuffle is false")],
  "sample_prompts": [("gemma3-tiny", "[a]", "sample_every is 0")],
  "sample_tokens": [("gemma3-tiny", "3", "sample_every is 0")],
  "eval_tasks_limit": [("gemma3-tiny", "5", "eval_tasks_interval is 0")],
  "sample_temperature": [("gemma3-tiny", "0.5", "sample_every is 0")],
  "checkpoint_interval": [("gemma3-tiny enable_checkpointing=false", "3", "enable_checkpointing is false")],
  "max_to_keep": [("gemma3-tiny enable_checkpointing=false", "3", "enable_checkpointing is false")],
  "async_checkpointing": [("gemma3-tiny enable_checkpointing=false", "false", "enable_checkpointing is false")],
}


def notes(words, key=None):
  """Return the notes about keys without an effect, or about one of them."""
  model, *others = words.split()
  return [note for note in load_config(model, others).notes if f"{key or ''} has no effect" in note]


def test_every_key_of_the_table_is_tested():
  assert ROWS.keys() == IDLE.keys()


@pytest.mark.parametrize("key", ROWS)
def test_a_key_without_an_effect_is_reported_with_its_place_and_the_reason(key):
  for words, value, why in ROWS[key]:
    (note,) = notes(f"{words} {key}={value}", key)
    assert note.startswith(f'argument "{key}={value}": {key} has no effect: ')
    assert why in note


@pytest.mark.parametrize(
  "words",
  [
    "gemma3-tiny",
    "qwen3-moe-tiny opt_type=adafactor adafactor_momentum_rank=8 adam_b1=0.8 grouped_product=tiles",
    "qwen3-moe-tiny load_balance_loss_weight=0.1 load_balance_loss=switch",
    "deepseek3-tiny z_loss_multiplier=0.1 routed_bias_update_rate=0.1 router_z_loss_weight=0.1",
    "deepseek3.2-tiny indexer_loss_scaling_factor=0.1 indexer_sparse_training=true",
    "gemma3-tiny opt_type=lion adam_b1=0.8 adam_b2=0.9 lr_schedule_type=wsd wsd_decay_steps_fraction=0.2",
    "gemma3-tiny opt_type=sgd sgd_momentum=0.5 lr_schedule_type=constant lr_schedule_steps=9 spike_factor=3 spike_window=9",
    "gemma3-tiny dtype=float16 float16_clamp=false lora_rank=2 lora_modules=[attention.q]",
    "gemma3-tiny dataset=jsonl dataset_path=x.jsonl text_field=content on_bad_record=skip",
    "gemma3-tiny dtype=float16 loss_scale_init=64 remat_policy=full remat_offload=layer_inputs clip=exact",
    "deepseek3-tiny lora_rank=4 routed_bias_update_rate=0",
  ],
)
def test_a_key_with_an_effect_is_not(words):
  assert notes(words) == []


def test_a_rate_of_the_model_s_file_is_reported_where_the_biases_stay():
  """LoRA on any DeepSeek gives this note. Other keys of the model's file give none, because the file is for all runs."""
  (note,) = notes("deepseek3-tiny lora_rank=4")
  assert note.startswith("configs/models/deepseek3-tiny.yml:")
  assert "routed_bias_update_rate has no effect: an adapter is trained" in note
  assert notes("deepseek3-tiny") == []
