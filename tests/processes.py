"""The environment of programs that tests start."""

import os

from maxtext_like.config.files import configs_folder

ROOT = configs_folder().parent


def xla_flags(devices: int) -> str:
  """For so many CPU devices; compiled as in the tests' own process (tests/conftest.py), or XLA takes twice the time."""
  return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"


def environment(devices: int = 1) -> dict[str, str]:
  """This process's, with so many CPU devices."""
  return os.environ | {
    "XLA_FLAGS": xla_flags(devices),
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    "TF_CPP_MIN_LOG_LEVEL": "3",
  }
