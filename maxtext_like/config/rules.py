"""Checks across the sections of a configuration, and checks for keys that the model family would ignore.

Open this file for errors that name keys of two sections. Checks within one section are in the section's dataclass. Setting a
key that the model ignores is an error, because an ignored key misleads its author.
"""

from collections.abc import Iterator, Mapping

from maxtext_like.config.choices import DATASETS
from maxtext_like.config.families import FAMILIES
from maxtext_like.config.layer_precision import layer_problems
from maxtext_like.config.paths import url_problems
from maxtext_like.config.precision_keys import EXPERTS, ROUTER, foreign_keys
from maxtext_like.config.problems import Problem
from maxtext_like.config.schema import FAMILIES_OF_KEY, Config, profiled


def cross_problems(
  config: Config,
  values: Mapping[str, object],
  defaults: Mapping[str, object],
  explicit: frozenset[str],
  *,
  inference: bool = False,
) -> Iterator[Problem]:
  """Yield every problem that involves more than one section.

  Args:
    config: the sections, which may have problems themselves.
    values: value of every key, including keys of other families.
    defaults: values of ``configs/base.yml`` by key.
    explicit: keys that a file or the command line sets.
    inference: the model is loaded and not trained, so ``base_weights`` needs no adapter.
  """
  model = config.model
  yield from _foreign_keys(config, values, defaults, explicit)
  if config.vision.use_multimodal and "use_multimodal" not in _foreign(model.decoder_block):
    yield from config.vision.decoder_problems(model)
  yield from model.ignored_values()
  # Only the padding token is embedded by the number given here. The tokenizer supplies bos and eos and is checked separately.
  if model.pad_token_id is not None and model.pad_token_id >= model.vocab_size >= 1:
    yield Problem(
      f"pad_token_id = {model.pad_token_id} is outside the vocabulary of {model.vocab_size}",
      ("pad_token_id", "vocab_size"),
      fix=f"set pad_token_id to the tokenizer's padding token, 0 to {model.vocab_size - 1}",
    )
  length, longest = config.training.max_target_length, model.max_position_embeddings
  if length > longest >= 1:
    yield Problem(
      f"max_target_length = {length} is more than max_position_embeddings = {longest}",
      ("max_target_length", "max_position_embeddings"),
      f"set max_target_length={longest}, or max_position_embeddings={length}",
    )
  if config.training.stochastic_rounding and config.precision.weight_dtype == "float32":
    yield Problem(
      "stochastic_rounding = true has no effect with weight_dtype: float32", ("stochastic_rounding", "weight_dtype"),
      "leave it out: updates of float32 weights are not rounded",
    )  # fmt: skip
  if config.adapter.trained and config.training.trainable_parameters_mask:
    key = _adapter_key(config)
    which = "choose the weights with lora_modules, and " if key == "lora_rank" else ""
    yield Problem(
      f"trainable_parameters_mask with {key} = {getattr(config.adapter, key)}", ("trainable_parameters_mask", key),
      f"{which}leave trainable_parameters_mask out: only the adapter is trained",
    )  # fmt: skip
  if config.adapter.base_weights and not config.adapter.trained and not inference:
    yield Problem(
      f"base_weights = {config.adapter.base_weights} has no effect with lora_rank: 0", ("base_weights", "lora_rank"),
      "set lora_rank to the rank of the adapter, as in lora_rank=16, or leave it out",
    )  # fmt: skip
  yield from _tower_problems(config)
  if config.training.stochastic_rounding and config.adapter.trained:
    yield Problem(
      f"stochastic_rounding = true has no effect with {_adapter_key(config)}: an adapter is stored in float32",
      ("stochastic_rounding", _adapter_key(config)), "leave it out",
    )  # fmt: skip
  if config.training.spike_factor and not config.checkpoint.enable_checkpointing:
    yield Problem(
      f"spike_factor = {config.training.spike_factor} with enable_checkpointing: false",
      ("spike_factor", "enable_checkpointing"),
      "set spike_factor=0 or enable_checkpointing=true: after a spike the run returns to a checkpoint",
    )  # fmt: skip
  yield from _epoch_problems(config)
  yield from _in_backward_problems(config)
  for key, value, off in (
    ("early_stopping_patience", config.training.early_stopping_patience, "0"),
    ("keep_best", config.checkpoint.keep_best, "false"),
  ):
    if value and not config.data.eval_interval:
      yield Problem(
        f"{key} = {_shown(value)} needs evaluations, but eval_interval = 0", (key, "eval_interval"),
        f"set the steps between evaluations, as in eval_interval=100, or {key}={off}",
      )  # fmt: skip
  if config.checkpoint.keep_best and not config.checkpoint.enable_checkpointing:
    yield Problem(
      "keep_best = true with enable_checkpointing: false", ("keep_best", "enable_checkpointing"),
      "set enable_checkpointing=true, or leave keep_best out: no checkpoint would be saved",
    )  # fmt: skip
  profile, steps = config.logging.profile_steps, config.training.steps
  if profile is not None and steps is not None and not list(config.logging.problems()) and profiled(profile)[1] > steps >= 1:
    yield Problem(
      f"profile_steps = {profile} is beyond steps = {steps}", ("profile_steps", "steps"), f"set steps from 1 to {steps}"
    )
  if config.logging.sample_every > 0 and not DATASETS[config.data.dataset].text:
    yield Problem(
      f"sample_every = {config.logging.sample_every} with dataset: {config.data.dataset}", ("sample_every", "dataset"),
      "set sample_every=0 or another dataset: the tokens of this one are not text",
    )  # fmt: skip
  if config.logging.eval_tasks_interval > 0 and not DATASETS[config.data.dataset].text:
    yield Problem(
      f"eval_tasks_interval = {config.logging.eval_tasks_interval} with dataset: {config.data.dataset}",
      ("eval_tasks_interval", "dataset"), "leave eval_tasks out, or set another dataset: the tokens of this one are not text",
    )  # fmt: skip
  if config.logging.sample_every > 0 and config.data.data_format == "chat" and "" in config.logging.sample_prompts:
    yield Problem(
      "sample_prompts has an empty prompt with data_format: chat, where each prompt is a user message",
      ("sample_prompts", "data_format"),
      'write prompts, as in sample_prompts=["What is 1 + 1?"]',
    )  # fmt: skip
  yield from url_problems(config)
  yield from layer_problems(config)


def _adapter_key(config: Config) -> str:
  """Return the key that switches the adapter on: ``lora_rank``, or ``lora_from`` with the rank of that adapter."""
  return "lora_rank" if config.adapter.lora_rank else "lora_from"


def _tower_problems(config: Config) -> Iterator[Problem]:
  """Yield problems of ``vision_tower`` without a tower, or with another key that selects the trained parameters."""
  t, trained = config.training, config.adapter.trained
  if t.vision_tower is None:
    return
  said = f"vision_tower = {t.vision_tower}"
  if FAMILIES[config.model.decoder_block].vision is None:
    yield Problem(
      f"{said} has no effect: {config.model.decoder_block} models have no vision tower", ("vision_tower", "decoder_block"),
      "leave it out",
    )  # fmt: skip
  elif not config.vision.use_multimodal:
    yield Problem(
      f"{said} with use_multimodal: false, which builds no vision tower", ("vision_tower", "use_multimodal"),
      "set use_multimodal=true, or leave vision_tower out",
    )  # fmt: skip
  if t.trainable_parameters_mask:
    yield Problem(
      f"{said} with trainable_parameters_mask, which selects the trained parameters of the tower too",
      ("vision_tower", "trainable_parameters_mask"), "leave one of them out; the tower's parameters are vision.*",
    )  # fmt: skip
  if t.vision_tower == "adapted" and not trained:
    yield Problem(
      f"{said} needs an adapter, but lora_rank = 0", ("vision_tower", "lora_rank"),
      "set lora_rank, as in lora_rank=16, or vision_tower to trained, projector or frozen",
    )  # fmt: skip


def _epoch_problems(config: Config) -> Iterator[Problem]:
  """Yield problems of ``epochs``: passes cannot be counted for endless data, or if the run skips data."""
  t, data = config.training, config.data
  if t.epochs is None:
    return
  epochs = f"epochs = {t.epochs}"
  if t.steps is not None:
    yield Problem(
      f"{epochs} and steps = {t.steps} both set the length of the run",
      ("epochs", "steps"),
      "leave one of them out, or set it to null",
    )
  if not DATASETS[data.dataset].text:
    yield Problem(
      f"{epochs} with dataset: {data.dataset}, which is endless", ("epochs", "dataset"), "set steps instead of epochs"
    )
  if data.dataset_weights is not None:
    yield Problem(
      f"{epochs} with dataset_weights, which repeats each source separately", ("epochs", "dataset_weights"),
      "set steps, or list all files, as in dataset_path=[a.jsonl, b.jsonl], to read each document once per epoch",
    )  # fmt: skip
  if t.spike_factor:
    yield Problem(
      f"{epochs} with spike_factor = {t.spike_factor}, which skips data after a spike", ("epochs", "spike_factor"), "set steps"
    )


def _in_backward_problems(config: Config) -> Iterator[Problem]:
  """Yield problems of ``optimizer_in_backward``, which updates a layer before the gradients of the others exist."""
  t = config.training
  if not t.optimizer_in_backward:
    if t.clip != "exact":
      yield Problem(
        f"clip = {t.clip} without optimizer_in_backward", ("clip", "optimizer_in_backward"),
        "set clip=exact: the ordinary step knows the global norm before it updates anything",
      )  # fmt: skip
    if t.optimizer_memory_host_offload:
      without = config.adapter.trained or t.gradient_accumulation_steps > 1 or config.logging.numerics_every > 0
      yield Problem(
        "optimizer_memory_host_offload = true without optimizer_in_backward, which transfers moments one layer at a time",
        ("optimizer_memory_host_offload", "optimizer_in_backward"),
        "leave it out: other keys of this run exclude optimizer_in_backward" if without else "set optimizer_in_backward=true",
      )  # fmt: skip
    return
  if t.optimizer_memory_host_offload and not t.scan_layers:
    yield Problem(
      "optimizer_memory_host_offload = true with scan_layers: false, with which the compiler may load all moments at once",
      ("optimizer_memory_host_offload", "scan_layers"), "set scan_layers=true",
    )  # fmt: skip
  adapter = _adapter_key(config)
  why = {
    "gradient_accumulation_steps": (
      t.gradient_accumulation_steps > 1,
      "raise per_device_batch_size instead: a sum over microbatches needs the gradients of all layers at the same time",
    ),
    adapter: (config.adapter.trained, "leave optimizer_in_backward out: the gradients of an adapter are small"),
    "numerics_every": (
      config.logging.numerics_every > 0,
      "set numerics_every=0: it needs the gradients of all layers at the same time",
    ),
  }
  values = {adapter: getattr(config.adapter, adapter), "numerics_every": config.logging.numerics_every}
  for key, (wrong, fix) in why.items():
    if wrong:
      value = values.get(key, getattr(t, key, None))
      yield Problem(f"{key} = {value} with optimizer_in_backward: true", (key, "optimizer_in_backward"), fix)


def _foreign(decoder_block: str) -> tuple[str, ...]:
  """Return the keys that only other families have."""
  return tuple(key for key, families in FAMILIES_OF_KEY.items() if decoder_block not in families)


def _foreign_keys(
  config: Config, values: Mapping[str, object], defaults: Mapping[str, object], explicit: frozenset[str]
) -> Iterator[Problem]:
  model, precision = config.model, config.precision
  for key in _foreign(model.decoder_block):
    if values[key] != defaults[key]:
      yield Problem(
        f"{key} = {_shown(values[key])} has no effect in decoder_block {model.decoder_block}",
        (key, "decoder_block"),
        f"leave it out; it is a key of {' and '.join(FAMILIES_OF_KEY[key])}",
      )
  for key, lacks in foreign_keys(model).items():
    if key in explicit:
      yield Problem(
        f"{key} = {_shown(getattr(precision, key))} has no effect: the model does not have {lacks}",
        (key, "num_experts" if lacks in (ROUTER.name, EXPERTS.name) and "experts" in model.parts else "decoder_block"),
        "leave it out",
      )


def _shown(value: object) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)
