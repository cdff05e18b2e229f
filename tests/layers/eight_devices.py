"""Runs a function of a test module in a Python process with eight CPU devices, to compare a mesh with one device."""

import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from maxtext_like.layers.param import shardings
from maxtext_like.layers.sharding_rules import MESH_AXES
from tests.processes import ROOT, environment


def run(module: str, function: str, *words: str, timeout: int = 1800) -> str:
  """Return what ``function(*words)`` of a test module prints. Fail if the function fails or warns."""
  own = environment(8) | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "layers")])}
  program = f"import sys, tests.layers.{module} as module; module.{function}(*sys.argv[1:])"
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", program, *words],
    cwd=ROOT, env=own, capture_output=True, text=True, timeout=timeout,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr[-5000:]
  return done.stdout


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
  """Return a mesh with these sizes. An axis without a size has one device."""
  shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
  devices = np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape)
  return jax.sharding.Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def placed(spec: Any, p: Any, mesh, rules) -> Any:
  """Place parameters on a mesh as a run does."""
  return jax.device_put(p, shardings(spec, mesh, rules))


def spread(batch: Any, mesh, rules, *axes: str | None) -> Any:
  """Place arrays on a mesh. The rules split their leading dimensions; ``axes`` are the logical names of these dimensions."""
  place = lambda x: NamedSharding(mesh, rules.spec(x.shape[: len(axes)], axes, mesh))
  return jax.tree.map(lambda x: jax.device_put(x, place(x)), batch)


def worst(got: Any, expected: Any) -> float:
  """Return the largest relative difference of any array.

  A difference is divided by the largest magnitude in its array, or by a tenth of the largest magnitude in all arrays if that is
  more. Arrays with tiny values, such as the gradient of a scale before a norm, contain nothing but rounding errors.
  """
  pairs = [
    (np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True)
  ]
  largest = max(np.abs(b).max(initial=0) for _, b in pairs)
  return max(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), largest / 10, 1e-30) for a, b in pairs)
