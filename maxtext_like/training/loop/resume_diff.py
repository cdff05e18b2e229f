"""Lists what changed between the run that saved a checkpoint and the run that resumes from it: one line per change."""

from collections.abc import Iterator
from typing import Any

from maxtext_like.checkpoint import compatibility
from maxtext_like.checkpoint.model_changes import compared
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.stored_config import section
from maxtext_like.checkpoint.store.stored_state import Restored
from maxtext_like.config.load import base_values
from maxtext_like.config.problems import InvalidSectionError
from maxtext_like.config.schema import LEAVES, Config
from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.config.yaml_file import to_text
from maxtext_like.training.optimizers.schedule import make_schedule
from maxtext_like.training.step import kept_moments
from maxtext_like.training.step.program import TrainProgram

# Keys that do not influence the results: locations, how the run was started, and what it shows.
_UNTOLD = frozenset({
  "checkpoint.resume", "checkpoint.init_from", "logging.output_dir", "logging.run_name", "logging.log_interval",
  "logging.compilation_cache_dir",
})  # fmt: skip


def batch_of(program: TrainProgram) -> dict[str, Any]:
  """Return properties of a program for the checkpoint that no single key determines: rows per update, and the devices."""
  return {"rows": program.global_batch, "devices": f"{program.model.mesh.size} x {program.model.devices[0].device_kind}"}


def changes(restored: Restored, program: TrainProgram) -> Iterator[str]:
  """Yield a line for each changed value, batch size, device, version, and for a changed learning rate.

  Args:
    restored: the checkpoint. Keys that did not exist when it was saved count as having their default.
    program: program of the resumed run.
  """
  # Changed keys.
  config: Config = program.config
  model = {c.key: c.note for c in compared(restored.config, manifest.record(config)).changes if c.note}
  for name, was, now in compatibility.differences(_complete(restored.config), manifest.record(config)):
    if name not in _UNTOLD:
      key = name.partition(".")[2]
      note = f" ({model[key]})" if key in model else ""
      yield f"changed {key}: was {to_text(was)}, is {to_text(now)}{note}"
  # Optimizer state of parameters that are newly trained or no longer trained.
  saved = manifest.read(restored.directory)
  if line := kept_moments.summary(saved.leaves, restored.state, program.step.optimizer):
    yield line
  # Changed batch, devices and versions.
  batch = batch_of(program)
  stored = restored.extra.get("batch", batch)
  # Other changes are allowed, but the numbers of the run then differ.
  for key, name, unit in (("rows", "global batch size", " rows"), ("devices", "devices", "")):
    if stored[key] != batch[key]:
      yield f"changed {name}: was {stored[key]}{unit}, is {batch[key]}{unit}"
  versions = manifest.versions()
  for name, was in saved.versions.items():
    if versions.get(name, was) != was:
      yield f"changed version of {name}: was {was}, is {versions[name]}"
  yield from _of_the_schedule(restored, config.training)
  # With an adapter, init_from names the weights below it and is still used.
  if (source := config.checkpoint.init_from) is not None and not config.adapter.lora_rank:
    yield f"note    init_from={source} is ignored: the run resumes from its own step {restored.step}"


def _complete(stored: dict[str, Any]) -> dict[str, Any]:
  defaults = manifest.record(dict(base_values()))
  sections: dict[str, dict[str, Any]] = {}
  for leaf, (name, _) in LEAVES.items():
    # A model file sets only the keys of its family. Changes of the model were reported above.
    default = stored.get(name, {}).get(leaf, defaults[leaf])
    sections.setdefault(name, {})[leaf] = default
  return sections


def _of_the_schedule(restored: Restored, now: TrainingConfig) -> Iterator[str]:
  """Compare the learning rate of the next step with that of the checkpoint's configuration."""
  try:
    then: TrainingConfig = section("training", restored.config)
  except InvalidSectionError as error:
    yield f"note    the checkpoint's schedule cannot be compared, because this version rejects its values: {error}"
    return
  # Only a rate that differs now is worth a line.
  was, rate = (float(make_schedule(training)(restored.step)) for training in (then, now))
  if was == rate:
    return
  # Suggest a key if only the length of the schedule changed.
  lengths = [training.lr_schedule_steps or training.last_step for training in (then, now)]
  keep = f"; lr_schedule_steps={lengths[0]} keeps the schedule's length" if lengths[0] != lengths[1] else ""
  yield (
    f"note    the learning rate of step {restored.step + 1} is {rate:.3g}; with the checkpoint's configuration it would be "
    f"{was:.3g}{keep}"
  )
