"""Reads the launcher's environment variables: how many processes a run has, and which of them this process is."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from maxtext_like.errors import UserError

_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Launcher, variable with the number of processes, variable with this process's index, and whether JAX finds the coordinator.
# The number alone is not enough: after `salloc -n 4` a plain shell has it too.
_LAUNCHERS = (
  ("Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", True),
  ("Slurm", "SLURM_NTASKS", "SLURM_PROCID", False),
  ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", True),
  ("MPI", "PMI_SIZE", "PMI_RANK", False),
  ("torchrun", "WORLD_SIZE", "RANK", False),
  ("MaxText's launcher", "NNODES", "NODE_RANK", False),
  ("Cloud TPU multislice", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", True),
)


@dataclass(frozen=True)
class ProcessPosition:
  """The position of this process among several.

  Attributes:
    launcher: name of the launcher.
    address: host:port of process 0; None if JAX finds it.
    count, index: number of processes and index of this one; None if JAX finds them.
  """

  launcher: str
  address: str | None = None
  count: int | None = None
  index: int | None = None


def position(environment: Mapping[str, str] = os.environ) -> ProcessPosition | None:
  """Returns the position of this process, or None if it is the only one.

  Raises:
    UserError: the variables contradict each other, or the launcher does not provide the coordinator's address.
  """
  if any(environment.get(name) for name in _JAX):
    return _explicit(environment)
  for launcher, number, rank, known in _LAUNCHERS:
    if number == "SLURM_NTASKS" and environment.get("SLURM_STEP_NUM_TASKS"):
      continue  # the number of tasks of the step takes precedence: srun -n 1 in a larger job is one process
    if environment.get(rank) and _more_than_one(environment.get(number, "")):
      if known:
        return ProcessPosition(launcher)
      how = "start the tasks with srun" if launcher == "Slurm" else f"set {', '.join(_JAX)} for each process"
      _refuse(launcher, (number, rank), f"the launcher does not provide the coordinator's address\n  fix: {how}", environment)
  hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")  # in JAX's order
  return ProcessPosition("Cloud TPU") if len([host for host in hosts.split(",") if host.strip()]) > 1 else None


def tpu_vm_position(environment: Mapping[str, str] = os.environ) -> ProcessPosition | None:
  """Returns the position of this process on a Cloud TPU VM, which sets no variables: its metadata list the hosts of the slice.

  On other machines it sends no request and uses no network.

  Returns:
    None if the process is the only one, does not run on a Cloud TPU VM, or JAX_NUM_PROCESSES is set.

  Raises:
    UserError: the metadata cannot be read.
  """
  if environment.get("JAX_NUM_PROCESSES"):
    return None
  from jax._src.clusters import cloud_tpu_cluster  # jax.distributed.initialize() uses it too

  vm = cloud_tpu_cluster.GceTpuCluster
  try:
    several = vm.is_env_present() and vm.get_process_count() > 1
  except Exception as error:  # requests and the metadata server raise many types
    raise UserError(
      f"Cloud TPU: the metadata of this machine cannot be read: {type(error).__name__}: {error}\n"
      "  fix: set TPU_SKIP_MDS_QUERY=1 if this machine is not on Google Cloud"
    ) from error
  return ProcessPosition("Cloud TPU") if several else None


def _explicit(environment: Mapping[str, str]) -> ProcessPosition | None:
  address, *numbers = (environment.get(name, "").strip() for name in _JAX)
  if numbers[0] == "1" and numbers[1] in ("", "0"):
    return None
  if missing := [name for name in _JAX if not environment.get(name, "").strip()]:
    alone = " ".join(f"-u {name}" for name in _JAX if name in environment)
    fix = f"set {' and '.join(missing)} too, or unset all of them: env {alone} python train.py ..."
    _refuse("JAX", _JAX, f"{', '.join(missing)} is not set\n  fix: {fix}", environment)
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port[:6]) < 65536:
    _refuse("JAX", _JAX[:1], "not a valid address\n  fix: write host:port, with the host of process 0", environment)
  if not all(number.isascii() and number.isdecimal() and len(number) < 8 for number in numbers):
    _refuse("JAX", _JAX[1:], "not whole numbers\n  fix: number the processes from 0", environment)
  count, index = map(int, numbers)
  if not index < count:
    _refuse("JAX", _JAX[1:], f"{count} processes are numbered 0 to {count - 1}\n  fix: correct one of them", environment)
  return ProcessPosition("JAX", address, count, index)


def _more_than_one(number: str) -> bool:
  digits = number.strip().lstrip("0")
  return digits.isdecimal() and digits != "1"  # a value that is not a number does not come from a launcher


def _refuse(launcher: str, names: tuple[str, ...], what: str, environment: Mapping[str, str]) -> None:
  written = " ".join(f"{name}={environment[name]}" for name in names if name in environment)
  raise UserError(f"{launcher}: several processes ({written}): {what}")
