"""Runs the launch scripts with stand-ins for the programs that they call."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from jax._src.clusters import cloud_tpu_cluster

from maxtext_like.capacity.aot_tpu import xla_flags
from maxtext_like.cli.environment import check_environment
from maxtext_like.config.files import configs_folder
from maxtext_like.config.load import load_config
from maxtext_like.sharding import launchers, processes

ROOT = configs_folder().parent
SCRIPTS = sorted(p for folder in ("tpu", "gpu") for p in (ROOT / folder).iterdir() if p.suffix in (".sh", ".sbatch"))


class Stage:
  """A folder of stand-in programs on PATH. Each records its arguments in ``calls`` and runs a line of shell."""

  def __init__(self, folder: Path):
    self.folder, self.log = folder, folder / "log"

  def stand_in(self, name: str, does: str = ":") -> None:
    path = self.folder / name
    path.write_text(f'#!/bin/bash\nprintf "%s\\x1f" "{name}" "$@" >> {self.log}; printf "\\x1e" >> {self.log}\n{does}\n')
    path.chmod(0o755)

  def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    environment = kept | {"PATH": f"{self.folder}:/usr/bin:/bin"} | variables
    return subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)

  @property
  def calls(self) -> list[list[str]]:
    written = self.log.read_text() if self.log.exists() else ""
    return [call.split("\x1f")[:-1] for call in written.split("\x1e")[:-1]]


@pytest.fixture
def stage(tmp_path):
  return Stage(tmp_path)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_syntax(path):
  done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (0, "")
  assert os.access(path, os.X_OK) == (path.name != "env.sh")


def test_tpu_environment_is_the_table_of_flags(stage):
  done = stage.run("bash", "-euc", '. tpu/env.sh; echo "$LIBTPU_INIT_ARGS"', LIBTPU_INIT_ARGS="--mine=1")
  words = [f"--{name}={str(value).lower()}" for name, value in xla_flags("all").items()]
  assert done.stdout.split() == [*words, "--mine=1"]
  assert "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000" in words


def test_gpu_flags_are_known_to_this_xla(stage, monkeypatch):
  done = stage.run("bash", "-euc", '. gpu/env.sh; echo "$XLA_FLAGS"', XLA_FLAGS="--xla_dump_to=/nowhere")
  assert done.stdout.split()[-1] == "--xla_dump_to=/nowhere"
  assert len(done.stdout.split()) > 3
  monkeypatch.setenv("XLA_FLAGS", done.stdout.strip())
  check_environment()
  # XLA itself aborts on a flag that it does not know.
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  python = [sys.executable, "-c", "import jax; jax.devices()"]
  assert subprocess.run(python, env=os.environ | {"XLA_FLAGS": done.stdout.strip()}, timeout=60).returncode == 0


@pytest.mark.parametrize(("gpus", "nodes", "overlaps"), [(1, "1", False), (1, "2", True), (2, "1", True)])
def test_collectives_are_overlapped_where_there_are_some(stage, gpus, nodes, overlaps):
  stage.stand_in("nvidia-smi", f"for i in $(seq {gpus}); do echo GPU $i; done")
  done = stage.run("bash", "-euc", '. gpu/env.sh; echo "$XLA_FLAGS"', SLURM_JOB_NUM_NODES=nodes, XLA_FLAGS="--mine=1")
  assert done.stdout.split()[-1] == "--mine=1"
  assert ("--xla_gpu_enable_latency_hiding_scheduler=true" in done.stdout.split()) == overlaps


@pytest.mark.parametrize("folder", ["tpu", "gpu"])
def test_finiteness_check_trains_two_steps(stage, folder):
  stage.stand_in("python", "exit 3")
  done = stage.run(f"{folder}/finiteness_check.sh", "configs/models/gemma3-4b.yml", "dtype=float32")
  assert done.returncode == 3
  ((_, script, model, *words),) = stage.calls
  assert script == "train.py"
  config = load_config(model, words).config
  assert (config.training.steps, config.training.finite_check_steps) == (2, 2)
  assert config.logging.run_name == "finiteness-gemma3-4b"
  assert config.precision.dtype == "float32"
  assert not config.checkpoint.enable_checkpointing


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 42, 130, 137, 143])
def test_slurm_job_is_requeued_on_what_a_restart_can_mend(stage, code):
  stage.stand_in("srun", f"exit {code}")
  stage.stand_in("scontrol")
  job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "17"}
  done = stage.run("gpu/train.sbatch", "gemma4-tiny", "dataset_path=/a b", **job)
  assert done.returncode == code
  srun, *after = stage.calls
  assert srun == ["srun", "--kill-on-bad-exit=0", "--wait=600", "python", "train.py", "gemma4-tiny", "dataset_path=/a b"]
  assert after == ([["scontrol", "requeue", "17"]] if code in (42, 137, 143) else [])
  last = stage.run("gpu/train.sbatch", "gemma4-tiny", SLURM_RESTART_COUNT="100", **job)
  assert (last.returncode, stage.calls[-1][0]) == (code, "srun")
  assert ("after 100 restarts" in last.stderr) == (code in (42, 137, 143))


def test_slurm_job_without_a_model_is_refused(stage):
  assert stage.run("gpu/train.sbatch").returncode == 2


def test_xpk_gets_the_command_in_one_piece(stage):
  stage.stand_in("xpk")
  names = {"PROJECT": "p", "ZONE": "z", "CLUSTER": "c", "IMAGE": "i"}
  done = stage.run("tpu/xpk.sh", "first", "gemma4-tiny", "dataset_path=/a b", **names)
  assert (done.returncode, done.stderr) == (0, "")
  ((*_, last),) = stage.calls
  command = last.removeprefix("--command=")
  assert {"--tpu-type=v6e-4", "--num-slices=1", "--restart-on-exit-codes=42"} <= {*stage.calls[0]}
  assert "--dry-run" not in stage.calls[0]
  words = shlex.split(command.partition("train.py ")[2])
  assert words == ["gemma4-tiny", "run_name=first", "output_dir=/runs", "dataset_path=/a b"]
  assert stage.run("tpu/xpk.sh", "first", TPU_TYPE="v6e-32", NUM_SLICES="2", **names).returncode == 0
  assert {"--tpu-type=v6e-32", "--num-slices=2"} <= {*stage.calls[1]}
  assert stage.run("tpu/xpk.sh", "first", "gemma4-tiny", "output_dir=gs://b/a", "run_name=other", **names).returncode == 0
  model, *words = shlex.split(stage.calls[2][-1].partition("train.py ")[2])
  logging = load_config(model, words).config.logging
  assert (logging.output_dir, logging.run_name) == ("gs://b/a", "other"), "the caller's own words count"
  missing = stage.run("tpu/xpk.sh", "first", PROJECT="p", ZONE="z", CLUSTER="c")
  assert missing.returncode != 0
  assert "set IMAGE" in missing.stderr


def test_queued_resource_waits_and_starts(stage):
  # ``describe`` fails, because the resource does not exist yet. With --format, which asks for the state, it prints ACTIVE.
  stage.stand_in("gcloud", 'case "$*" in *--format*) echo ACTIVE ;; *describe*) exit 1 ;; esac')
  done = stage.run("tpu/queued_resource.sh", "mine", "gemma3-4b", "run_name=a b", PROJECT="p", ZONE="z")
  assert (done.returncode, "waiting for mine" in done.stderr) == (0, True)
  verbs = [next(w for w in words if w in ("describe", "create", "scp", "ssh")) for words in stage.calls]
  assert verbs == ["describe", "create", "describe", "scp", "ssh"]
  assert "--accelerator-type=v6e-8" in stage.calls[1]
  assert all("--worker=all" in words for words in stage.calls[3:])
  assert stage.calls[-1][-1].endswith("tpu/restarting.sh python train.py gemma3-4b run_name=a\\ b ")


@pytest.mark.parametrize(
  ("accelerator", "words", "code"),
  [
    ("v6e-32", ["gemma3-4b", "output_dir=/shared"], 0),
    ("v6e-32", ["gemma3-4b", "logging.output_dir=/shared"], 0),
    ("v6e-32", ["gemma3-4b", "base_output_directory=gs://b/runs"], 0),
    ("v6e-16", ["gemma3-4b"], 2),
    ("v6e-16", [], 2),
    ("v6e-31", [], 2),
  ],
)
def test_queued_resource_of_several_hosts_asks_for_a_directory_they_share(stage, accelerator, words, code):
  stage.stand_in("gcloud", 'case "$*" in *--format*) echo ACTIVE ;; *describe*) exit 1 ;; esac')
  done = stage.run("tpu/queued_resource.sh", "mine", *words, PROJECT="p", ZONE="z", ACCELERATOR=accelerator)
  assert done.returncode == code, done.stderr
  assert bool(stage.calls) == (code == 0)


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDING", "SUSPENDED", "DELETING"])
def test_queued_resource_does_not_wait_for_what_does_not_come(stage, state):
  stage.stand_in("gcloud", f'case "$*" in *--format*) echo {state} ;; esac')
  done = stage.run("tpu/queued_resource.sh", "mine", "gemma3-4b", PROJECT="p", ZONE="z")
  assert (done.returncode, f"mine is {state}" in done.stderr) == (42, True)


@pytest.mark.parametrize(
  ("there", "made"),
  [
    ({"python3": 12}, "python3 -m venv"),
    ({"python3": 10, "python3.11": 11, "python3.12": 12}, "python3.12 -m venv"),
    ({"python3": 10}, "python3 -m uv venv -q --seed --python 3.12"),
  ],
)
def test_a_tpu_vm_gets_a_python_that_is_new_enough(stage, tmp_path, there, made):
  install = f"mkdir -p {tmp_path}/venv/bin; cp {tmp_path}/of-venv {tmp_path}/venv/bin/python"
  (tmp_path / "of-venv").write_text(
    f'#!/bin/bash\nprintf "%s\\x1f" "of-venv" "$@" >> {stage.log}; printf "\\x1e" >> {stage.log}\n'
  )
  (tmp_path / "of-venv").chmod(0o755)
  for name in ("python3", "python3.13", "python3.12", "python3.11"):
    old = "exit 1" if name not in there or there[name] < 11 else "exit 0"
    stage.stand_in(name, f'case "$1 $2 $3" in "-c "*) {old} ;; *" venv"*) {install} ;; esac')
  (tmp_path / "venv").mkdir()  # as left by an earlier call that failed
  assert stage.run("tpu/install.sh", HOME=str(tmp_path)).returncode == 0
  calls = [" ".join(call) for call in stage.calls if call[1] != "-c"]
  assert f"{made} {tmp_path}/venv" in calls
  assert calls[-1] == "of-venv -m pip install -q -e .[tpu,gcs]"
  assert stage.run("tpu/install.sh", HOME=str(tmp_path)).returncode == 0
  assert [call[0] for call in stage.calls[-2:]] == ["of-venv", "of-venv"], "it can be repeated"


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 42, 130, 137, 143])
def test_a_host_starts_again_what_a_restart_can_mend(stage, code):
  stage.stand_in("train", f"exit {code}")
  done = stage.run("tpu/restarting.sh", "train", "a b", MAX_RESTARTS="2", PAUSE="0")
  assert done.returncode == code
  assert stage.calls == [["train", "a b"]] * (3 if code in (42, 137, 143) else 1)


def test_no_restart_after_a_signal(stage):
  stage.stand_in("train", "kill -TERM $PPID; exit 42")
  assert stage.run("tpu/restarting.sh", "train", PAUSE="0").returncode == 42
  assert len(stage.calls) == 1


@pytest.fixture
def jobset():
  return yaml.safe_load((ROOT / "tpu" / "jobset.yaml").read_text("utf-8"))


def test_jobset_is_one(jobset):
  schema = json.loads((ROOT / "tests" / "launch" / "jobset.schema.json").read_text("utf-8"))
  validator = jsonschema.Draft202012Validator(schema)
  assert not [*validator.iter_errors(jobset)]
  jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["resorces"] = {}
  jobset["spec"]["failurePolicy"]["maxRestarts"] = "ten"
  assert len([*validator.iter_errors(jobset)]) == 2


def test_jobset_restarts_on_what_a_restart_can_mend(jobset):
  (job,) = jobset["spec"]["replicatedJobs"]
  (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
  pod = job["template"]["spec"]["template"]["spec"]
  (container,) = pod["containers"]
  assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2, 3, 4, 130]}
  (policy,) = jobset["spec"]["failurePolicy"]["rules"]
  assert (policy["action"], policy["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
  assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


@pytest.mark.parametrize("slices", [1, 2])
def test_pods_of_a_jobset_find_each_other(jobset, monkeypatch, slices):
  """With the environment variables that GKE sets, the pods are the processes of one run, and its mesh has all their chips."""
  spec, (job,) = jobset["spec"], jobset["spec"]["replicatedJobs"]
  job["replicas"] = slices
  assert spec["network"]["enableDNSHostnames"]
  hosts, pod = job["template"]["spec"]["completions"], job["template"]["spec"]["template"]["spec"]
  assert job["template"]["spec"]["parallelism"] == hosts
  assert job["template"]["spec"]["completionMode"] == "Indexed"
  name = lambda s, host: f"{jobset['metadata']['name']}-{job['name']}-{s}-{host}.{spec['network']['subdomain']}"
  monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
  monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.1")
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
  found = []
  for s in range(slices):
    for host in range(hosts):
      variables = {"TPU_WORKER_HOSTNAMES": ",".join(name(s, i) for i in range(hosts)), "TPU_WORKER_ID": str(host)}
      of_several = {"MEGASCALE_NUM_SLICES": str(slices), "MEGASCALE_SLICE_ID": str(s)}
      of_several["MEGASCALE_COORDINATOR_ADDRESS"] = name(0, 0)
      variables |= of_several if slices > 1 else dict.fromkeys(of_several, "")
      for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
      here = launchers.position()
      assert here is not None
      found.append(processes._found_by_jax(here.launcher, 1))
  assert found == [(f"{name(0, 0)}:8482", slices * hosts, i) for i in range(slices * hosts)]
  (container,) = pod["containers"]
  model, *words = shlex.split(container["args"][0].partition("train.py ")[2])
  config = load_config(model, [str(ROOT / w) if w.endswith(".yml") else w for w in words]).config
  x, y = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
  assert container["resources"]["limits"]["google.com/tpu"] * hosts == x * y
  assert config.mesh.axis_sizes(x * y)["fsdp"] == x * y
  assert config.logging.output_dir in {m["mountPath"] for m in container["volumeMounts"]}
