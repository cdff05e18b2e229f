"""Compiles the train step for GPUs that are not available: XLA's CUDA compiler needs no GPU, and reports the memory.

JAX's CUDA libraries must be installed; a driver or a GPU is not needed. XLA cannot autotune without a device, so the choice of
matrix kernels, and the workspace of these and of cuDNN, are guesses.
"""

import importlib.metadata
import importlib.util
import re
import time
from dataclasses import dataclass
from typing import Any

from maxtext_like.capacity.chips import find_chip
from maxtext_like.capacity.topologies import GpuHost, assumed_gpu
from maxtext_like.config.schema import Config
from maxtext_like.errors import UserError
from maxtext_like.extras import install
from maxtext_like.training.optimizers import on_host

_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
INSTALL = install("cuda")


@dataclass(frozen=True, kw_only=True)
class CompiledForGpus:
  """The compiler's report on a train step. Bytes are per GPU.

  Attributes:
    argument_bytes: the state and the batch.
    output_bytes: outputs, except the state that is updated in place.
    temporary_bytes: further allocations while it runs.
    host_bytes: temporary allocations in host memory.
    seconds: time of tracing and compiling.
  """

  argument_bytes: int
  output_bytes: int
  temporary_bytes: int
  seconds: float
  host_bytes: int = 0

  @property
  def total(self) -> int:
    """The sum, as the device's ``memory_analysis`` calculates it."""
    return self.argument_bytes + self.output_bytes + self.temporary_bytes


def installed() -> str | None:
  """Return JAX's CUDA plugin and its version, or None if it is not installed."""
  name = next((name for name in _PLUGINS if importlib.util.find_spec(name) is not None), None)
  return None if name is None else f"{name.replace('_', '-')} {importlib.metadata.version(name.replace('_', '-'))}"


def why_not(config: Config, host: GpuHost) -> str | None:
  """Return why a configuration cannot be compiled for these GPUs here; None if it can."""
  if host.key not in _DESIGNS:
    return f"there is no XLA description of this card (there is one of {', '.join(_DESIGNS)})"
  if config.training.optimizer_memory_host_offload:
    return f"{on_host.KEY} = true: in JAX the GPUs of a topology have no host memory"
  if installed() is None:
    return f"JAX's CUDA libraries are not installed ({INSTALL}; no GPU is needed)"
  return None


def compile_step(config: Config, host: GpuHost) -> CompiledForGpus:
  """Compile the train step of a configuration for the GPUs of a host.

  Args:
    config: configuration of the run; its mesh is placed on the GPUs.
    host: the GPUs.

  Raises:
    UserError: as ``why_not``, or the mesh does not fit the host.
  """
  from maxtext_like.sharding.mesh import make_mesh
  from maxtext_like.training.step.program import make_program

  if why := why_not(config, host):
    raise UserError(
      f"topology={host.name}: {why}\n  fix: machine_code=false, or `maxtext-like plan`; both estimate without compiling"
    )
  start = time.monotonic()
  try:
    mesh = make_mesh(config.mesh, _devices(host))
  except UserError as error:
    raise UserError(f"topology={host.name}: {error}") from error
  with assumed_gpu():
    compiled = make_program(config, mesh=mesh, platform="gpu", capability=host.capability).lower_step("cuda").compile()
  memory = compiled.memory_analysis()
  return CompiledForGpus(
    argument_bytes=memory.argument_size_in_bytes,
    output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    seconds=time.monotonic() - start,
    host_bytes=memory.host_temp_size_in_bytes,
  )


def _devices(host: GpuHost) -> list[Any]:
  from jax.experimental import topologies

  name = f"1x1x{host.gpus}"  # slices x hosts x GPUs
  return list(topologies.get_topology_desc(name, "cuda", target_config=_target(host), topology=name).devices)


@dataclass(frozen=True, kw_only=True)
class _Design:
  """The properties of a card that XLA needs in addition to its memory. Sizes in bytes.

  Attributes:
    multiprocessors: number of multiprocessors.
    float32_units: float32 units per multiprocessor.
    shared_memory: shared memory per multiprocessor.
    second_level: size of the L2 cache.
    clock: GHz.
  """

  multiprocessors: int
  float32_units: int
  shared_memory: int
  second_level: int
  clock: float


# Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; clocks and caches from the cards'
# white papers and CUDA's deviceQuery.
_DESIGNS = {
  "a100": _Design(multiprocessors=108, float32_units=64, shared_memory=164 << 10, second_level=40 << 20, clock=1.41),
  "a100-40gb": _Design(multiprocessors=108, float32_units=64, shared_memory=164 << 10, second_level=40 << 20, clock=1.41),
  "h100": _Design(multiprocessors=132, float32_units=128, shared_memory=228 << 10, second_level=50 << 20, clock=1.98),
  "h200": _Design(multiprocessors=132, float32_units=128, shared_memory=228 << 10, second_level=60 << 20, clock=1.98),
  "gh200": _Design(multiprocessors=132, float32_units=128, shared_memory=228 << 10, second_level=60 << 20, clock=1.98),
  "b200": _Design(multiprocessors=148, float32_units=128, shared_memory=228 << 10, second_level=126 << 20, clock=1.965),
}


# Above this share of the memory XLA rematerializes on its own. On a real card the limit is the memory that JAX may use; for a
# card that is not available it is this share of its total memory.
_XLA_SHARE = 0.8


def _target(host: GpuHost) -> str:
  """Return the card as XLA's ``GpuTargetConfigProto`` in text format."""
  design = _DESIGNS[host.key]
  chip = find_chip(host.card)
  assert chip is not None
  assert chip.memory is not None
  major, minor = map(int, host.capability.split("."))
  accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
  size = int(host.bytes / _XLA_SHARE)
  cudnn, runtime = (_version(name) for name in ("nvidia-cudnn", "nvidia-cuda-runtime"))
  return f"""
    gpu_device_info {{
      cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
      shared_memory_per_block: {48 << 10} shared_memory_per_core: {design.shared_memory}
      shared_memory_per_block_optin: {design.shared_memory - (1 << 10)}
      core_count: {design.multiprocessors} fpus_per_core: {design.float32_units}
      block_dim_limit_x: {2**31 - 1} block_dim_limit_y: {2**16 - 1} block_dim_limit_z: {2**16 - 1}
      memory_bandwidth: {chip.memory:.0f} l2_cache_size: {design.second_level} clock_rate_ghz: {design.clock}
      device_memory_size: {size} registers_per_core_limit: {1 << 16} registers_per_block_limit: {1 << 16}
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: {cudnn[0]} minor: {cudnn[1]} patch: {cudnn[2]} }}
    runtime_version {{ major: {runtime[0]} minor: {runtime[1]} patch: {runtime[2]} }}
    device_description_str: "{host.card}"
  """


def _version(prefix: str) -> tuple[int, int, int]:
  """Return the version of an installed NVIDIA library whose package has this name, optionally followed by CUDA's version."""
  for found in importlib.metadata.distributions():
    if re.fullmatch(rf"{prefix}(-cu)?\d*", found.metadata["Name"] or ""):
      major, minor, patch, *_ = (*map(int, re.findall(r"\d+", found.version)), 0, 0)
      return major, minor, patch
  raise UserError(f"compile: {prefix}* is not installed\n  fix: {INSTALL}")
