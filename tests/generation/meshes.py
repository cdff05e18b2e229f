"""Generates on four CPU devices and on one, and compares the answers: python -m tests.generation.meshes MODEL [key=value ...]

Keys that begin with ``ici_`` are the mesh of the four devices. ``test_meshes.py`` runs this in a process with four devices.
"""

import sys
import warnings

import jax
import numpy as np

from maxtext_like.config.load import load_config
from maxtext_like.generation.sampling import Sampling
from maxtext_like.generation.schedule import Request, Schedule
from maxtext_like.models.model import make_model
from maxtext_like.sharding.mesh import make_mesh

PROMPTS = [[2, 5, 9, 14, 33, 8, 7], [2, 61, 40], [2, 3, 4, 5, 6, 7, 8, 9], [7], [9, 8, 7]]


def answers(name: str, words: list[str], devices: int) -> tuple[dict[int, list[int]], str]:
  """Returns the tokens by prompt, and the sharding of the first array of the caches."""
  config = load_config(name, ["dtype=float32", *words]).config
  mesh = make_mesh(config.mesh, jax.devices()[:devices])
  model = make_model(config, mesh=mesh, runs_attention=False)
  leaves, tree = jax.tree.flatten(model.decoder.params())
  drawn = [np.random.default_rng(i).normal(size=leaf.shape).astype(np.float32) for i, leaf in enumerate(leaves)]
  params = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), tree.unflatten(drawn), model.abstract_params)
  # Five prompts share four slots, so a slot is used twice.
  requests = [Request(tokens=tokens, limit=9, seed=1, stream=i) for i, tokens in enumerate(PROMPTS)]
  schedule = Schedule(
    model.decoder, params, requests, Sampling(temperature=2.0), frozenset(), largest=4, logprobs=True, mesh=mesh
  )
  found: dict[int, list[int]] = {}
  for pieces in schedule.run():
    for piece in pieces:
      found.setdefault(piece.request, []).extend(piece.tokens)
  return found, str(jax.tree.leaves(schedule.state.cache)[0].sharding.spec)


if __name__ == "__main__":
  warnings.simplefilter("error")
  model, *keys = sys.argv[1:]
  one, _ = answers(model, [key for key in keys if not key.startswith("ici_")], 1)
  several, split = answers(model, keys, 4)
  assert several == one, (several, one)
  assert all(len(tokens) == 9 for tokens in one.values())
  assert len({tuple(tokens) for tokens in one.values()}) == len(PROMPTS)
  print(split)
