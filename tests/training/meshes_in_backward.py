"""Layers updated in the backward pass on many meshes: ``python -m tests.training.meshes_in_backward MODEL MESH ...``.

Prints {mesh: losses of three steps of AdamW, clipped by the exact norm}; "one" is a single device.
"""

import json
import sys

from maxtext_like.config.load import load_config
from tests.training.meshes import MESHES, ROWS, SMALL, batch_of


def descend(model: str, words: list[str], devices: int) -> list[float]:
  import jax
  import numpy as np

  from maxtext_like.sharding.mesh import make_mesh, use_mesh
  from maxtext_like.training.program import make_program
  from maxtext_like.training.step import UNKNOWN

  small = [word for word in SMALL if not word.startswith(("remat_policy", "opt_type"))]
  keys = [f"per_device_batch_size={ROWS // devices}", "optimizer_in_backward=true", "remat_policy=full"]
  config = load_config(model, [*small, *keys, *words]).config
  program = make_program(config, mesh=make_mesh(config.mesh, jax.devices()[:devices]))
  with use_mesh(program.model.mesh):
    state, batch, losses = program.lower_init().compile()(np.uint32(1)), program.place(batch_of(program)), []
    step = program.lower_step().compile()
    for _ in range(3):
      state, metrics = step(state, batch, UNKNOWN)
      losses.append(float(metrics["loss"]))
  return losses


def main(model: str, *names: str) -> dict[str, list[float]]:
  """Of a model and names of ``MESHES``."""
  found = {"one": descend(model, ["ici_fsdp_parallelism=1"], 1)}
  for name in names:
    found[name] = descend(model, [word.replace("=", "_parallelism=") for word in MESHES[name].split()], 8)
  return found


if __name__ == "__main__":
  print(json.dumps(main(*sys.argv[1:])))
