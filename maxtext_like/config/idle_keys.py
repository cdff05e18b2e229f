"""Keys that have no effect with the other values of a configuration, and the notes about them when they are set.

The sections and ``rules.py`` refuse wrong combinations. A key of this table is harmless, but its author expects an effect, so
the run prints a note with the reason why there is none. ``tests/training/test_turned_keys.py`` changes every key of
``training:`` and fails if a key changes no program, is not an error and is not reported. Losses whose effect depends on the
parameters that are trained are in ``training/step/idle_losses.py``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from maxtext_like.config.choices import DATASETS, OPTIMIZERS
from maxtext_like.config.schema import LEAVES, Config
from maxtext_like.config.yaml_file import to_text

Why = Callable[[Config], str]
"""Why a key has no effect in a configuration; empty if it has one."""


@dataclass(frozen=True)
class Idle:
  """When a key has no effect.

  Attributes:
    why: see ``Why``.
    in_model_file: True if values of the model file are reported too. Most values of that file are meant for all runs of the
      model, with any optimizer or schedule, and are not reported.
  """

  why: Why
  in_model_file: bool = False


def fixed_router_bias(config: Config) -> str:
  """Why the biases of the routers are not updated; empty if they may be."""
  if config.adapter.trained:
    return "an adapter is trained, and the weights below it are fixed, including the routers' biases"
  if config.training.trainable_parameters_mask:
    return "trainable_parameters_mask keeps the routers' biases fixed"
  if config.model.trained_part:
    return f"{config.model.trained_part[1]}, so the routers' biases are fixed"
  return "" if _experts(config) else "no layer has experts"


def _experts(config: Config) -> bool:
  model = config.model
  return any(model.has("experts", layer) for layer in range(model.num_decoder_layers))


def _of_optimizer(key: str) -> Why:
  return lambda config: "" if key in OPTIMIZERS[config.training.opt_type] else f"opt_type is {config.training.opt_type}"


def _first_moment(config: Config) -> str:
  t = config.training
  if t.opt_type == "adafactor" and not t.adafactor_momentum_rank:
    return "opt_type is adafactor, which has no first moment with adafactor_momentum_rank: 0"
  return _of_optimizer("adam_b1")(config)


def _final_rate(config: Config) -> str:
  return "lr_schedule_type is constant" if config.training.lr_schedule_type == "constant" else ""


def _schedule_length(config: Config) -> str:
  t = config.training
  constant = t.lr_schedule_type == "constant" and not t.warmup_steps_fraction
  return "lr_schedule_type is constant and warmup_steps_fraction is 0" if constant else ""


def _clip(config: Config) -> str:
  t = config.training
  if not t.gradient_clipping_threshold:
    return "gradient_clipping_threshold is 0, so nothing is clipped"
  scaled = t.clip == "running" and config.precision.dtype == "float16"
  return (
    "with float16 the step always computes the global norm first, so clip: running is the same as clip: exact" if scaled else ""
  )


def _losses(config: Config) -> str:
  if config.model.trained_part:
    return f"{config.model.trained_part[1]}, which the routers' losses do not affect"
  return "" if _experts(config) else "no layer has experts"


def _vocabulary(config: Config) -> str:
  part = config.model.trained_part
  return f"{part[1]}, which the logits of the vocabulary do not affect" if part else ""


def _definition(config: Config) -> str:
  return _losses(config) or ("" if getattr(config.model, "load_balance_loss_weight", 0) else "load_balance_loss_weight is 0")


def _indexer(config: Config) -> str:
  return "" if config.model.has("indexer") else "use_indexer is false"


def _unless(section: str, key: str) -> Why:
  """Return the reason for a key that has no effect while another key is off."""

  def why(config: Config) -> str:
    value = getattr(getattr(config, section), key)
    return "" if value else f"{key} is {to_text(value)}"

  return why


def _adapter(config: Config) -> str:
  return "" if config.adapter.trained else "no adapter is trained (lora_rank is 0)"


def _text_field(config: Config) -> str:
  if config.data.data_format == "chat":
    return "data_format is chat, which reads conversations"
  return "" if DATASETS[config.data.dataset].fields else f"dataset is {config.data.dataset}, which has no fields"


def _bad_records(config: Config) -> str:
  kind = DATASETS[config.data.dataset]
  return f"dataset is {config.data.dataset}, which has no bad records" if kind.sound or not kind.text else ""


def _float16(config: Config) -> str:
  return "" if config.precision.dtype == "float16" else f"dtype is {config.precision.dtype}"


IDLE: Mapping[str, Idle] = {
  "init_scheme": Idle(lambda c: "init_from loads all weights" if c.checkpoint.init_from else ""),
  "adam_b1": Idle(_first_moment),
  "adam_b2": Idle(_of_optimizer("adam_b2")),
  "adam_eps": Idle(_of_optimizer("adam_eps")),
  "sgd_momentum": Idle(_of_optimizer("sgd_momentum")),
  "adafactor_momentum_rank": Idle(_of_optimizer("adafactor_momentum_rank")),
  "learning_rate_final_fraction": Idle(_final_rate),
  "wsd_decay_steps_fraction": Idle(
    lambda c: "" if c.training.lr_schedule_type == "wsd" else f"lr_schedule_type is {c.training.lr_schedule_type}"
  ),
  "lr_schedule_steps": Idle(_schedule_length),
  "clip": Idle(_clip),
  "spike_window": Idle(_unless("training", "spike_factor")),
  "max_spike_rollbacks": Idle(_unless("training", "spike_factor")),
  "loss_scale_init": Idle(_float16),
  "grouped_product": Idle(lambda c: "" if _experts(c) else "no layer has experts"),
  "routed_bias_update_rate": Idle(fixed_router_bias, in_model_file=True),
  "load_balance_loss": Idle(_definition),
  "load_balance_loss_weight": Idle(_losses),
  "router_z_loss_weight": Idle(_losses),
  "z_loss_multiplier": Idle(_vocabulary),
  "indexer_loss_scaling_factor": Idle(_indexer),
  "indexer_sparse_training": Idle(_indexer),
  "eval_steps": Idle(_unless("data", "eval_interval")),
  "lora_modules": Idle(_adapter),
  "text_field": Idle(_text_field),
  "on_bad_record": Idle(_bad_records),
  "images_field": Idle(_unless("vision", "use_multimodal")),
  "max_images_per_row": Idle(_unless("vision", "use_multimodal")),
  "float16_clamp": Idle(_float16),
  "data_shuffle_seed": Idle(_unless("data", "shuffle")),
  "sample_prompts": Idle(_unless("logging", "sample_every")),
  "sample_tokens": Idle(_unless("logging", "sample_every")),
  "sample_temperature": Idle(_unless("logging", "sample_every")),
  "eval_tasks_limit": Idle(_unless("logging", "eval_tasks_interval")),
  "checkpoint_interval": Idle(_unless("checkpoint", "enable_checkpointing")),
  "max_to_keep": Idle(_unless("checkpoint", "enable_checkpointing")),
  "async_checkpointing": Idle(_unless("checkpoint", "enable_checkpointing")),
}
"""Keys that may have no effect because of other values."""

_OFF = {"adafactor_momentum_rank": 0, "routed_bias_update_rate": 0.0, "load_balance_loss_weight": 0.0}
_OFF |= {"router_z_loss_weight": 0.0, "z_loss_multiplier": 0.0, "clip": "exact"}
"""Values that switch a key off; they are never reported."""


def idle_notes(config: Config, origins: Mapping[str, str], said: frozenset[str], of_model: frozenset[str]) -> Iterator[str]:
  """Yield a sentence for each key that is set and has no effect.

  Args:
    config: a checked configuration.
    origins: place of the value, by key.
    said: keys that the command line or an overlay sets.
    of_model: keys that the model file sets.
  """
  for key, idle in IDLE.items():
    if key not in said and not (idle.in_model_file and key in of_model):
      continue
    value = getattr(getattr(config, LEAVES[key][0]), key, None)  # a key that the family lacks is checked in rules.py
    if value is None or (key in _OFF and value == _OFF[key]):
      continue
    if why := idle.why(config):
      yield f"{origins[key]}: {key} has no effect: {why}"
