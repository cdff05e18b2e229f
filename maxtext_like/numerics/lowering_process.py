"""The process that ``selfcheck_programs.lower_in_process`` starts: lowers one program, and writes it to its standard output."""

import dataclasses
import os
import pickle
import sys

import jax
from jax import export

_MOSAIC = "mosaic_gpu_v2"
"""Name of JAX's call of a Mosaic kernel. JAX does not promise to keep it, but both processes have the same JAX."""


def main() -> None:
  # Anything else that is printed must not mix with the result.
  result = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
  make, argument, key, platform, settings = pickle.load(sys.stdin.buffer)
  for name, value in settings.items():
    jax.config.update(name, value)
  run, shapes = make(argument)[key]
  allowed = [export.DisabledSafetyCheck.custom_call(_MOSAIC)]
  exported = export.export(run, platforms=(platform,), disabled_checks=allowed)(*shapes)
  # A function cannot be pickled, and nothing differentiates the program.
  with result:
    pickle.dump(dataclasses.replace(exported, _get_vjp=None), result)


if __name__ == "__main__":
  main()
