"""Which launchers' variables ask for more than one process."""

import pytest

from maxtext_like.errors import UserError
from maxtext_like.sharding.processes import require_one_process

ONE = [
  {},
  {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
  {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},  # gpu/train.sbatch itself
  {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # its srun
  {"SLURM_NTASKS": "8"},  # a shell after salloc -n 8
  {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun -n 1 there
  {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
  {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
  {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"},
  {"WORLD_SIZE": "8"},
  {"SLURM_STEP_NUM_TASKS": "many", "SLURM_PROCID": "0"},
]
SEVERAL = [
  {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
  {"JAX_COORDINATOR_ADDRESS": "h:1"},  # of how many, another process knows
  {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
  {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
  {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
  {"PMI_SIZE": "16", "PMI_RANK": "0"},
  {"WORLD_SIZE": "8", "RANK": "3"},
  {"NNODES": "2", "NODE_RANK": "0"},
  {"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc", "TPU_WORKER_ID": "1"},
  {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "0"},
  {"SLURM_NTASKS": "9" * 5000, "SLURM_PROCID": "0"},
]


@pytest.mark.parametrize("environment", ONE, ids=str)
def test_one_process_may_train(environment):
  require_one_process(environment)


@pytest.mark.parametrize("environment", SEVERAL, ids=lambda e: str(e)[:40])
def test_one_of_several_is_refused_with_the_variables(environment):
  with pytest.raises(UserError, match="one process on one host") as refused:
    require_one_process(environment)
  for name, value in environment.items():
    assert f"{name}={value}" in str(refused.value)
