"""A key without effect is refused or reported: every key of ``training:`` is set to another value, and the lowered programs are
compared."""

import dataclasses
import functools

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.errors import UserError
from maxtext_like.training.step.program import make_program
from tests.processes import ROOT
from tests.tiers import tiers

SMALL = ("num_decoder_layers=2", "vocab_size=300", "max_target_length=16", "dtype=float32", "per_device_batch_size=2")

TURNED = {
  "module_api": "linen", "scan_layers": "false", "remat_policy": "save_outputs", "remat_offload": "layer_inputs",
  "grouped_product": "ragged_dot", "per_device_batch_size": "3", "max_target_length": "24",
  "gradient_accumulation_steps": "2", "opt_type": "lion", "learning_rate": "0.01", "lr_schedule_type": "linear",
  "lr_schedule_steps": "50", "warmup_steps_fraction": "0.3", "learning_rate_final_fraction": "0.5",
  "wsd_decay_steps_fraction": "0.3", "adam_b1": "0.7", "adam_b2": "0.8", "adam_eps": "1e-5", "adam_weight_decay": "0.3",
  "mu_dtype": "bfloat16", "nu_dtype": "dynamic8", "stochastic_rounding": "true", "sgd_momentum": "0.5",
  "adafactor_momentum_rank": "2", "gradient_clipping_threshold": "0.5", "clip": "layer", "optimizer_in_backward": "true",
  "optimizer_memory_host_offload": "true", "z_loss_multiplier": "0.01", "num_vocab_tiling": "3",
  "trainable_parameters_mask": "[pre_mlp_norm]", "vision_tower": "frozen", "spike_window": "7", "max_spike_rollbacks": "2",
  "early_stopping_threshold": "0.5", "loss_scale_init": "1024",
}  # fmt: skip
"""Another value for each key that may change the program."""

OF_A_RUN = {
  "steps": "training/run/run.py", "epochs": "training/run/batches.py", "seed": "training/step/initial_state.py",
  "init_scheme": "models/model.py",
  "finite_check_steps": "training/loop/finiteness.py", "max_skipped_steps": "training/loop/finiteness.py",
  "replay_failed_step": "training/run/run.py", "spike_factor": "training/loop/spikes.py",
  "early_stopping_patience": "training/loop/best.py",
}  # fmt: skip
"""Keys that have an effect outside the program in every configuration that accepts them, with the file that reads each key."""

ONE_VALUE = {
  "objective": "there is one objective",
  "norm_kernel": "on a CPU there is xla alone",
  "attention": "on a CPU rows of one tile have one kernel, and others are refused",
}
SAME_PROGRAM = {"module_api": "both faces trace the same layers"}

MIXED = ("qwen3-moe-tiny", *SMALL, "emb_dim=16", "num_query_heads=2", "num_kv_heads=1", "head_dim=8", "moe_mlp_dim=8")
DENSE = ("qwen3-tiny", *SMALL, "emb_dim=16", "num_query_heads=2", "num_kv_heads=1", "head_dim=8", "mlp_dim=8")
CONTEXTS = {
  "adamw": DENSE,
  "experts": MIXED,
  "sgd": (*DENSE, "opt_type=sgd", "lr_schedule_type=constant", "warmup_steps_fraction=0"),
  "lion": (*DENSE, "opt_type=lion", "lr_schedule_type=wsd", "gradient_clipping_threshold=0"),
  "adafactor": (*DENSE, "opt_type=adafactor", "scan_layers=false", "remat_policy=full"),
  "float16": (*DENSE, "dtype=float16", "optimizer_in_backward=true"),
  "adapter": (*DENSE, "lora_rank=2"),
}


@functools.cache
def text(words: tuple[str, ...]) -> str:
  """Return the lowered programs of the step and of the initial state."""
  program = make_program(load_config(words[0], words[1:]).config)
  return program.lower_step().as_text() + program.lower_init().as_text()


def answer(words: tuple[str, ...], key: str) -> str:
  """Return the effect of changing a key: refused, reported, another program, or nothing."""
  word = f"{key}={TURNED[key]}"
  try:
    if any(f"{key} has no effect" in note for note in load_config(words[0], [*words[1:], word]).notes):
      return "reported"
    return "program" if text((*words, word)) != text(words) else "nothing"
  except UserError as error:
    return "refused" if key in str(error) else f"refused for another reason: {error}"


def test_every_key_of_training_is_turned_or_of_a_run():
  keys = {field.name for field in dataclasses.fields(TrainingConfig)}
  assert keys == {*TURNED, *OF_A_RUN, *ONE_VALUE}
  for key, file in OF_A_RUN.items():
    assert key in (ROOT / "maxtext_like" / file).read_text(encoding="utf-8"), (key, file)


@pytest.mark.parametrize("context", tiers(CONTEXTS, slow=("adamw",)))
def test_a_key_changes_the_program_or_is_answered(context):
  words = CONTEXTS[context]
  set_already = {word.partition("=")[0] for word in words if f"={TURNED.get(word.partition('=')[0])}" in word}
  found = {key: answer(words, key) for key in TURNED if key not in set_already}
  unanswered = {key: said for key, said in found.items() if said not in ("program", "reported", "refused")}
  assert unanswered.keys() <= SAME_PROGRAM.keys(), unanswered
  # If a note says that a key has no effect, the program must be the same.
  for key in (key for key, said in found.items() if said == "reported"):
    assert text((*words, f"{key}={TURNED[key]}")) == text(words), key
