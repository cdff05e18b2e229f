"""Environment variables of other programs: an error in one is reported by its name before JAX starts (fault F57)."""

import os
import re
import subprocess
import sys

import pytest

from maxtext_like.cli import environment
from maxtext_like.cli.environment import backend_error, check_environment, find_device
from maxtext_like.cli.main import main
from maxtext_like.errors import UserError
from maxtext_like.verbs import VERBS
from tests.processes import ROOT


@pytest.fixture
def machine(monkeypatch):
  """Return a function that simulates a machine with these installed platforms and these devices."""

  def make(installed=(), devices=()):
    monkeypatch.setattr(environment, "_installed", lambda platform: platform in installed)
    monkeypatch.setattr(environment, "find_device", lambda platform: f"/dev/{platform}0" if platform in devices else None)
    monkeypatch.delenv("XLA_FLAGS", raising=False)

  return make


@pytest.mark.parametrize("value", ["", "cpu", "tpu,cpu", "CPU", "cuda", "gpu", " cuda , cpu"])
def test_platforms_of_jax_pass(value, monkeypatch, machine, capsys):
  machine(installed=("cuda", "tpu"), devices=("cuda", "tpu"))
  monkeypatch.setenv("JAX_PLATFORMS", value)
  check_environment()
  assert capsys.readouterr().err == ""


@pytest.mark.parametrize("verb", [verb for verb, entry in VERBS.items() if entry.uses_jax])
def test_every_verb_says_what_to_install_for_the_platform_that_was_asked_for(verb, monkeypatch, machine, capsys):
  machine()
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  assert main([verb]) == 2
  told = capsys.readouterr().err
  assert told.startswith("error: environment variable JAX_PLATFORMS=cuda: JAX is installed without support for an NVIDIA GPU\n")
  assert "pip install -e '.[cuda]'" in told


@pytest.mark.parametrize(
  ("value", "installed", "told"),
  [
    ("gpu", (), "without support for an NVIDIA GPU"),
    ("tpu", (), "without support for a TPU\n  fix: pip install -e '.[tpu]'"),
    ("cpu,cuda", (), "without support for an NVIDIA GPU"),
    ("cuda", ("cuda",), "no NVIDIA GPU was found"),
    ("rocm", (), "without a plugin for rocm"),
    ("metal", (), "without a plugin for metal"),
  ],
)
def test_platforms_that_are_not_here_are_refused(value, installed, told, monkeypatch, machine):
  machine(installed)
  monkeypatch.setenv("JAX_PLATFORMS", value)
  with pytest.raises(UserError) as refused:
    check_environment()
  assert told in str(refused.value)


def test_an_accelerator_that_jax_cannot_use_is_told_in_one_line(monkeypatch, machine, capsys):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  for platform, what in {"cuda": "an NVIDIA GPU", "tpu": "a TPU"}.items():
    machine(devices=(platform,))
    check_environment()
    extra = f"pip install -e '.[{platform}]'"
    assert re.fullmatch(rf"note: .*{what} \(/dev/{platform}0\).*: {re.escape(extra)}\n", capsys.readouterr().err)
    machine(installed=(platform,), devices=(platform,))
    check_environment()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # the user chose the CPU
    machine(devices=(platform,))
    check_environment()
    monkeypatch.delenv("JAX_PLATFORMS")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
  ("platform", "files", "variables", "found"),
  [
    ("cuda", ["dev/nvidia0", "dev/nvidiactl"], {}, "/dev/nvidia0"),
    ("cuda", ["dev/nvidia3"], {}, "/dev/nvidia3"),
    ("cuda", ["proc/driver/nvidia/gpus/0000:01:00.0"], {}, "/proc/driver/nvidia/gpus/0000:01:00.0"),
    ("cuda", ["dev/nvidia0"], {"CUDA_VISIBLE_DEVICES": "-1"}, None),
    ("cuda", ["dev/nvidia0"], {"CUDA_VISIBLE_DEVICES": "2"}, "/dev/nvidia0"),
    ("cuda", ["dev/dxg", "proc/driver/other"], {}, None),
    ("tpu", ["dev/accel0"], {}, "/dev/accel0"),
    ("tpu", ["dev/vfio/0", "dev/vfio/vfio"], {}, None),
    ("tpu", ["dev/vfio/0", "dev/vfio/vfio"], {"TPU_ACCELERATOR_TYPE": "v6e-1"}, "/dev/vfio/0"),
    ("tpu", ["dev/nvidia0"], {"TPU_NAME": "x"}, None),
  ],
)
def test_how_a_device_shows(platform, files, variables, found, tmp_path, monkeypatch):
  for name in ("CUDA_VISIBLE_DEVICES", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_NAME"):
    monkeypatch.delenv(name, raising=False)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  for name in files:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
  assert find_device(platform, tmp_path) == found


@pytest.mark.parametrize(("value", "name"), [("foo", "'foo'"), ("cpu,gpuu", "'gpuu', did you mean 'gpu'?")])
def test_other_platforms_are_refused(value, name, monkeypatch, capsys):
  monkeypatch.setenv("JAX_PLATFORMS", value)
  assert main(["models"]) == 2
  assert f"environment variable JAX_PLATFORMS={value}: unknown platform {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
  "value", ["", "--xla_force_host_platform_device_count=8 --xla_dump_to=/tmp/x", "--xla_cpu_multi_thread_eigen"]
)
def test_flags_of_xla_pass(value, monkeypatch):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  monkeypatch.setenv("XLA_FLAGS", value)
  check_environment()
  assert os.environ["XLA_FLAGS"] == value


def test_a_file_of_flags_is_left_to_xla(monkeypatch):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  monkeypatch.setenv("XLA_FLAGS", "/some/file")
  check_environment()
  assert os.environ["XLA_FLAGS"] == "/some/file"


@pytest.mark.parametrize("flag", ["--xla_foo=1", "--xla_dump_too", "--xla_tpu_enable_latency_hiding_schedule=true"])
def test_flags_that_xla_would_abort_on_are_refused(flag, monkeypatch):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/tmp/x {flag}")
  name = flag.partition("=")[0]
  with pytest.raises(UserError, match=f"XLA_FLAGS: the installed XLA has no flag {name}\n"):
    check_environment()


def test_jax_failing_to_start_a_platform_names_the_variable(monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  error = backend_error(RuntimeError("Unable to initialize backend 'cuda': no such library\nmore"))
  assert str(error).startswith("environment variable JAX_PLATFORMS=cuda: Unable to initialize backend 'cuda'")
  monkeypatch.delenv("JAX_PLATFORMS")
  assert str(backend_error(RuntimeError("Unable to initialize backend 'tpu'"))).startswith("JAX: ")
  assert backend_error(RuntimeError("shapes do not match")) is None


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS limits the address space on Linux")
def test_an_address_space_in_which_jax_cannot_start_is_refused():
  command = f"ulimit -v 1500000; {sys.executable} -m maxtext_like train gemma3-tiny"
  done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 4
  assert "limited to 1.54 GB (ulimit -v)" in done.stderr
  assert "fix: ulimit -v unlimited" in done.stderr


def test_a_deleted_working_directory_is_named(tmp_path):
  command = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m maxtext_like config gemma3-tiny"
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
  assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)
  assert "error: the working directory was deleted" in done.stderr
