"""Who makes the gradients of norms beside a residual stream, and the choice between them.

XLA does it anywhere; ``pallas_gpu`` is a kernel of our own. The forward pass is XLA's in any case, which joins it to its
neighbours. This module imports no JAX, so that the configuration may ask too.
"""

from dataclasses import dataclass
from typing import Literal

Name = Literal["pallas_gpu", "xla"]
Choice = Literal["auto", "pallas_gpu", "xla"]
"""What a configuration may ask for: "auto" takes the kernel where it can work."""

_HOPPER = "9.0"
_LEAST, _MOST = 1024, 8192
THREADS = 128
"""Of a program of the kernel, a warpgroup: each has as many numbers of a row as any other."""


@dataclass(frozen=True, kw_only=True)
class Case:
  """What decides.

  Attributes:
    platform: "cpu", "gpu" or "tpu", where the program will run.
    capability: CUDA's compute capability of the device; None: no NVIDIA GPU, or not known, and then taken for the one it needs.
    devices: of the mesh: a partitioner cannot look into a kernel.
    dim: numbers of a row.
  """

  platform: str
  capability: str | None
  devices: int
  dim: int


def refuses(case: Case) -> list[str]:
  """Why ``pallas_gpu`` cannot do a case; empty where it can."""
  import jax

  reasons = [] if case.platform == "gpu" else [f"it runs on Hopper GPUs, not on {case.platform}"]
  if case.capability not in (None, _HOPPER):
    reasons.append(f"it is for GPUs of compute capability {_HOPPER}, not {case.capability}")
  if case.devices > 1:
    reasons.append(f"it is for one GPU, and the mesh has {case.devices}")
  if case.dim % THREADS or not _LEAST <= case.dim <= _MOST:
    reasons.append(f"rows of {case.dim} numbers are not a multiple of {THREADS} from {_LEAST} to {_MOST}")
  if jax.__version_info__ < (0, 11):  # its Pallas writes loads in a layout otherwise
    reasons.append(f"it needs JAX 0.11, and this is {jax.__version__}")
  return reasons


def choose(choice: Choice, case: Case) -> Name:
  """Who will do it.

  Raises:
    ValueError: the kernel is asked for by name and cannot.
  """
  if choice == "xla":
    return "xla"
  reasons = refuses(case)
  if reasons and choice != "auto":
    raise ValueError(f"norm_kernel={choice} cannot be used here: {'; '.join(reasons)}; use norm_kernel=auto")
  return "xla" if reasons else "pallas_gpu"
