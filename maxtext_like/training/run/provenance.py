"""Describes the environment of a run for env.json, so that it can be reproduced."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from maxtext_like import __version__
from maxtext_like.masking import masked, masked_words

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")
VARIABLES = frozenset(
  """
  XLA_FLAGS XLA_PYTHON_CLIENT_PREALLOCATE XLA_PYTHON_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_ALLOCATOR XLA_CLIENT_MEM_FRACTION
  LIBTPU_INIT_ARGS TPU_LIBRARY_PATH TPU_VISIBLE_DEVICES TPU_VISIBLE_CHIPS TPU_ACCELERATOR_TYPE TPU_WORKER_ID
  TPU_PROCESS_BOUNDS TPU_CHIPS_PER_PROCESS_BOUNDS TPU_SKIP_MDS_QUERY
  CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_VERSION
  NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NVIDIA_TF32_OVERRIDE NVIDIA_PRODUCT_NAME
  NCCL_VERSION NCCL_DEBUG NCCL_ALGO NCCL_PROTO NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_SHM_DISABLE
  NCCL_IB_DISABLE NCCL_IB_HCA NCCL_SOCKET_IFNAME NCCL_NET NCCL_CUMEM_ENABLE NCCL_BUFFSIZE NCCL_MAX_NCHANNELS
  ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES TF_CPP_MIN_LOG_LEVEL TF_CPP_MAX_VLOG_LEVEL
  OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS MALLOC_ARENA_MAX
  JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID MAXTEXT_LIKE_DEBUG
  """.split()
)
"""Environment variables that change a run, in addition to JAX's own options. Others are not stored, as they may be secrets."""


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _commit() -> str | None:
  """Return the commit of the checkout of this code, with + if files differ; None for an installed package."""
  # An installed package has no checkout.
  root = Path(__file__).resolve().parents[3]
  if not (root / ".git").exists():
    return None

  def git(*words: str) -> str | None:
    try:
      done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
      return None
    return done.stdout.strip() if done.returncode == 0 else None

  # Untracked files do not count as changes.
  commit = git("rev-parse", "HEAD")
  return commit and commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def same_everywhere() -> dict[str, str]:
  """Return the versions and the hash of the code, which must not differ between the processes of a run."""
  # Hash every source file, with the layers behind the symbolic link.
  root, digest = Path(__file__).parents[2], hashlib.sha256()
  for path in sorted([*root.rglob("*.py"), *(root / "layers").rglob("*.py")]):  # rglob does not follow a link
    if path.is_file():  # an editor's lock file can be a broken link
      digest.update(path.read_bytes())
  versions = {f"version of {name}": _version(name) or "none" for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")}
  return versions | {"version of python": platform.python_version(), "code of maxtext_like": digest.hexdigest()[:16]}


def describe() -> dict[str, Any]:
  """Return versions, devices, command and the relevant environment variables, as JSON values without secrets."""
  # JAX's own options are known from its configuration.
  devices = jax.devices()
  known = VARIABLES | {name.upper() for name in jax.config.values if name.startswith("jax_")}
  # Variables are listed by name, because others may contain secrets. Values of known ones are masked too.
  return {
    "command": masked_words(sys.argv),
    "working_directory": masked(os.getcwd()),
    "commit": _commit(),
    "maxtext_like": __version__,
    "python": platform.python_version(),
    "system": platform.platform(),
    "processor_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    "packages": {name: version for name in PACKAGES if (version := _version(name))},
    "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in devices],
    "processes": jax.process_count(),
    "variables": {k: masked(v) for k, v in sorted(os.environ.items()) if k in known},
  }
