"""Compares one model on many meshes with one device: losses of three SGD steps, and the gradients of the first step.

``python -m tests.training.meshes MODEL [MESH ...]`` is a script, because the number of devices is fixed when a process starts.
All meshes start from the same parameters and read the same rows. Other optimizers than SGD are not used: they update each
number in the same way on every mesh, and their updates would have to be compiled for each mesh.
"""

import gc
import json
import sys
from typing import Any

import numpy as np

from maxtext_like.config.load import load_config

gc.set_threshold(50_000, 20, 100)  # as in the CLI commands and tests/conftest.py; saves an eighth of the time of these scripts

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
"""One mesh per axis. Devices that the axis does not use go to the axis data."""

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
"""The same rows in two microbatches; the single device processes them as one batch. In the first mesh gradients are summed over
devices once a step, in the second in every microbatch."""
ONE = "ici_fsdp_parallelism=1"

MESHES = ALONE | MIXED | ACCUMULATED


def words_of(mesh: str) -> list[str]:
  """Return the mesh's settings as words of the command line."""
  parts = [f"per_device_batch_size={ROWS / 8 / 2}", "gradient_accumulation_steps=2"] if mesh in ACCUMULATED else []
  return [*parts, *(word.replace("=", "_parallelism=") for word in MESHES[mesh].split())]


def batch_of(program: Any) -> dict[str, np.ndarray]:
  """Return a batch whose rows have two documents; every third row ends with padding. A model with vision gets one image per
  row."""
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
  """Return the losses of three steps, the gradients of the first step, and the initial parameters (``start`` if it is
  passed)."""
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
    if ADAPTER in start:  # while B is zero, the gradient of A is zero
      noise = np.random.default_rng(1).standard_normal
      start[ADAPTER] = jax.tree.map(lambda x: x + 0.01 * noise(x.shape).astype(x.dtype), start[ADAPTER])
    # Gemma 4 does not divide the attention scores of its normalized queries. Large scores amplify rounding errors of sums, so
    # the queries are made smaller.
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
  """Return the largest difference between this process's shards of the gradients and the gradients of one device, divided by
  the largest gradient of the one device."""
  import jax

  pairs = list(zip(*map(jax.tree.leaves, (gradients, wanted)), strict=True))
  # In NumPy: JAX would compile a subtraction for each shape on each device.
  parts = ((np.asarray(part.data), one[part.index]) for x, one in pairs for part in x.addressable_shards)
  difference = max(float(np.abs(part - of_one).max()) for part, of_one in parts)
  return difference / max(float(np.abs(one).max()) for _, one in pairs)


def main(model: str, *words: str) -> dict[str, dict[str, Any]]:
  """Return {mesh: {"losses", "one": losses of one device, "gradients": see ``apart``}}.

  Args:
    model: name of the model.
    words: names in ``MESHES`` (default: all of them), and key=value settings for all meshes.
  """
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
