"""The gradients of norms of the residual stream: the choice between the kernel ``pallas_gpu`` and XLA.

XLA supports all platforms. It always computes the forward pass, because it fuses it with the neighboring operations. This
module imports no JAX, so that the configuration can read it too.
"""

from dataclasses import dataclass

from maxtext_like.layers.kernels.names import Norm as Name
from maxtext_like.layers.kernels.names import NormChoice as Choice

_HOPPER = "9.0"
_LEAST, _MOST = 1024, 8192
THREADS = 128
"""Threads of a program of the kernel (a warpgroup). Each has the same number of elements of a row."""


@dataclass(frozen=True, kw_only=True)
class Case:
  """The properties that decide whether the kernel supports a norm.

  Attributes:
    platform: "cpu", "gpu" or "tpu": where the program will run.
    capability: CUDA compute capability of the device. None: not an NVIDIA GPU, or not known; it is then assumed to be the
      needed one.
    devices: number of devices of the mesh, because the partitioner cannot split a kernel.
    dim: size of a row.
  """

  platform: str
  capability: str | None
  devices: int
  dim: int


def refuses(case: Case) -> list[str]:
  """Return the reasons why ``pallas_gpu`` does not support a case; an empty list if it does."""
  import jax

  reasons = [] if case.platform == "gpu" else [f"it runs on Hopper GPUs, not on {case.platform}"]
  if case.capability not in (None, _HOPPER):
    reasons.append(f"it needs a GPU of compute capability {_HOPPER}, not {case.capability}")
  if case.devices > 1:
    reasons.append(f"it supports one GPU, but the mesh has {case.devices} devices")
  if case.dim % THREADS or not _LEAST <= case.dim <= _MOST:
    reasons.append(f"rows of {case.dim} elements are not a multiple of {THREADS} from {_LEAST} to {_MOST}")
  if jax.__version_info__ < (0, 11):  # earlier versions of Pallas have another interface for loads with a layout
    reasons.append(f"it needs JAX 0.11, but this is {jax.__version__}")
  return reasons


def choose(choice: Choice, case: Case) -> Name:
  """Return the kernel to use.

  Raises:
    ValueError: the configuration names the kernel, but it does not support the case.
  """
  # "auto" falls back to XLA; a kernel chosen by name must support the case.
  if choice == "xla":
    return "xla"
  reasons = refuses(case)
  if reasons and choice != "auto":
    raise ValueError(f"norm_kernel={choice} cannot be used here: {'; '.join(reasons)}\n  fix: norm_kernel=auto")
  return "xla" if reasons else "pallas_gpu"
