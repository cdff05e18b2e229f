"""Generates on four CPU devices and on one, and compares the answers: python -m tests.generation.meshes MODEL [key=value ...]

With ``--draft`` the model itself proposes tokens. Keys that begin with ``ici_`` are the mesh of the four devices.
``test_meshes.py`` runs this in a process with four devices.
"""

import sys
import warnings

import jax
import numpy as np

from maxtext_like.config.load import load_config
from maxtext_like.generation.sampling import Sampling
from maxtext_like.generation.scheduler import Request, Scheduler
from maxtext_like.generation.slots import Draft
from maxtext_like.models.model import make_model
from maxtext_like.sharding.mesh import make_mesh

PROMPTS = [[2, 5, 9, 14, 33, 8, 7], [2, 61, 40], [2, 3, 4, 5, 6, 7, 8, 9], [7], [9, 8, 7]]


def answers(name: str, words: list[str], devices: int, *, draft: bool) -> tuple[dict[int, list[int]], str]:
  """Returns the tokens by prompt, and the sharding of the first array of the caches."""
  config = load_config(name, ["dtype=float32", *words]).config
  mesh = make_mesh(config.mesh, jax.devices()[:devices])
  model = make_model(config, mesh=mesh, runs_attention=False)
  leaves, tree = jax.tree.flatten(model.decoder.params())
  drawn = [np.random.default_rng(i).normal(size=leaf.shape).astype(np.float32) for i, leaf in enumerate(leaves)]
  params = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), tree.unflatten(drawn), model.abstract_params)
  # Five prompts share four slots, so a slot is used twice.
  requests = [Request(tokens=tokens, limit=9, seed=1, stream=i) for i, tokens in enumerate(PROMPTS)]
  how = {"draft": Draft(model.decoder, 3), "draft_params": params} if draft else {}
  sampling = Sampling(temperature=2.0)
  scheduler = Scheduler(model.decoder, params, requests, sampling, frozenset(), largest=4, logprobs=True, mesh=mesh, **how)
  found: dict[int, list[int]] = {}
  for pieces in scheduler.run():
    for piece in pieces:
      found.setdefault(piece.request, []).extend(piece.tokens)
  assert not draft or scheduler.made > 3.5 * scheduler.passes
  return found, str(jax.tree.leaves(scheduler.state.cache)[0].sharding.spec)


if __name__ == "__main__":
  warnings.simplefilter("error")
  model, *keys = [word for word in sys.argv[1:] if word != "--draft"]
  draft = "--draft" in sys.argv
  one, _ = answers(model, [key for key in keys if not key.startswith("ici_")], 1, draft=draft)
  several, split = answers(model, keys, 4, draft=draft)
  assert several == one, (several, one)
  assert all(len(tokens) == 9 for tokens in one.values())
  assert len({tuple(tokens) for tokens in one.values()}) == len(PROMPTS)
  print(split)
