"""Launchers' variables: which of them ask for more than one process, and which name the address where the processes meet."""

import pytest
from jax._src.clusters import cloud_tpu_cluster

from maxtext_like.errors import UserError
from maxtext_like.sharding import processes
from maxtext_like.sharding.launchers import ProcessPosition, position, tpu_vm_position

ONE = [
  {},
  {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
  {"JAX_NUM_PROCESSES": "1"},
  {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},  # the script gpu/train.sbatch
  {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun in that script
  {"SLURM_NTASKS": "8"},  # a shell after salloc -n 8
  {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun -n 1 in that shell
  {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
  {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
  {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"},
  {"WORLD_SIZE": "8"},
  {"SLURM_STEP_NUM_TASKS": "many", "SLURM_PROCID": "0"},
]
SEVERAL = [
  ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, ProcessPosition("JAX", "h:1", 2, 0)),
  (
    {"JAX_COORDINATOR_ADDRESS": "[::1]:8476", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
    ProcessPosition("JAX", "[::1]:8476", 2, 1),
  ),
  ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, ProcessPosition("Slurm")),
  ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, ProcessPosition("Open MPI")),
  ({"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc", "TPU_WORKER_ID": "1"}, ProcessPosition("Cloud TPU")),
  ({"TPU_PROCESS_ADDRESSES": "t-0:8476,t-1:8476", "TPU_WORKER_ID": "1"}, ProcessPosition("Cloud TPU")),
  ({"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "0"}, ProcessPosition("Cloud TPU multislice")),
]
REFUSED = [
  ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "JAX_NUM_PROCESSES, JAX_PROCESS_ID is not set"),
  ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "env -u JAX_NUM_PROCESSES -u JAX_PROCESS_ID python train.py"),
  ({"JAX_COORDINATOR_ADDRESS": "h", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "write host:port"),
  ({"JAX_COORDINATOR_ADDRESS": "h:99999", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "write host:port"),
  ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "not whole numbers"),
  ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "2 processes are numbered 0 to 1"),
  ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "start the tasks with srun"),
  ({"SLURM_NTASKS": "9" * 5000, "SLURM_PROCID": "0"}, "start the tasks with srun"),
  ({"PMI_SIZE": "16", "PMI_RANK": "0"}, "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID for each process"),
  ({"WORLD_SIZE": "8", "RANK": "3"}, "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID for each process"),
  ({"NNODES": "2", "NODE_RANK": "0"}, "MaxText's launcher: several processes"),
]


@pytest.mark.parametrize("environment", ONE, ids=str)
def test_alone(environment):
  assert position(environment) is None


@pytest.mark.parametrize(("environment", "wanted"), SEVERAL, ids=lambda e: str(e)[:40])
def test_one_of_several(environment, wanted):
  assert position(environment) == wanted


@pytest.mark.parametrize(("environment", "said"), REFUSED, ids=lambda e: str(e)[:40])
def test_what_says_too_little_is_refused_with_the_variables(environment, said):
  with pytest.raises(UserError) as refused:
    position(environment)
  assert said in str(refused.value)
  assert any(f"{name}={value}" in str(refused.value) for name, value in environment.items())


@pytest.fixture
def metadata(monkeypatch):
  """Simulate a Cloud TPU VM for JAX. Return the answers of its metadata server, which a test can change."""
  said = {"agent-worker-number": "1", "worker-network-endpoints": "a:0:10.0.0.1,b:1:10.0.0.2", "tpu-env": ""}

  def get(key):
    if not said:
      raise OSError("no route to metadata.google.internal")
    return (said[key], 200) if key in said else ("", 404)

  monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
  monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", get)
  monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
  return said


def test_hosts_of_a_slice_find_each_other_without_variables(metadata):
  assert position({}) is None
  assert tpu_vm_position({}) == ProcessPosition("Cloud TPU")
  assert tpu_vm_position({"JAX_NUM_PROCESSES": "1"}) is None
  assert processes._found_by_jax("Cloud TPU", 1) == ("10.0.0.1:8482", 2, 1)
  metadata["worker-network-endpoints"] = "a:0:10.0.0.1"
  assert tpu_vm_position({}) is None
  del metadata["agent-worker-number"]  # as on GKE
  assert tpu_vm_position({}) is None
  metadata.clear()
  with pytest.raises(UserError, match=r"cannot be read: OSError: no route .*\n  fix: .*TPU_SKIP_MDS_QUERY=1"):
    tpu_vm_position({})


def test_no_metadata_are_asked_for_elsewhere(monkeypatch):
  monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: pytest.fail("asked"))
  assert tpu_vm_position({}) is None
