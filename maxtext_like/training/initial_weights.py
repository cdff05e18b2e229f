"""``init_from``: the parameters that a new run starts with, from a checkpoint of ours or of Hugging Face."""

from pathlib import Path
from typing import Any

import jax

from maxtext_like.checkpoint import manifest, restore
from maxtext_like.checkpoint.huggingface.weights import load_hugging_face
from maxtext_like.checkpoint.steps import StepDirectories
from maxtext_like.errors import UserError
from maxtext_like.training.program import Program


def read_weights(directory: Path, program: Program) -> Any:
  """The parameters of ``directory``, each device reading its own part.

  Args:
    directory: a Hugging Face checkpoint (config.json and safetensors), a run, its checkpoints, or one step of them.
    program: of the new run.

  Raises:
    UserError: nothing of the kind is there, or it is of another model.
  """
  directory = directory.expanduser()
  params = program.abstract_state["params"]
  if (directory / "config.json").is_file():
    places = jax.tree.map(lambda x: x.sharding, params)
    return load_hugging_face(directory, program.decoder, model=program.config.model, shardings=places)
  step = find_step(directory)
  if step is None:
    raise UserError(
      f"init_from: {directory} is no checkpoint\n"
      "  fix: name a directory with config.json and safetensors, a run directory, or one of its checkpoints/N"
    )
  allow = program.config.checkpoint.allow_dtype_change
  return restore.load(step, {"params": params}, config=program.config, allow_dtype_change=allow).state["params"]


def find_step(directory: Path) -> Path | None:
  """The directory of the newest complete step in a run, a directory of steps, or a step itself; None: there is none."""
  if (directory / manifest.FILE_NAME).is_file():
    return directory
  for place in (directory / "checkpoints", directory):
    if place.is_dir() and (steps := StepDirectories(place).complete()):
      return place / str(max(steps))
  return None
