"""Real models in tiny sizes, for tests that run complete programs. As a script for subprocesses, it prints the losses of one
device and of eight."""

import json
import sys
from typing import Any

import numpy as np

from maxtext_like.config.load import load_config
from maxtext_like.config.schema import Config

STEPS = 3
# SGD, because Adam's first steps follow the signs even of gradients that are only rounding errors.
SMALL = ["max_target_length=16", "per_device_batch_size=8", "vocab_size=300"]
SMALL += ["opt_type=sgd", "learning_rate=0.05", "lr_schedule_type=constant", "warmup_steps_fraction=0"]


def small_config(model: str, *overrides: str) -> Config:
  """Return the configuration of a tiny model with short rows and a constant learning rate."""
  return load_config(model, [*SMALL, *overrides]).config


def batches(rows: int, length: int = 16, count: int = STEPS) -> list[dict[str, np.ndarray]]:
  """Return random batches, the same in every call. Rows have two documents, and padding at the end."""
  rng = np.random.default_rng(0)
  out = []
  for _ in range(count):
    tokens = rng.integers(3, 300, (rows, length + 1)).astype(np.int32)
    segments = np.repeat([[1, 2, 0]], [length // 2, length // 2 - 2, 2], axis=1).repeat(rows, 0).astype(np.int32)
    positions = np.concatenate([np.arange(length // 2), np.arange(length // 2 - 2), [0, 0]])
    targets = np.where(segments > 0, tokens[:, 1:], -100)
    targets[:, length // 2 - 1] = -100
    positions = np.broadcast_to(positions.astype(np.int32), (rows, length))
    out.append({"tokens": tokens[:, :-1], "targets": targets, "positions": positions, "segments": segments})
  return out


def losses(config: Config, devices: int | None = None, rows: int | None = None) -> list[float]:
  """Return the loss and gradient norm of each of a few steps on the first ``devices`` devices (None: all)."""
  return losses_and_state(config, devices, rows)[0]


def losses_and_state(config: Config, devices: int | None = None, rows: int | None = None) -> tuple[list[float], Any]:
  """Return the same, and the initial state as shapes, dtypes and shardings."""
  import jax

  from maxtext_like.sharding.mesh import make_mesh
  from maxtext_like.training.step.program import make_program
  from maxtext_like.training.step.train_step import UNKNOWN

  program = make_program(config, mesh=make_mesh(config.mesh, jax.devices()[:devices]))
  state = program.lower_init().compile()(np.uint32(1))
  begun = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
  step = program.lower_step(checked=True).compile()
  out, known = [], UNKNOWN
  for batch in batches(program.global_batch if rows is None else rows):
    state, metrics = step(state, program.place(batch), known)
    known = metrics["magnitude_bound"]
    out += [float(metrics["loss"]), float(metrics["grad_norm"])]
  return out, begun


def whole_arrays(state: Any) -> list[str]:
  """Return the names of the large arrays of a state that are not sharded."""
  import jax

  leaves = jax.tree_util.tree_leaves_with_path(state)
  whole = lambda x: x.size > 4096 and x.sharding.shard_shape(x.shape) == x.shape
  return [jax.tree_util.keystr(path) for path, x in leaves if whole(x)]


def whole_on_devices(model: str, *words: str) -> list[str]:
  """Return the names of the large arrays of the initial state that are replicated on eight devices. Nothing is compiled."""
  import jax

  from maxtext_like.sharding.mesh import make_mesh
  from maxtext_like.training.step.program import make_program

  config = small_config(model, *words, *ON_EIGHT)
  return whole_arrays(make_program(config, mesh=make_mesh(config.mesh, jax.devices())).abstract_state)


ON_EIGHT = ("per_device_batch_size=1", "ici_data_parallelism=2")

if __name__ == "__main__":
  model, *words = sys.argv[1:]
  if model == "whole":  # each word is MODEL,key=value,...
    print(json.dumps({word.split(",")[0]: whole_on_devices(*word.split(",")) for word in words}))
    sys.exit()
  one = losses(small_config(model, *words), devices=1)
  eight, state = losses_and_state(small_config(model, *words, *ON_EIGHT))
  print(json.dumps({"one": one, "eight": eight, "whole": whole_arrays(state)}))
