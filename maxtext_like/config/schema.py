"""The typed configuration: one frozen dataclass for each section of ``configs/base.yml``, and the types of all keys.

``maxtext_like.config.load.load_config`` builds a ``Config``. The defaults and descriptions of keys are in ``configs/base.yml``,
checks within a section in its dataclass, checks across sections in ``rules.py``.
"""

import os
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields

from maxtext_like.config import choices
from maxtext_like.config.adapter_keys import AdapterConfig
from maxtext_like.config.data_keys import DataConfig
from maxtext_like.config.families import FAMILIES
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.parallelism import MeshConfig
from maxtext_like.config.precision_keys import PrecisionConfig
from maxtext_like.config.problems import Checked, Problem, at_least
from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.config.vision import VisionConfig

LONGEST_NAME = 255  # bytes of a file name, on every file system in use


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Checked):
  """Section ``checkpoint:``: what is saved, how often, and which weights a run starts from."""

  enable_checkpointing: bool
  checkpoint_interval: int
  max_to_keep: int
  keep_best: bool
  async_checkpointing: bool
  resume: bool
  allow_dtype_change: bool
  allow_model_change: bool
  allow_data_change: bool
  init_from: str | None
  checkpoint_mirror: str | None

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values."""
    yield from at_least(self, 1, "checkpoint_interval", "max_to_keep")
    if self.resume and not self.enable_checkpointing:
      yield Problem(
        "resume: true with enable_checkpointing: false", ("resume", "enable_checkpointing"),
        "set enable_checkpointing=true or resume=false: a run without checkpoints cannot be resumed",
      )  # fmt: skip
    if self.checkpoint_mirror is not None and not self.enable_checkpointing:
      yield Problem(
        f"checkpoint_mirror = {self.checkpoint_mirror} with enable_checkpointing: false",
        ("checkpoint_mirror", "enable_checkpointing"),
        "set enable_checkpointing=true, or leave checkpoint_mirror out: no checkpoint would be copied",
      )
    if self.checkpoint_mirror == "":
      yield Problem("checkpoint_mirror is empty", ("checkpoint_mirror",), "name a path or a URL, or write null for no mirror")
    if self.init_from == "":
      yield Problem("init_from is empty", ("init_from",), "name a directory, or write null for random weights")


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig(Checked):
  """Section ``watchdog:``: time limits in seconds, after which a run that hangs ends. 0: no limit."""

  watchdog_compile_seconds: float
  watchdog_step_seconds: float
  watchdog_data_seconds: float
  watchdog_save_seconds: float
  watchdog_exit_seconds: float
  watchdog_peers_seconds: float
  watchdog_heartbeat_seconds: float
  max_restarts_without_progress: int

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values."""
    yield from at_least(self, 0, *(f.name for f in fields(self)))
    yield from at_least(self, 1, "watchdog_peers_seconds", "watchdog_heartbeat_seconds")

  def limits(self) -> dict[str, float]:
    """Return the limits by kind for ``Watchdog``. The loop stops waiting for data one minute before the watchdog does."""
    data = self.watchdog_data_seconds
    return {
      "compile": self.watchdog_compile_seconds,
      "step": self.watchdog_step_seconds,
      "data": data and data + 60,
      "save": self.watchdog_save_seconds,
      "exit": self.watchdog_exit_seconds,
    }


def profiled(steps: str) -> tuple[int, int]:
  """Return the first and the last step of a value of ``profile_steps``, such as "10-12" or "10". Raises ValueError."""
  first, _, last = steps.partition("-")
  begin, end = int(first), int(last or first)
  if not 1 <= begin <= end:
    raise ValueError(f"{steps}: not a range of steps")
  return begin, end


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Checked):
  """Section ``logging:``: where a run writes, and what it prints and records."""

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
  eval_tasks: tuple[str, ...]
  eval_tasks_interval: int
  eval_tasks_limit: int | None
  log_interval: int | None
  profile_steps: str | None
  compilation_cache_dir: str | None

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values."""
    yield from at_least(self, 0, "numerics_every", "update_survival_every")
    yield from at_least(self, 1, "log_interval", "sample_tokens", "eval_tasks_limit")
    yield from at_least(self, 0, "sample_every", "sample_temperature", "eval_tasks_interval")
    if self.sample_every > 0 and not self.sample_prompts:
      yield Problem(
        f"sample_every = {self.sample_every}, but sample_prompts is empty", ("sample_every", "sample_prompts"),
        'write prompts, as in sample_prompts=["def main():"], or set sample_every=0',
      )  # fmt: skip
    if bool(self.eval_tasks) != (self.eval_tasks_interval > 0):
      tasks = f"[{', '.join(self.eval_tasks)}]" if self.eval_tasks else "[]"
      yield Problem(
        f"eval_tasks = {tasks} with eval_tasks_interval = {self.eval_tasks_interval}", ("eval_tasks", "eval_tasks_interval"),
        "set both, as in eval_tasks=[arc_easy] eval_tasks_interval=500, or leave both out",
      )  # fmt: skip
    if self.profile_steps is not None:
      try:
        profiled(self.profile_steps)
      except ValueError:
        yield Problem(
          f"profile_steps = {self.profile_steps!r} is not a range of steps",
          ("profile_steps",),
          "write first and last step, such as 10-12",
        )
    if not self.output_dir:
      yield Problem("output_dir is empty", ("output_dir",), "name a directory; '.' is the current one")
    if self.run_name is not None and (self.run_name in ("", ".", "..") or "/" in self.run_name):
      yield Problem(
        f"run_name = {self.run_name!r} is not the name of a directory", ("run_name",),
        "choose a name without '/'; output_dir is the directory that contains it",
      )  # fmt: skip
    if (length := len(os.fsencode(self.run_name or ""))) > LONGEST_NAME:
      yield Problem(
        f"run_name has {length} bytes; a directory name may have at most {LONGEST_NAME}", ("run_name",), "choose a shorter name"
      )
    for name in ("wandb_project", "mlflow_experiment"):
      if getattr(self, name) == "":
        yield Problem(f"{name} is empty", (name,), "write a name, or null to switch it off")
    if self.compilation_cache_dir == "":
      yield Problem(
        "compilation_cache_dir is empty", ("compilation_cache_dir",), "name a directory, or write null for no cache"
      )


@dataclass(frozen=True, kw_only=True)
class Config:
  """The checked configuration of a run. ``dataclasses.replace`` on a section checks that section again."""

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
"""Dataclass of each section, in the order of ``configs/base.yml``. Families extend those of ``model:`` and ``vision:``."""


def section_type(section: str, decoder_block: str) -> type:
  """Return the dataclass of a section for a model family."""
  if section == "model":
    return FAMILIES[decoder_block].config
  return FAMILIES[decoder_block].vision or VisionConfig if section == "vision" else SECTIONS[section]


def _leaves() -> tuple[dict[str, tuple[str, object]], dict[str, tuple[str, ...]]]:
  """Return ``LEAVES`` and ``FAMILIES_OF_KEY``."""
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
  for leaf, kind in choices.TYPES.items():
    leaves[leaf] = (leaves[leaf][0], kind)
  return leaves, {leaf: tuple(names) for leaf, names in owners.items() if len(names) < len(FAMILIES)}


LEAVES, FAMILIES_OF_KEY = _leaves()
"""Section and type of every key of all families; and the families that have a key, if not all do.

The name of a key is unique across sections."""

LARGEST_INT = 2**31 - 1
"""Largest integer of a key: sizes and counts are int32 on the device. Checked before the rules, which loop over layers."""

LARGEST: dict[str, int] = {
  "seed": 2**32 - 1,  # JAX makes its keys from 32 bits
  "data_shuffle_seed": 2**63 - 1,
  "num_decoder_layers": 10_000,
  "num_hidden_layers_for_vit": 10_000,
}
"""Largest integer of keys with another limit."""


def largest_float(leaf: str) -> float:
  """Return the largest value of a float key: programs compute in float32, and system timers are limited."""
  if leaf.endswith("_seconds"):
    return 1e8  # three years
  return LARGEST_INT if leaf == "per_device_batch_size" else 3.4e38
