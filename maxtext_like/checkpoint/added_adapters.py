"""Adapters added to the weights they are for: of peft, and of runs here; several of them, one after another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.checkpoint import adapter_step, manifest
from maxtext_like.checkpoint.huggingface import peft
from maxtext_like.checkpoint.tree import flatten
from maxtext_like.checkpoint.weight_sources import find_step
from maxtext_like.errors import UserError
from maxtext_like.models.placed import Model


def with_adapters(params: Any, model: Model, directories: Sequence[Path]) -> Any:
  """The weights with adapters added, in their own dtype.

  Args:
    params: of the model; their memory is taken where an adapter is of a run.
    model: whose they are.
    directories: what peft wrote, runs with ``lora_rank``, or steps of them.

  Raises:
    UserError: one is neither, is damaged, or is of another model.
  """
  for directory in directories:
    if peft.is_adapter(directory):
      params = _of_peft(params, model, directory)
    else:
      params = _of_a_run(params, model, directory)
  return params


def _of_a_run(params: Any, model: Model, directory: Path) -> Any:
  step = find_step(directory)
  if step is None:
    raise UserError(
      f"{directory}: no adapter\n  fix: a directory with {peft.CONFIG}, a run that trained with lora_rank, or a step of it"
    )
  try:
    stored = manifest.read(step)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}") from None
  if not adapter_step.holds_adapter_alone(stored):
    raise UserError(f"{step}: holds a whole model and no adapter\n  fix: name it as the checkpoint itself")
  return adapter_step.merged(params, step, stored, model)


def _of_peft(params: Any, model: Model, directory: Path) -> Any:
  adapter = peft.read_adapter(directory, model.decoder, model.config.model.decoder_block)
  leaves = flatten(params)
  sums: dict[str, np.ndarray] = {}
  for piece, addition in adapter.additions():
    name = ".".join(piece.path)
    total = sums.setdefault(name, np.zeros(leaves[name].shape, np.float32))
    total[piece.index] += addition
  add = jax.jit(lambda x, y: (x.astype(jnp.float32) + y).astype(x.dtype))

  def added(path: tuple[str, ...], node: Any) -> Any:
    if isinstance(node, dict):
      return {key: added((*path, key), value) for key, value in node.items()}
    total = sums.get(".".join(path))
    return node if total is None else add(node, jax.device_put(total, node.sharding))

  return added((), params)
