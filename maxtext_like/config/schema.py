"""The typed configuration: one frozen dataclass per section of ``configs/base.yml``, which holds defaults and meanings.

``maxtext_like.config.load.load_config`` builds a ``Config``; everything else takes the section it needs. Rules among
the values of one section stand with it, here or in its own file, rules across sections in ``rules.py``.
"""

import os
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from maxtext_like.config.adapter_keys import AdapterConfig
from maxtext_like.config.data_keys import DataConfig
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.parallelism import MeshConfig
from maxtext_like.config.precision_keys import PrecisionConfig
from maxtext_like.config.problems import Checked, Problem, at_least
from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.config.vision import VisionConfig
from maxtext_like.data.registry import DATASETS
from maxtext_like.models.registry import FAMILIES

LONGEST_NAME = 255  # bytes of a file name, on every file system in use


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
  allow_model_change: bool
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
  log_interval: int | None
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
  "seed": 2**32 - 1,  # JAX makes its keys from 32 bits
  "data_shuffle_seed": 2**63 - 1,
  "num_decoder_layers": 10_000,
  "num_hidden_layers_for_vit": 10_000,
}
"""The same for leaves that differ."""


def largest_float(leaf: str) -> float:
  """Return the largest value of a leaf that takes a float: programs compute in float32, the system's clocks have limits."""
  if leaf.endswith("_seconds"):
    return 1e8  # three years
  return LARGEST_INT if leaf == "per_device_batch_size" else 3.4e38
