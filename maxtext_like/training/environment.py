"""What a run ran on: env.json, for whoever wants to repeat it."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from maxtext_like import __version__

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")
VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "CUDA_VISIBLE_DEVICES", "NVIDIA_", "TF_CPP_", "OMP_NUM_THREADS", "MAXTEXT_LIKE_")


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _commit() -> str | None:
  """The commit of the checkout this code runs from, with + when files differ; None for an installed package."""
  root = Path(__file__).resolve().parents[2]
  if not (root / ".git").exists():
    return None

  def git(*words: str) -> str | None:
    try:
      done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
      return None
    return done.stdout.strip() if done.returncode == 0 else None

  commit = git("rev-parse", "HEAD")
  return commit and commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def describe() -> dict[str, Any]:
  """Versions, devices, command and the environment variables that change what JAX does, as JSON values."""
  devices = jax.devices()
  return {
    "command": sys.argv,
    "working_directory": os.getcwd(),
    "commit": _commit(),
    "maxtext_like": __version__,
    "python": platform.python_version(),
    "system": platform.platform(),
    "processor_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    "packages": {name: version for name in PACKAGES if (version := _version(name))},
    "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in devices],
    "processes": jax.process_count(),
    "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
  }
