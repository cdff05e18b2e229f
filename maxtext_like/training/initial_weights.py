"""``init_from``: the parameters that a new run starts with, from a checkpoint of ours or of Hugging Face."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_like.checkpoint import manifest, restore
from maxtext_like.checkpoint.huggingface.weights import load_hugging_face
from maxtext_like.checkpoint.sources import find_step, no_checkpoint
from maxtext_like.errors import NonFiniteError
from maxtext_like.training import loss_scale
from maxtext_like.training.program import Program
from maxtext_like.training.row_norms import row_labels, row_squares
from maxtext_like.training.step import State


def read_weights(directory: Path, program: Program) -> Any:
  """The parameters of ``directory``, each device reading its own part.

  Args:
    directory: a Hugging Face checkpoint (config.json and safetensors), a run, its checkpoints, or one step of them.
    program: of the new run.

  Raises:
    UserError: nothing of the kind is there, or it is of another model.
    NonFiniteError: a weight is not finite.
  """
  directory = directory.expanduser()
  params = program.abstract_state["params"]
  if (directory / "config.json").is_file():
    places = jax.tree.map(lambda x: x.sharding, params)
    config = program.config
    return load_hugging_face(
      directory, program.decoder, model=config.model, vision=config.vision, shardings=places, finite=True
    )
  step = find_step(directory)
  if step is None:
    raise no_checkpoint(f"init_from: {directory}", directory)
  allow = program.config.checkpoint.allow_dtype_change
  found = restore.load(step, {"params": params}, config=program.config, allow_dtype_change=allow).state["params"]
  finite = jax.device_get(jax.jit(lambda tree: row_squares(tree).finite)(found))
  if bad := [name for name, good in zip(row_labels(program.decoder, program.spec), finite, strict=True) if not good]:
    raise NonFiniteError(
      f"init_from: {step}: {len(bad)} arrays hold numbers that are not finite, first {bad[0]}\n"
      "  why: whatever is computed with them is not finite either\n"
      "  fix: begin with another step of that run"
    )
  return found


def read_state(directory: Path, program: Program) -> State:
  """The state of a step, of this or another precision: a loss scale that was not stored is the configured first one."""
  like = dict(program.abstract_state)
  fresh = like.pop("loss_scale", None)
  stored = manifest.read(directory).leaves
  if fresh is not None and any(name.startswith("loss_scale.") for name in stored):
    like["loss_scale"] = fresh
  state = restore.load(directory, like, config=program.config, allow_dtype_change=True).state
  if fresh is not None and "loss_scale" not in state:
    start = loss_scale.initial(program.config.training.loss_scale_init)
    state["loss_scale"] = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), start, fresh)
  return state


def whole_state(program: Program, checkpoint: Path | None) -> State:
  """The state that a run would start its next step from.

  Args:
    program: of the run.
    checkpoint: a run or a step of it: its whole state, optimizer and all; a Hugging Face checkpoint: its weights; None: the
      weights of ``init_from``, or fresh ones.

  Raises:
    UserError: as ``read_weights``.
  """
  if checkpoint is not None and not (checkpoint.expanduser() / "config.json").is_file():
    step = find_step(checkpoint.expanduser())
    if step is None:
      raise no_checkpoint(f"--checkpoint {checkpoint}", checkpoint.expanduser())
    return read_state(step, program)
  source = checkpoint or program.config.checkpoint.init_from
  if source is not None:
    return program.lower_around().compile()(read_weights(Path(source), program))
  return program.lower_init().compile()(np.uint32(program.config.training.seed % 2**32))
