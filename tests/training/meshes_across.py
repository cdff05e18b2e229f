"""``meshes`` for two processes with four CPU devices each. Each mesh axis in turn has devices in both processes.

Both processes run this script with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID:
``python -m tests.training.meshes_across MODEL[,key=value...][,AXIS...] ...``.
"""

import json
import os
import sys
from typing import Any, NoReturn

from tests.training.meshes import ONE, apart, descend, words_of

OUTERMOST = {"data": "data-fsdp-tensor", "fsdp": "fsdp-context-tensor", "expert": "expert-context-tensor"}
"""Meshes by the axis that crosses the processes. The devices are ordered by process."""
INNERMOST = {"context": "fsdp-expert-context", "tensor": "fsdp-tensor"}
"""The same, with devices of the two processes in alternation. The devices of two hosts may be ordered like this on a torus."""
ACROSS = OUTERMOST | INNERMOST


def ended(what: str, code: int) -> NoReturn:
  """End this process. The Heartbeat calls it when the other process is lost."""
  print(what, file=sys.stderr, flush=True)
  os._exit(code or 1)


def main(*models: str) -> dict[str, dict[str, Any]]:
  """Return {model: {axis: the result of ``meshes.main`` for its mesh}}."""
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
