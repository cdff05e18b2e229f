"""``meshes`` for one of two processes with four CPU devices each: every axis in turn has its devices in both of them.

A script that both run, with JAX_COORDINATOR_ADDRESS and the rest:
``python -m tests.training.meshes_across MODEL[,key=value...][,AXIS...] ...``.
"""

import json
import os
import sys
from typing import Any, NoReturn

from tests.training.meshes import ONE, apart, descend, words_of

OUTERMOST = {"data": "data-fsdp-tensor", "fsdp": "fsdp-context-tensor", "expert": "expert-context-tensor"}
"""Meshes by the axis that crosses, where the devices of a process follow each other."""
INNERMOST = {"context": "fsdp-expert-context", "tensor": "fsdp-tensor"}
"""The same, where they take turns, as on a torus those of two hosts may."""
ACROSS = OUTERMOST | INNERMOST


def ended(what: str, code: int) -> NoReturn:
  """What a Heartbeat calls when the other process is lost."""
  print(what, file=sys.stderr, flush=True)
  os._exit(code or 1)


def main(*models: str) -> dict[str, dict[str, Any]]:
  """{model: {axis: what ``meshes.main`` has of a mesh}}."""
  import jax

  from maxtext_like.sharding import processes

  processes.join({}, 120)
  found: dict[str, dict[str, Any]] = {}
  with processes.Heartbeat(120, ended):
    here, there = (jax.local_devices(process_index=number) for number in range(2))
    for name in models:
      model, *words = name.split(",")
      axes, keys = [w for w in words if "=" not in w] or [*ACROSS], [w for w in words if "=" in w]
      wanted, gradients, start = descend(model, [*keys, ONE], jax.local_devices()[:1])
      gradients = jax.device_get(gradients)
      found[model] = {}
      for axis in axes:
        devices = [*here, *there] if axis in OUTERMOST else [d for pair in zip(here, there, strict=True) for d in pair]
        losses, grads, _ = descend(model, [*keys, *words_of(ACROSS[axis])], devices, start)
        found[model][axis] = {"losses": losses, "one": wanted, "gradients": apart(grads, gradients)}
        print(model, axis, losses, f"{found[model][axis]['gradients']:.1e}", file=sys.stderr, flush=True)
  return found


if __name__ == "__main__":
  print(json.dumps(main(*sys.argv[1:])))
