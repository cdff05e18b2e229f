"""The environment of programs that tests start."""

import os

from maxtext_like.config.files import configs_folder

ROOT = configs_folder().parent


def xla_flags(devices: int) -> str:
  """Return flags for this number of CPU devices, with the tests' own (tests/conftest.py), which halve XLA's time."""
  return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"


def environment(devices: int = 1) -> dict[str, str]:
  """Return this process's environment, with this number of CPU devices."""
  return os.environ | {
    "XLA_FLAGS": xla_flags(devices),
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    "TF_CPP_MIN_LOG_LEVEL": "3",
  }
