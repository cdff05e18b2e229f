"""Which process of how many this one is, as its launcher says in environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from maxtext_like.errors import UserError

_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Whose variables, the number of processes, which of them this one is, and whether JAX knows where their coordinator is. The
# number alone says nothing: after `salloc -n 4` a plain shell has it too.
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
class Place:
  """One of several processes.

  Attributes:
    launcher: who started them.
    address: host:port of process 0, where they meet; None: JAX knows how to find it.
    count, index: of the processes, and of this one among them; None: JAX knows.
  """

  launcher: str
  address: str | None = None
  count: int | None = None
  index: int | None = None


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
  """This process's place among several; None: it is alone.

  Raises:
    UserError: variables that contradict each other, or of a launcher that does not say where the processes meet.
  """
  if any(environment.get(name) for name in _JAX):
    return _explicit(environment)
  for launcher, number, rank, known in _LAUNCHERS:
    if number == "SLURM_NTASKS" and environment.get("SLURM_STEP_NUM_TASKS"):
      continue  # the step's own number counts: srun -n 1 in a larger job is one process
    if environment.get(rank) and _more_than_one(environment.get(number, "")):
      if known:
        return Place(launcher)
      how = "start the tasks with srun" if launcher == "Slurm" else f"set {', '.join(_JAX)} for each process"
      _refuse(launcher, (number, rank), f"does not say where its processes meet\n  fix: {how}", environment)
  hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")  # in JAX's order
  return Place("Cloud TPU") if len([host for host in hosts.split(",") if host.strip()]) > 1 else None


def place_of_tpu_vm(environment: Mapping[str, str] = os.environ) -> Place | None:
  """This process's place on a Cloud TPU VM, which has no variables: its metadata know the hosts of its slice.

  Elsewhere nothing is asked, and no network touched.

  Returns:
    None: it is alone, or on no such VM, or was told that it is one process.

  Raises:
    UserError: the metadata do not tell.
  """
  if environment.get("JAX_NUM_PROCESSES"):
    return None
  from jax._src.clusters import cloud_tpu_cluster  # what jax.distributed.initialize() asks

  vm = cloud_tpu_cluster.GceTpuCluster
  try:
    several = vm.is_env_present() and vm.get_process_count() > 1
  except Exception as error:  # whatever requests and a metadata server come up with
    raise UserError(
      f"Cloud TPU: the metadata of this machine cannot be read: {type(error).__name__}: {error}\n"
      "  fix: TPU_SKIP_MDS_QUERY=1 if it is no machine of Google Cloud's"
    ) from error
  return Place("Cloud TPU") if several else None


def _explicit(environment: Mapping[str, str]) -> Place | None:
  address, *numbers = (environment.get(name, "").strip() for name in _JAX)
  if numbers[0] == "1" and numbers[1] in ("", "0"):
    return None
  if missing := [name for name in _JAX if not environment.get(name, "").strip()]:
    alone = " ".join(f"-u {name}" for name in _JAX if name in environment)
    fix = f"set {' and '.join(missing)} too, or none of them: env {alone} python train.py ..."
    _refuse("JAX", _JAX, f"says too little: {', '.join(missing)} is not set\n  fix: {fix}", environment)
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port[:6]) < 65536:
    _refuse("JAX", _JAX[:1], "names no place\n  fix: write host:port, with the host of process 0", environment)
  if not all(number.isascii() and number.isdecimal() and len(number) < 8 for number in numbers):
    _refuse("JAX", _JAX[1:], "are not numbers\n  fix: the processes are numbered from 0", environment)
  count, index = map(int, numbers)
  if not index < count:
    _refuse("JAX", _JAX[1:], f"do not fit: {count} processes are 0 to {count - 1}\n  fix: correct one of them", environment)
  return Place("JAX", address, count, index)


def _more_than_one(number: str) -> bool:
  digits = number.strip().lstrip("0")
  return digits.isdecimal() and digits != "1"  # what is no number comes from no launcher


def _refuse(launcher: str, names: tuple[str, ...], what: str, environment: Mapping[str, str]) -> None:
  written = " ".join(f"{name}={environment[name]}" for name in names if name in environment)
  raise UserError(f"{launcher}: several processes ({written}): {what}")
