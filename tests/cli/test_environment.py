"""Variables of other programs: a typing error in one is told by its name before JAX starts (fault F57)."""

import pytest

from maxtext_like.cli.environment import backend_error, check_environment
from maxtext_like.cli.main import main
from maxtext_like.errors import UserError


@pytest.mark.parametrize("value", ["", "cpu", "tpu,cpu", "CPU", "cuda"])
def test_platforms_of_jax_pass(value, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", value)
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  check_environment()


@pytest.mark.parametrize(("value", "name"), [("foo", "'foo'"), ("cpu,gpuu", "'gpuu', did you mean 'gpu'?")])
def test_other_platforms_are_refused(value, name, monkeypatch, capsys):
  monkeypatch.setenv("JAX_PLATFORMS", value)
  assert main(["models"]) == 2
  assert f"environment variable JAX_PLATFORMS={value}: no platform {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
  "value", ["", "--xla_force_host_platform_device_count=8 --xla_dump_to=/tmp/x", "--xla_cpu_multi_thread_eigen"]
)
def test_flags_of_xla_pass(value, monkeypatch):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  monkeypatch.setenv("XLA_FLAGS", value)
  check_environment()


def test_a_file_of_flags_is_left_to_xla(monkeypatch):
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  monkeypatch.setenv("XLA_FLAGS", "/some/file")
  check_environment()


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
