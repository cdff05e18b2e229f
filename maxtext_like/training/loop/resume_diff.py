"""What a run that goes on does otherwise than the one that saved its checkpoint: a line for each change."""

from collections.abc import Iterator
from typing import Any

from maxtext_like.checkpoint import compatibility
from maxtext_like.checkpoint.model_changes import compared
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.restore import Restored
from maxtext_like.checkpoint.store.stored_config import section
from maxtext_like.config.load import base_values
from maxtext_like.config.problems import InvalidSectionError
from maxtext_like.config.schema import LEAVES, Config
from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.config.yaml_file import to_text
from maxtext_like.training.step import kept_moments
from maxtext_like.training.step.program import TrainProgram
from maxtext_like.training.step.schedule import make_schedule

# Where a run lies, how it was started and what it shows: none of it is part of what is computed or kept.
_UNTOLD = frozenset({
  "checkpoint.resume", "checkpoint.init_from", "logging.output_dir", "logging.run_name", "logging.log_interval",
  "logging.compilation_cache_dir",
})  # fmt: skip


def batch_of(program: TrainProgram) -> dict[str, Any]:
  """What a checkpoint keeps of a program that no key says alone: the rows of an update, and the devices."""
  return {"rows": program.global_batch, "devices": f"{program.model.mesh.size} x {program.model.devices[0].device_kind}"}


def changes(restored: Restored, program: TrainProgram) -> Iterator[str]:
  """Lines for whoever resumes: values, batch, devices, versions; and the learning rate, where the schedule is another.

  Args:
    restored: the checkpoint. A key that is newer than it had its default.
    program: of the run that goes on.
  """
  config: Config = program.config
  model = {c.key: c.note for c in compared(restored.config, compatibility.record(config)).changes if c.note}
  for name, was, now in compatibility.differences(_complete(restored.config), compatibility.record(config)):
    if name not in _UNTOLD:
      key = name.partition(".")[2]
      note = f" ({model[key]})" if key in model else ""
      yield f"changed {key}: was {to_text(was)}, is {to_text(now)}{note}"
  saved = manifest.read(restored.directory)
  if line := kept_moments.summary(saved.leaves, restored.state, program.step.optimizer):
    yield line
  batch = batch_of(program)
  stored = restored.extra.get("batch", batch)
  for key, name in (("rows", "rows of an update"), ("devices", "devices")):
    if stored[key] != batch[key]:
      yield f"changed {name}: was {stored[key]}, is {batch[key]}"
  versions = manifest.versions()
  for name, was in saved.versions.items():
    if versions.get(name, was) != was:
      yield f"changed version of {name}: was {was}, is {versions[name]}"
  yield from _of_the_schedule(restored, config.training)
  if (source := config.checkpoint.init_from) is not None and not config.adapter.lora_rank:  # else it names what lies below
    yield f"note    init_from={source} is not used: the run goes on from its own step {restored.step}"


def _complete(stored: dict[str, Any]) -> dict[str, Any]:
  defaults = compatibility.record(dict(base_values()))
  sections: dict[str, dict[str, Any]] = {}
  for leaf, (name, _) in LEAVES.items():
    # A model file sets the keys of its family alone, and the model is compared before.
    default = stored.get(name, {}).get(leaf, defaults[leaf])
    sections.setdefault(name, {})[leaf] = default
  return sections


def _of_the_schedule(restored: Restored, now: TrainingConfig) -> Iterator[str]:
  """The learning rate of the next step beside what the checkpoint's configuration would give."""
  try:
    then: TrainingConfig = section("training", restored.config)
  except InvalidSectionError as error:
    yield f"note    the checkpoint's schedule cannot be compared, this version refuses its values: {error}"
    return
  was, rate = (float(make_schedule(training)(restored.step)) for training in (then, now))
  if was == rate:
    return
  lengths = [training.lr_schedule_steps or training.last_step for training in (then, now)]
  keep = f"; lr_schedule_steps={lengths[0]} keeps the schedule's length" if lengths[0] != lengths[1] else ""
  yield (
    f"note    the learning rate of step {restored.step + 1} is {rate:.3g}, by the checkpoint's configuration it would be "
    f"{was:.3g}{keep}"
  )
