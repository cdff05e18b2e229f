"""The state from which a run starts, or from which one step is reproduced for analysis."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_like.checkpoint import compatibility
from maxtext_like.checkpoint.adapters import adapter_step
from maxtext_like.checkpoint.adapters.adapted_weights import configured_adapter
from maxtext_like.checkpoint.adapters.init_adapter import read_init_adapter
from maxtext_like.checkpoint.read_weights import read_weights
from maxtext_like.checkpoint.store import manifest, stored_state
from maxtext_like.checkpoint.store.stored_config import section
from maxtext_like.checkpoint.weight_sources import find_step, is_hugging_face, located, no_checkpoint, readable_step
from maxtext_like.errors import UserError
from maxtext_like.models.naming import ADAPTER
from maxtext_like.sharding import processes
from maxtext_like.storage import Place
from maxtext_like.training.step.program import TrainProgram
from maxtext_like.training.step.train_step import State

_log = logging.getLogger(__name__)
_OF_BASE = ("adapter.base_weights", "adapter.base_weights_modules", "precision.weight_dtype")
"""Keys that decide how the weights below an adapter are stored. Their fingerprint depends on these keys."""
_OF_DRAWN_BASE = ("training.seed", "training.init_scheme")
"""Keys that decide the values of random weights below an adapter."""


def read_state(directory: Path | Place, program: TrainProgram) -> State:
  """Read the state of a saved step, possibly saved with another precision. A missing loss scale gets its initial value."""
  stored = manifest.read(directory)
  # A step of a LoRA run holds only the adapter; the weights are read from their source.
  alone = program.adapter is not None and adapter_step.holds_adapter_alone(stored)
  like = program.abstract_checkpoint if alone else program.abstract_state
  found = stored_state.load(directory, like, config=program.config, allow_dtype_change=True)
  return program.completed(found.state, base_weights(program, found)[0] if alone else found.state["params"])


def base_weights(program: TrainProgram, restored: stored_state.Restored) -> tuple[Any, adapter_step.Base]:
  """Read the weights below the adapter of a restored step, and the record that identifies them.

  Raises:
    UserError: the weights are missing or differ from those the adapter was trained on; the adapter has other ranks or scales
      now; or as ``read_weights``.
  """
  # First check what the factors depend on, then read the weights.
  c = program.config
  _require_same_sizes(program, restored.config, restored.directory)
  weights, found = adapter_step.read_base(
    program.model, c.checkpoint.init_from, c.training.seed, c.training.init_scheme, read_weights
  )
  # Compare the fingerprint of the weights, and name the keys that may have changed it.
  base = adapter_step.Base.from_json(restored.extra[adapter_step.EXTRA])
  drawn = base.source is None and found.source is None
  scheme = {"init_scheme": adapter_step.stored_init_scheme(restored.config)}
  saved = restored.config | {"training": restored.config.get("training", {}) | scheme}
  changed = compatibility.changes_of(saved, manifest.record(c), _OF_BASE + _OF_DRAWN_BASE * drawn)
  base.require(found, restored.directory, changed=changed)
  return weights, found


def trained_params(program: TrainProgram, step: Path | Place, stored: manifest.Manifest) -> dict[str, Any]:
  """Return the parameters of a step that holds only an adapter: its factors, and the weights it was trained on, read again.

  The program need not be that of the run; its dtype and storage form are used.

  Raises:
    UserError: the weights are missing or differ; the adapter has other ranks or scales; or as ``read_weights``.
  """
  _require_same_sizes(program, stored.config, step)
  base = adapter_step.Base.from_json(stored.extra[adapter_step.EXTRA])
  scheme = adapter_step.stored_init_scheme(stored.config)
  weights, found = adapter_step.read_base(program.model, base.source, base.seed, scheme, read_weights)
  base.require(found, step, same_form=False)
  return {**weights, ADAPTER: adapter_step.read_adapter(step, stored, program.model)[1]}


def _require_same_sizes(program: TrainProgram, config: dict[str, Any], step: Path | Place) -> None:
  """Raise if ranks or scales differ from those of the stored factors. Shapes can agree, but the model would change abruptly."""
  tower = config.get("training", {}).get("vision_tower")
  stored = section(ADAPTER, config)
  # Shapes alone do not show a changed alpha or a changed pattern, so compare rank and scale of each array.
  then, now = (configured_adapter(program.model, stored, tower), program.adapter)
  assert now is not None
  if any(then.sizes[path] != now.sizes[path] for path in then.sizes.keys() & now.sizes.keys()):
    # Name the keys that differ and their stored values.
    keys = ("lora_rank", "lora_alpha", "lora_rslora", "lora_rank_pattern", "lora_alpha_pattern")
    sizes = [f"{ADAPTER}.{key}" for key in keys]
    differ = compatibility.changes_of(config, manifest.record(program.config), sizes)
    lines = "\n".join(change.line for change in differ)
    raise UserError(
      f"{step}: the adapter has other ranks or scales than this run's\n{lines}\n"
      "  why: the learned factors would be scaled differently\n"
      f"  fix: {' '.join(change.word for change in differ)} (the checkpoint's values)\n"
      "       or run_name=NAME (a new run)"
    )


def whole_state(program: TrainProgram, checkpoint: Path | Place | None) -> State:
  """Return the state from which a run would start its next step.

  Args:
    program: program of the run.
    checkpoint: a run or one of its steps, local or remote: its complete state with the optimizer. A Hugging Face checkpoint:
      its weights. None: the weights of ``init_from``, or randomly initialized ones.

  Raises:
    UserError: as ``read_weights``.
  """
  # A step of one of our runs: restore it completely.
  if checkpoint is not None and not is_hugging_face(place := located(checkpoint)):
    step = find_step(place)
    if step is None:
      raise no_checkpoint(f"checkpoint: {checkpoint}", place)
    return read_state(readable_step(step), program)
  # Otherwise start at step 0, from weights or from the seed.
  seed = np.uint32(program.config.training.seed % 2**32)
  source = checkpoint or program.config.checkpoint.init_from
  # Stored weights are arguments of the program, which creates the other arrays of the state.
  if source is not None:
    weights = (read_weights(located(source), program.model, starts=_log.info),)
    compiled = program.lower_around().compile()
  else:
    weights, compiled = (), program.lower_init().compile()
  processes.await_compiled("the initial state", program.config.watchdog.watchdog_compile_seconds)
  state = compiled(*weights, seed)
  return with_given_adapter(program, state)


def with_given_adapter(program: TrainProgram, state: State) -> State:
  """Replace the adapter of a state at step 0 by the one that ``lora_from`` names, if it is set.

  Raises:
    UserError: as ``init_adapter.read_init_adapter``.
  """
  if program.adapter is None or program.config.adapter.lora_from is None:
    return state
  params = state["params"]
  return {**state, "params": {**params, ADAPTER: read_init_adapter(program.model, program.adapter, params[ADAPTER])}}
