"""The typed configuration: one frozen dataclass per section of ``configs/base.yml``, which holds defaults and meanings.

``maxtext_like.config.load.load_config`` builds a ``Config``; everything else takes the section it needs. Rules among
the values of one section are here, rules across sections in ``rules.py``.
"""

import os
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal

from maxtext_like.config.model import ModelConfig
from maxtext_like.config.parallelism import MeshConfig
from maxtext_like.config.paths import by_source
from maxtext_like.config.precision_keys import PrecisionConfig
from maxtext_like.config.problems import Checked, Problem, above_zero, alternatives, at_least
from maxtext_like.config.vision import VisionConfig, VisionTower
from maxtext_like.data.registry import DATASETS, OF_FILES
from maxtext_like.layers.kernels.attention.registry import Choice
from maxtext_like.layers.kernels.grouped import registry as grouped
from maxtext_like.layers.kernels.norm import registry as norm
from maxtext_like.models.registry import FAMILIES
from maxtext_like.training.objectives import registry as objectives
from maxtext_like.training.optimizers import registry as optimizers

NO_CONVERSATIONS = "whose documents are no conversations"  # what is wrong with such a dataset in data_format: chat
LONGEST_NAME = 255  # bytes of a file name, on every file system in use


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Checked):
  """``training:``, the step, the optimizer and its schedule. Lengths and batches are tokens and rows."""

  steps: int | None
  epochs: int | None
  seed: int
  module_api: Literal["nnx", "linen"]
  scan_layers: bool
  remat_policy: Literal["none", "minimal", "save_mlp", "save_outputs", "save_attention", "full"]
  remat_offload: Literal["none", "layer_inputs", "kept", "all"]
  grouped_product: grouped.Choice
  norm_kernel: norm.Choice
  attention: Choice
  per_device_batch_size: int | float
  max_target_length: int
  gradient_accumulation_steps: int
  objective: objectives.Name
  opt_type: optimizers.Name
  learning_rate: float
  lr_schedule_type: Literal["cosine", "linear", "constant", "wsd"]
  lr_schedule_steps: int | None
  warmup_steps_fraction: float
  learning_rate_final_fraction: float
  wsd_decay_steps_fraction: float
  adam_b1: float
  adam_b2: float
  adam_eps: float
  adam_weight_decay: float
  mu_dtype: Literal["float32", "bfloat16", "dynamic8"] | None
  nu_dtype: Literal["float32", "bfloat16", "dynamic8"]
  stochastic_rounding: bool
  sgd_momentum: float
  gradient_clipping_threshold: float
  clip: Literal["exact", "running", "layer"]
  optimizer_in_backward: bool
  z_loss_multiplier: float
  num_vocab_tiling: int
  trainable_parameters_mask: tuple[str, ...]
  vision_tower: VisionTower | None
  finite_check_steps: int
  max_skipped_steps: int
  replay_failed_step: bool
  spike_factor: float
  spike_window: int
  max_spike_rollbacks: int
  early_stopping_patience: int
  early_stopping_threshold: float
  loss_scale_init: float

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values."""
    if self.steps is None and self.epochs is None:
      yield Problem("neither steps nor epochs is set", ("steps", "epochs"), "set one of them, as in steps=100 or epochs=3")
    yield from at_least(self, 1, "steps", "epochs", "gradient_accumulation_steps", "loss_scale_init")
    yield from at_least(self, 1, "lr_schedule_steps")
    yield from at_least(self, 2, "max_target_length")
    yield from at_least(self, 0, "seed", "num_vocab_tiling", "max_skipped_steps", "z_loss_multiplier")
    yield from at_least(self, 0, "adam_weight_decay", "gradient_clipping_threshold")
    yield from at_least(self, -1, "finite_check_steps")
    yield from above_zero(self, "per_device_batch_size", "learning_rate", "adam_eps")
    yield from at_least(self, 1, "spike_window", "max_spike_rollbacks")
    yield from self._offload_problems()
    if self.spike_factor and not self.spike_factor > 1:
      yield Problem(
        f"spike_factor = {self.spike_factor} calls ordinary losses spikes; above 1, or 0 for off", ("spike_factor",)
      )
    for name in ("warmup_steps_fraction", "learning_rate_final_fraction", "wsd_decay_steps_fraction"):
      if not 0 <= getattr(self, name) <= 1:
        yield Problem(f"{name} = {getattr(self, name)} is outside 0 to 1", (name,))
    for name in ("adam_b1", "adam_b2", "sgd_momentum"):
      if not 0 <= getattr(self, name) < 1:
        yield Problem(f"{name} = {getattr(self, name)} is outside [0, 1)", (name,))
    if self.nu_dtype == "bfloat16" and self.adam_b2 > 1 - 2**-8:
      yield Problem(
        f"nu_dtype = bfloat16 with adam_b2 = {self.adam_b2}: numbers fall by under half a spacing of it a step, so not",
        ("nu_dtype", "adam_b2"),
        "set nu_dtype=dynamic8, whose blocks fall as a whole, or nu_dtype=float32, or adam_b2 to at most 0.996",
      )  # fmt: skip
    yield from at_least(self, 0, "early_stopping_patience", "early_stopping_threshold")
    if self.early_stopping_threshold > 0 and not self.early_stopping_patience:
      yield Problem(
        f"early_stopping_threshold = {self.early_stopping_threshold} without early_stopping_patience: nothing stops early",
        ("early_stopping_threshold", "early_stopping_patience"),
        "set the evaluations to wait for a better one, as in early_stopping_patience=3",
      )  # fmt: skip
    if self.lr_schedule_type == "wsd" and self.warmup_steps_fraction + self.wsd_decay_steps_fraction > 1:
      yield Problem(
        f"warmup_steps_fraction = {self.warmup_steps_fraction} and wsd_decay_steps_fraction = "
        f"{self.wsd_decay_steps_fraction} are more than the whole run",
        ("warmup_steps_fraction", "wsd_decay_steps_fraction"),
      )
    for pattern in self.trainable_parameters_mask:
      try:
        re.compile(pattern)
      except re.error as error:
        yield Problem(
          f"trainable_parameters_mask: {pattern!r} is not a regular expression: {error}",
          ("trainable_parameters_mask",),
        )

  def _offload_problems(self) -> Iterator[Problem]:
    keys, said = (
      ("remat_offload", "remat_policy"),
      f"remat_offload = {self.remat_offload} with remat_policy: {self.remat_policy}",
    )
    if self.remat_offload != "none" and self.remat_policy == "none":
      yield Problem(
        f"{said}, which keeps whatever the gradient needs", keys,
        "set remat_policy to what is to be kept, as in remat_policy=full, or leave remat_offload out",
      )  # fmt: skip
    if self.remat_offload in ("kept", "all") and self.remat_policy == "full":
      yield Problem(
        f"{said}, which keeps nothing but what layers read", keys,
        "set remat_offload to layer_inputs, or remat_policy to what is to be kept, as in remat_policy=save_outputs",
      )  # fmt: skip

  @property
  def last_step(self) -> int:
    """The number of the last step, which a run by epochs has to count first (``training.counted``)."""
    assert self.steps is not None, "nobody has counted the steps of these epochs"
    return self.steps


Paths = str | tuple[str, ...] | dict[str, str | tuple[str, ...]] | None
_SOURCE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # of which names of metrics are made


TABLES = ("embed_tokens", "lm_head")
"""What ``modules_to_save`` may name."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Checked):
  """``adapter:``, low-rank additions that are trained in the place of the weights (LoRA)."""

  lora_rank: int
  lora_alpha: float | None
  lora_rslora: bool
  lora_dora: bool
  lora_dropout: float
  lora_modules: tuple[str, ...]
  modules_to_save: tuple[str, ...]
  lora_rank_pattern: dict[str, int] | None = field(hash=False)
  lora_alpha_pattern: dict[str, float] | None = field(hash=False)
  lora_from: str | None
  base_weights: Literal["bfloat16", "nf4", "int8", "fp8_block"] | None
  base_weights_modules: tuple[str, ...]

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values."""
    yield from at_least(self, 0, "lora_rank")
    yield from above_zero(self, "lora_alpha")
    for key in ("lora_rank_pattern", "lora_alpha_pattern"):
      for entry, value in (getattr(self, key) or {}).items():
        if value <= 0:
          yield Problem(f"{key}: {entry}: {value:g} is not above 0", (key,), "leave out of lora_modules what is to have none")
    if self.lora_from == "":
      yield Problem("lora_from is empty", ("lora_from",), "name a directory, or null for a fresh adapter")
    if not 0 <= self.lora_dropout < 1:
      yield Problem(f"lora_dropout = {self.lora_dropout} is outside [0, 1)", ("lora_dropout",))
    if self.lora_rank and not self.lora_modules:
      yield Problem(
        f"lora_rank = {self.lora_rank} without lora_modules: nothing would be trained", ("lora_rank", "lora_modules"),
        "name some, as in lora_modules=[all-linear] or lora_modules=[q_proj, v_proj]",
      )  # fmt: skip
    for name in sorted(set(self.modules_to_save) - set(TABLES)):
      yield Problem(
        f"modules_to_save: '{name}' is not one of {', '.join(TABLES)}", ("modules_to_save",),
        "vision_tower=trained or projector is for a tower; of what else is a product, name an addition in lora_modules",
      )  # fmt: skip
    if self.base_weights_modules and not self.base_weights:
      yield Problem(
        "base_weights_modules without base_weights: nothing would be stored otherwise",
        ("base_weights_modules", "base_weights"), "say how, as in base_weights=nf4, or leave it out",
      )  # fmt: skip
    if not self.lora_rank:
      of_it = ("lora_dropout", "base_weights")  # which any adapter has, a given one too
      patterns = ("lora_rank_pattern", "lora_alpha_pattern")
      for name in ("lora_alpha", "lora_rslora", "lora_dora", "modules_to_save", *patterns, *(() if self.lora_from else of_it)):
        if value := getattr(self, name):
          shown = f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value).lower()
          said = f"{name} = {shown} does nothing with"
          if self.lora_from:
            yield Problem(f"{said} lora_from: the adapter there brings its own", (name, "lora_from"), "leave it out")
            continue
          yield Problem(
            f"{said} lora_rank: 0", (name, "lora_rank"),
            "set lora_rank to the rank of the additions, as in lora_rank=16, or leave it out",
          )  # fmt: skip

  @property
  def trained(self) -> bool:
    """Whether there is an adapter, of these settings or of those that come with a given one."""
    return bool(self.lora_rank or self.lora_from)

  @property
  def alpha(self) -> float:
    """``lora_alpha``, where null is ``lora_rank``."""
    return self.lora_rank if self.lora_alpha is None else self.lora_alpha

  def scale(self, rank: int, alpha: float) -> float:
    """What multiplies an addition: alpha / rank, or alpha / sqrt(rank) with ``lora_rslora``."""
    return alpha / (rank**0.5 if self.lora_rslora else rank)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
  """``data:``, where the text comes from and how it becomes rows of tokens."""

  dataset: str
  dataset_path: Paths = field(hash=False)
  dataset_weights: dict[str, float] | None = field(hash=False)
  tokenizer: str
  text_field: str
  data_format: Literal["text", "chat"]
  chat_template: str
  train_on: Literal["assistant", "all", "last"]
  special_tokens_in_text: Literal["parse", "literal", "error"] | None
  on_bad_record: Literal["error", "skip"]
  packing: bool
  eval_fraction: float
  eval_path: Paths = field(hash=False)
  eval_interval: int
  eval_steps: int
  shuffle: bool
  data_shuffle_seed: int
  dataset_documents_max: int | None

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values."""
    yield from at_least(self, 0, "eval_interval", "data_shuffle_seed")
    yield from at_least(self, 1, "eval_steps", "dataset_documents_max")
    if not 0 <= self.eval_fraction < 1:
      yield Problem(f"eval_fraction = {self.eval_fraction} is outside [0, 1)", ("eval_fraction",))
    if self.eval_path and self.eval_fraction > 0:
      yield Problem(
        f"eval_path with eval_fraction = {self.eval_fraction}", ("eval_path", "eval_fraction"),
        "evaluate on files of their own or on a share of the documents: leave one of them out",
      )  # fmt: skip
    if self.eval_path and self.eval_interval == 0:
      yield Problem(
        "eval_path without eval_interval: nothing evaluates", ("eval_path", "eval_interval"),
        "set the steps between evaluations, as in eval_interval=100",
      )  # fmt: skip
    if self.eval_interval > 0 and self.eval_fraction == 0 and not self.eval_path:
      yield Problem(
        f"eval_interval = {self.eval_interval} with eval_fraction = 0", ("eval_interval", "eval_fraction"),
        "hold a part of the documents out, as in eval_fraction=0.05, name other files in eval_path, or set eval_interval to 0",
      )  # fmt: skip
    kind = DATASETS[self.dataset]
    if kind.files and not self.dataset_path:
      yield Problem(
        f"dataset: {self.dataset} without dataset_path", ("dataset", "dataset_path"),
        "name the files, as in dataset_path=/data/*.txt",
      )  # fmt: skip
    if not kind.files and self.dataset_path:
      yield Problem(
        f"dataset: {self.dataset} reads no files, but dataset_path is set", ("dataset", "dataset_path"),
        f"set dataset to {alternatives(OF_FILES)}, or leave dataset_path out",
      )  # fmt: skip
    if not kind.files and self.eval_path:
      yield Problem(
        f"dataset: {self.dataset} reads no files, but eval_path is set", ("dataset", "eval_path"),
        "eval_path has files of the same kind as dataset_path",
      )  # fmt: skip
    if not kind.text and self.special_tokens_in_text is not None:
      yield Problem(
        f"special_tokens_in_text: {self.special_tokens_in_text} with dataset: {self.dataset}, which has no text",
        ("special_tokens_in_text", "dataset"), "leave it out",
      )  # fmt: skip
    yield from self._mixture_problems()
    if self.data_format == "chat" and not kind.fields:
      yield Problem(
        f"data_format: chat with dataset: {self.dataset}, {NO_CONVERSATIONS}", ("data_format", "dataset"),
        f"set dataset to {alternatives(tuple(name for name, other in DATASETS.items() if other.fields))}",
      )  # fmt: skip
    if self.data_format == "chat" and self.special_tokens_in_text is not None:
      yield Problem(
        f"special_tokens_in_text: {self.special_tokens_in_text} with data_format: chat, where all that is said is text",
        ("special_tokens_in_text", "data_format"), "leave it out",
      )  # fmt: skip
    if self.data_format == "text" and self.train_on != "assistant":
      yield Problem(
        f"train_on: {self.train_on} with data_format: text, all of which is learned", ("train_on", "data_format"),
        "set data_format to chat, or leave train_on out",
      )  # fmt: skip
    for name in ("tokenizer", "text_field", "chat_template"):
      if not getattr(self, name):
        yield Problem(f"{name} is empty", (name,))

  def _mixture_problems(self) -> Iterator[Problem]:
    for key in ("dataset_path", "eval_path"):
      for name, paths in by_source(getattr(self, key)).items():
        if name and not _SOURCE_NAME.fullmatch(name):
          yield Problem(f"{key}: {name!r} is no name of a source", (key,), "use letters, digits, '.', '_' and '-'")
        if name and not paths:
          yield Problem(f"{key}: the source {name} has no files", (key,), "name them, or leave the source out")
    keys, weights = ("dataset_path", "dataset_weights"), self.dataset_weights
    if not isinstance(self.dataset_path, dict):
      if weights is not None:
        what = "dataset_weights without sources in dataset_path"
        yield Problem(what, keys, "name them, as in dataset_path={web: web/*.jsonl, code: code/*.jsonl}")
      return
    if weights is None:
      fix = f"how many tokens of each, as in dataset_weights={{{', '.join(f'{name}: 1' for name in self.dataset_path)}}}"
      yield Problem("dataset_path names sources, and dataset_weights does not say how they are mixed", keys, fix)
      return
    for name in sorted(self.dataset_path.keys() ^ weights.keys()):
      lacking = "dataset_weights" if name in self.dataset_path else "dataset_path"
      yield Problem(f"{lacking} has no {name!r}", keys, "both have the same names; a source that is not wanted is in neither")
    for name, weight in weights.items():
      if weight <= 0:
        fix = f"weights are relative, any numbers above 0; leave {name} out of both keys to train without it"
        yield Problem(f"dataset_weights: {name}: {weight:g} is not above 0", ("dataset_weights",), fix)

  @property
  def one_document(self) -> bool:
    """Whether every row is one document, padding behind it."""
    return not self.packing or not DATASETS[self.dataset].text


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Checked):
  """``checkpoint:``, what is saved, how often, and what a run starts from."""

  enable_checkpointing: bool
  checkpoint_interval: int
  max_to_keep: int
  keep_best: bool
  async_checkpointing: bool
  resume: bool
  allow_dtype_change: bool
  allow_data_change: bool
  init_from: str | None
  checkpoint_mirror: str | None

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values."""
    yield from at_least(self, 1, "checkpoint_interval", "max_to_keep")
    if self.resume and not self.enable_checkpointing:
      yield Problem(
        "resume: true with enable_checkpointing: false", ("resume", "enable_checkpointing"),
        "turn one of them around: a run without checkpoints cannot be resumed",
      )  # fmt: skip
    if self.checkpoint_mirror is not None and not self.enable_checkpointing:
      yield Problem(
        f"checkpoint_mirror = {self.checkpoint_mirror} with enable_checkpointing: false",
        ("checkpoint_mirror", "enable_checkpointing"),
        "there is nothing to copy: leave one of them out",
      )
    if self.checkpoint_mirror == "":
      yield Problem("checkpoint_mirror is empty", ("checkpoint_mirror",), "name a path or a URL, or null for none")
    if self.init_from == "":
      yield Problem("init_from is empty", ("init_from",), "name a directory, or null for fresh weights")


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig(Checked):
  """``watchdog:``, when a run that does not get on ends. Seconds; 0: no limit."""

  watchdog_compile_seconds: float
  watchdog_step_seconds: float
  watchdog_data_seconds: float
  watchdog_save_seconds: float
  watchdog_exit_seconds: float
  watchdog_peers_seconds: float
  watchdog_heartbeat_seconds: float
  max_restarts_without_progress: int

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values."""
    yield from at_least(self, 0, *(f.name for f in fields(self)))
    yield from at_least(self, 1, "watchdog_peers_seconds", "watchdog_heartbeat_seconds")

  def limits(self) -> dict[str, float]:
    """Seconds by kind, as ``training.watchdog.Watchdog`` takes them. Waiting for data ends by itself a minute earlier."""
    data = self.watchdog_data_seconds
    return {
      "compile": self.watchdog_compile_seconds,
      "step": self.watchdog_step_seconds,
      "data": data and data + 60,
      "save": self.watchdog_save_seconds,
      "exit": self.watchdog_exit_seconds,
    }


def profiled(steps: str) -> tuple[int, int]:
  """The first and the last step of a value of ``profile_steps``: "10-12", or "10" for one. Raises ValueError."""
  first, _, last = steps.partition("-")
  begin, end = int(first), int(last or first)
  if not 1 <= begin <= end:
    raise ValueError(f"{steps}: not a range of steps")
  return begin, end


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Checked):
  """``logging:``, where a run writes and what it shows."""

  output_dir: str
  run_name: str | None
  enable_tensorboard: bool
  wandb_project: str | None
  mlflow_experiment: str | None
  numerics_every: int
  update_survival_every: int
  sample_every: int
  sample_prompts: tuple[str, ...]
  sample_tokens: int
  sample_temperature: float
  log_interval: int
  profile_steps: str | None
  compilation_cache_dir: str | None

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values."""
    yield from at_least(self, 0, "numerics_every", "update_survival_every")
    yield from at_least(self, 1, "log_interval", "sample_tokens")
    yield from at_least(self, 0, "sample_every", "sample_temperature")
    if self.sample_every > 0 and not self.sample_prompts:
      yield Problem(
        f"sample_every = {self.sample_every} without sample_prompts", ("sample_every", "sample_prompts"),
        'name some, as in sample_prompts=["def main():"], or set sample_every to 0',
      )  # fmt: skip
    if self.profile_steps is not None:
      try:
        profiled(self.profile_steps)
      except ValueError:
        yield Problem(
          f"profile_steps = {self.profile_steps!r} names no steps", ("profile_steps",), "write the first and the last, as 10-12"
        )
    if not self.output_dir:
      yield Problem("output_dir is empty", ("output_dir",), "name a directory, '.' for the current one")
    if self.run_name is not None and (self.run_name in ("", ".", "..") or "/" in self.run_name):
      yield Problem(
        f"run_name = {self.run_name!r} is not the name of a directory", ("run_name",),
        "one name without '/'; output_dir says where it lies",
      )  # fmt: skip
    if (length := len(os.fsencode(self.run_name or ""))) > LONGEST_NAME:
      yield Problem(
        f"run_name has {length} bytes, the name of a directory at most {LONGEST_NAME}", ("run_name",), "choose a shorter one"
      )
    for name in ("wandb_project", "mlflow_experiment"):
      if getattr(self, name) == "":
        yield Problem(f"{name} is empty", (name,), "name it, or null for none")
    if self.compilation_cache_dir == "":
      yield Problem("compilation_cache_dir is empty", ("compilation_cache_dir",), "name a directory, or null for none")


@dataclass(frozen=True, kw_only=True)
class Config:
  """Everything a run is told, checked. ``dataclasses.replace`` on a section checks that section again."""

  model: ModelConfig
  vision: VisionConfig
  precision: PrecisionConfig
  training: TrainingConfig
  adapter: AdapterConfig
  data: DataConfig
  checkpoint: CheckpointConfig
  watchdog: WatchdogConfig
  mesh: MeshConfig
  logging: LoggingConfig


SECTIONS: dict[str, type] = typing.get_type_hints(Config)
"""Section name to its dataclass, in the order of the files. Families extend those of ``model:`` and ``vision:``."""


def section_type(section: str, decoder_block: str) -> type:
  """The dataclass of a section in a family of models."""
  if section == "model":
    return FAMILIES[decoder_block].config
  return FAMILIES[decoder_block].vision or VisionConfig if section == "vision" else SECTIONS[section]


def _leaves() -> tuple[dict[str, tuple[str, object]], dict[str, tuple[str, ...]]]:
  """``LEAVES`` and ``FAMILIES_OF_KEY``."""
  leaves: dict[str, tuple[str, object]] = {}
  owners: dict[str, list[str]] = {}
  for section, base in SECTIONS.items():
    own = {name: {"model": f.config, "vision": f.vision}.get(section) for name, f in FAMILIES.items()}
    for name, cls in {"": base, **own}.items():
      kinds = typing.get_type_hints(cls) if cls else {}
      for leaf in (f.name for f in fields(cls)) if cls else ():
        known = leaves.setdefault(leaf, (section, kinds[leaf]))
        assert known == (section, kinds[leaf]), f"{leaf} of {name} has another section or type than {known}"
        if name:
          owners.setdefault(leaf, []).append(name)
  leaves["decoder_block"] = ("model", Literal[tuple(FAMILIES)])
  leaves["dataset"] = ("data", Literal[tuple(DATASETS)])
  return leaves, {leaf: tuple(names) for leaf, names in owners.items() if len(names) < len(FAMILIES)}


LEAVES, FAMILIES_OF_KEY = _leaves()
"""Leaf name to its section and type, over all families, and the families of a key that not every one has.

A leaf's name is unique over all sections."""

LARGEST_INT = 2**31 - 1
"""Sizes and counts meet int32 on the device. Checked while values are read: a rule that loops over layers never ends."""

LARGEST: dict[str, int] = {
  "seed": 2**63 - 1,
  "data_shuffle_seed": 2**63 - 1,
  "num_decoder_layers": 10_000,
  "num_hidden_layers_for_vit": 10_000,
}
"""The same for leaves that differ."""
