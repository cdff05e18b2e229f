"""How many processes a launcher asks for, read from its environment variables. A run is one process on one host today."""

import os
from collections.abc import Mapping

from maxtext_like.errors import UserError

_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Whose variables, the number of processes, which of them this one is, what to do. The number alone says nothing: after
# `salloc -n 4` a plain shell has it too.
_LAUNCHERS = (
  ("Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "start one task: srun --ntasks=1 ..."),
  ("Slurm", "SLURM_NTASKS", "SLURM_PROCID", "ask for one task, as in #SBATCH --ntasks=1"),
  ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun -n 1 ..., or without mpirun"),
  ("MPI", "PMI_SIZE", "PMI_RANK", "mpirun -n 1 ..., or without mpirun"),
  ("torchrun", "WORLD_SIZE", "RANK", "start it once, without torchrun"),
  ("MaxText's launcher", "NNODES", "NODE_RANK", "start it on one host"),
  ("Cloud TPU multislice", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "take one slice that is one host, as v6e-8"),
)


def require_one_process(environment: Mapping[str, str] = os.environ) -> None:
  """Refuses to be one of several processes: each would train a whole run of its own, in the same directory.

  Args:
    environment: variables of this process.

  Raises:
    UserError: names the variables that ask for more than one.
  """
  if any(environment.get(name) for name in _JAX) and environment.get("JAX_NUM_PROCESSES", "").strip() != "1":
    alone = " ".join(f"-u {name}" for name in _JAX if name in environment)
    _refuse("JAX", _JAX, f"where this is the only process: env {alone} python train.py ...", environment)
  for launcher, number, rank, fix in _LAUNCHERS:
    if number == "SLURM_NTASKS" and environment.get("SLURM_STEP_NUM_TASKS"):
      continue  # the step's own number counts: srun -n 1 in a larger job is one process
    if environment.get(rank) and _more_than_one(environment.get(number, "")):
      _refuse(launcher, (number, rank), fix, environment)
  hosts = [host for host in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if host.strip()]
  if len(hosts) > 1:
    _refuse("Cloud TPU", ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"), "take a slice that is one host, as v6e-8", environment)


def _more_than_one(number: str) -> bool:
  digits = number.strip().lstrip("0")
  return digits.isdecimal() and digits != "1"  # what is no number comes from no launcher


def _refuse(launcher: str, names: tuple[str, ...], fix: str, environment: Mapping[str, str]) -> None:
  written = " ".join(f"{name}={environment[name]}" for name in names if name in environment)
  raise UserError(
    f"{launcher} asks for several processes ({written}); a run is one process on one host today, with all of its devices\n"
    f"  fix: {fix}"
  )
