"""One model on many meshes: losses of three steps of plain descent and the first gradients, against those of one device.

A script, since a process has the devices that it started with: ``python -m tests.training.meshes MODEL [MESH ...]``. Whatever
the mesh, it starts from the same numbers and reads the same rows. What an optimizer does to each number is left out: it
is the same on every mesh, and would have to be compiled for each.
"""

import gc
import json
import sys
from typing import Any

import numpy as np

from maxtext_like.config.load import load_config

gc.set_threshold(50_000, 20, 100)  # as a verb and tests/conftest.py have it: an eighth of these scripts' time

ROWS, LENGTH = 8, 16
SMALL = [
  "dtype=float32", "weight_dtype=float32", "matmul_precision=highest", f"max_target_length={LENGTH}", "vocab_size=304",
  "remat_policy=none", "opt_type=sgd",
]  # fmt: skip

ALONE = {
  "data": "ici_data=8 ici_fsdp=1",
  "fsdp": "ici_fsdp=8",
  "expert": "ici_data=2 ici_fsdp=1 ici_expert=4",
  "context": "ici_data=4 ici_fsdp=1 ici_context=2",
  "tensor": "ici_data=4 ici_fsdp=1 ici_tensor=2",
}
"""Each axis; rows are eight, so what is left is data."""

MIXED = {
  "data-fsdp-tensor": "ici_data=2 ici_fsdp=2 ici_tensor=2",
  "fsdp-tensor": "ici_fsdp=2 ici_tensor=4",
  "fsdp-context-tensor": "ici_fsdp=2 ici_context=2 ici_tensor=2",
  "expert-context-tensor": "ici_fsdp=1 ici_expert=2 ici_context=2 ici_tensor=2",
  "fsdp-expert-context": "ici_fsdp=2 ici_expert=2 ici_context=2",
  "sharded-slices": "dcn_data=1 dcn_fsdp=2 ici_fsdp=2 ici_expert=2",
}
ACCUMULATED = {
  "two-parts-data": "ici_data=4 ici_fsdp=1 ici_tensor=2",
  "two-parts-slices": "dcn_data=2 ici_fsdp=2 ici_tensor=2",
}
"""The same rows in two microbatches, which one device takes as one batch. The gradients of the first are added up over devices
once a step, those of the second in each microbatch."""
ONE = "ici_fsdp_parallelism=1"

MESHES = ALONE | MIXED | ACCUMULATED


def words_of(mesh: str) -> list[str]:
  """As the command line has it."""
  parts = [f"per_device_batch_size={ROWS / 8 / 2}", "gradient_accumulation_steps=2"] if mesh in ACCUMULATED else []
  return [*parts, *(word.replace("=", "_parallelism=") for word in MESHES[mesh].split())]


def batch_of(program: Any) -> dict[str, np.ndarray]:
  """Rows of two documents with padding behind some; where there are pictures, one in each row."""
  rng = np.random.default_rng(0)
  arrays: dict[str, Any] = {name: np.zeros(x.shape, x.dtype) for name, x in program.abstract_batch.items()}
  tokens = rng.integers(3, 300, (ROWS, LENGTH + 1)).astype(np.int32)
  segments = np.where(np.arange(LENGTH) < 9, 1, 2).astype(np.int32) * np.ones((ROWS, 1), np.int32)
  segments[::3, 13:] = 0
  arrays["tokens"], arrays["segments"] = tokens[:, :-1].copy(), segments
  arrays["positions"] = np.broadcast_to(np.r_[:9, : LENGTH - 9], (ROWS, LENGTH)).astype(np.int32)
  arrays["targets"] = np.where(segments > 0, tokens[:, 1:], -100)
  if "pixel_values" in arrays:
    pixels = arrays["pixel_values"]
    pixels[:] = rng.uniform(0, 1, pixels.shape)
    if (places := arrays.get("image_position_ids")) is not None:
      side = int(places.shape[2] ** 0.5)
      places[:] = -1
      places[:, :, : side * side] = np.stack(np.divmod(np.arange(side * side), side)[::-1], axis=-1)
    arrays["tokens"][:, 2:6] = program.model.decoder.cfg.image_token_id
    arrays["token_types"][:, 2:6] = 1
  return arrays


def descend(model: str, words: list[str], devices: list[Any], start: Any = None) -> tuple[list[float], Any, Any]:
  """Losses of three steps, the first gradients, and the numbers that it started from (``start``, where they are given)."""
  import jax
  import jax.numpy as jnp

  from maxtext_like.models.naming import ADAPTER
  from maxtext_like.sharding.mesh import make_mesh, use_mesh
  from maxtext_like.training.step.program import make_program
  from maxtext_like.training.step.trainable import merge

  config = load_config(model, [*SMALL, f"per_device_batch_size={ROWS // len(devices)}", *words]).config
  program = make_program(config, mesh=make_mesh(config.mesh, devices))
  if start is None:
    start = jax.device_get(jax.jit(lambda: program.initial_state(jnp.uint32(1))["params"])())
    if ADAPTER in start:  # where B is zero A has no gradient
      noise = np.random.default_rng(1).standard_normal
      start[ADAPTER] = jax.tree.map(lambda x: x + 0.01 * noise(x.shape).astype(x.dtype), start[ADAPTER])
    # Scores of normed queries that nothing divides (Gemma 4) magnify the rounding of a sum as many times as they are large.
    smaller = lambda path, x: x * 0.1 if "'q_norm'" in jax.tree_util.keystr(path) else x
    start = jax.tree_util.tree_map_with_path(smaller, start)
  places = jax.tree.map(lambda x: x.sharding, program.abstract_state["params"])

  def step(params, batch):
    trained, frozen = program.selection.split(params)
    grads, out = program.step.gradients(trained, frozen, program.step.keyed(batch, jnp.int32(5)), None)
    return merge(jax.tree.map(lambda p, g: p - 0.05 * g, trained, grads), frozen), grads, sum(out["loss"].values())

  losses, first = [], None
  with use_mesh(program.model.mesh):
    params = jax.tree.map(lambda x, s: jax.make_array_from_callback(x.shape, s, x.__getitem__), start, places)
    batch = program.place(batch_of(program))
    run = jax.jit(step, out_shardings=(places, program.selection.split(places)[0], None)).lower(params, batch).compile()
    for _ in range(3):
      params, grads, loss = run(params, batch)
      losses.append(float(loss))
      first = first or grads
  return losses, first, start


def apart(gradients: Any, wanted: Any) -> float:
  """Largest difference of this process's parts of the gradients from one device's, as a share of the largest of these."""
  import jax

  pairs = list(zip(*map(jax.tree.leaves, (gradients, wanted)), strict=True))
  # In NumPy: JAX would compile a subtraction for each shape on each device.
  parts = ((np.asarray(part.data), one[part.index]) for x, one in pairs for part in x.addressable_shards)
  difference = max(float(np.abs(part - of_one).max()) for part, of_one in parts)
  return difference / max(float(np.abs(one).max()) for _, one in pairs)


def main(model: str, *words: str) -> dict[str, dict[str, Any]]:
  """{mesh: {"losses", "one": those of one device, "gradients": largest difference from its as a share of the largest}}; words:
  names of ``MESHES``, and key=value for all of them."""
  import jax

  names, keys = [w for w in words if "=" not in w] or [*MESHES], [w for w in words if "=" in w]
  found = {}
  one, gradients, start = descend(model, [*keys, ONE], jax.devices()[:1])
  wanted = jax.device_get(gradients)
  for name in names:
    losses, gradients, _ = descend(model, [*keys, *words_of(name)], jax.devices(), start)
    found[name] = {"losses": losses, "one": one, "gradients": apart(gradients, wanted)}
    print(name, losses, f"{found[name]['gradients']:.1e}", file=sys.stderr, flush=True)
  return found


if __name__ == "__main__":
  print(json.dumps(main(*sys.argv[1:])))
