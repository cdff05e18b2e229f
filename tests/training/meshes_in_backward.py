"""Trains with layers updated in the backward pass on meshes:
``python -m tests.training.meshes_in_backward MODEL [KEY=VALUE ...] MESH ...``.

Prints {mesh: losses of three AdamW steps}; "one" is a single device.
"""

import json
import sys

from maxtext_like.config.load import load_config
from tests.training.meshes import ONE, ROWS, SMALL, batch_of, words_of


def descend(model: str, words: list[str], devices: int) -> list[float]:
  import jax
  import numpy as np

  from maxtext_like.sharding.mesh import make_mesh, use_mesh
  from maxtext_like.training.step.program import make_program

  small = [word for word in SMALL if not word.startswith(("remat_policy", "opt_type"))]
  keys = [f"per_device_batch_size={ROWS // devices}", "optimizer_in_backward=true", "remat_policy=full"]
  config = load_config(model, [*small, *keys, *words]).config
  program = make_program(config, mesh=make_mesh(config.mesh, jax.devices()[:devices]))
  with use_mesh(program.model.mesh):
    state, batch, losses = program.lower_init().compile()(np.uint32(1)), program.place(batch_of(program)), []
    step, look = program.lower_step().compile(), program.lower_check().compile()
    known = look(state["params"], state["opt_state"])["magnitude_bound"]
    for _ in range(3):
      state, metrics = step(state, batch, known)
      known = metrics["magnitude_bound"]
      assert metrics["decided"], "not a step, but one that has to be taken again"
      losses.append(float(metrics["loss"]))
  return losses


def main(model: str, *words: str) -> dict[str, list[float]]:
  """Return the losses of a model by mesh. Words are names in ``MESHES``, and key=value settings for all meshes."""
  names, keys = [w for w in words if "=" not in w], [w for w in words if "=" in w]
  found = {"one": descend(model, [*keys, ONE], 1)}
  for name in names:
    found[name] = descend(model, [*keys, *words_of(name)], 8)
  return found


if __name__ == "__main__":
  print(json.dumps(main(*sys.argv[1:])))
