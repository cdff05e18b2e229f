"""Trains with stored moments on many meshes: ``python -m tests.training.moments_on_meshes DIRECTORY KIND MESH ...``.

KIND is eight-bits or low-rank. Prints {mesh: {"losses": of three steps; "alike": True if codes or factors are sharded like
their parameters; "kept": True if the checkpoint of the previous mesh is restored bit for bit}}; "one" is a single device.
"""

import json
import sys
from typing import Any

from maxtext_like.config.load import load_config
from tests.training.meshes import MESHES, ROWS, SMALL, batch_of

KINDS = {
  "eight-bits": ["mu_dtype=dynamic8", "nu_dtype=dynamic8"],
  "low-rank": ["opt_type=adafactor", "adafactor_momentum_rank=4", "optimizer_in_backward=true", "clip=running"],
}


def descend(kind: str, words: list[str], devices: int, folder: str, name: str, before: str | None) -> dict[str, Any]:
  import jax
  import numpy as np

  from maxtext_like.checkpoint.store.manager import CheckpointManager
  from maxtext_like.sharding.mesh import make_mesh, use_mesh
  from maxtext_like.training.step.program import make_program
  from maxtext_like.training.step.train_step import UNKNOWN

  small = [word for word in SMALL if not word.startswith("opt_type")]
  keys = [f"per_device_batch_size={ROWS // devices}", "num_decoder_layers=3", *KINDS[kind]]
  config = load_config("qwen3-tiny", [*small, *keys, *words]).config
  program = make_program(config, mesh=make_mesh(config.mesh, jax.devices()[:devices]))
  found: dict[str, Any] = {"losses": []}
  with use_mesh(program.model.mesh):
    state, batch = program.lower_init().compile()(np.uint32(1)), program.place(batch_of(program))
    step = program.lower_step(checked=True).compile()
    if before is not None:
      with CheckpointManager(f"{folder}/{before}") as manager:
        restored = manager.restore(program.abstract_state)
        assert restored is not None
      with np.load(f"{folder}/{before}.npz") as arrays:
        same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(restored.state), arrays.values(), strict=True)]
      found["kept"] = all(same)
    for _ in range(3):
      state, metrics = step(state, batch, UNKNOWN)
      found["losses"].append(float(metrics["loss"]))
    rule, down = state["opt_state"][0], lambda tree: tree["stack_0"]["layer_0"]["mlp"]["down"]
    place = down(state["params"]).sharding
    if kind == "eight-bits":
      found["alike"] = all(down(tree).codes.sharding.is_equivalent_to(place, 3) for tree in (rule.mu, rule.nu))
    else:
      own = [place.shard_shape(down(state["params"]).shape)[i] for i in (1, 2)]
      factors = down(rule[2].moment)
      found["alike"] = own == [x.sharding.shard_shape(x.shape)[1] for x in (factors.rows, factors.columns)]
    with CheckpointManager(f"{folder}/{name}", asynchronous=False) as manager:
      assert manager.save_and_wait(3, state)
    np.savez(f"{folder}/{name}.npz", *map(np.asarray, jax.tree.leaves(state)))
  return found


def main(folder: str, kind: str, *names: str) -> dict[str, Any]:
  """Return the results by mesh, first those of one device. ``names`` are keys of ``MESHES``."""
  found = {"one": descend(kind, ["ici_fsdp_parallelism=1"], 1, folder, "one", None)}
  for before, name in zip(["one", *names], names, strict=False):
    words = [word.replace("=", "_parallelism=") for word in MESHES[name].split()]
    found[name] = descend(kind, words, 8, folder, name, before)
  return found


if __name__ == "__main__":
  print(json.dumps(main(*sys.argv[1:])))
