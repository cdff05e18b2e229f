"""Checks environment variables and the machine before JAX starts, because JAX's own errors do not name the cause."""

import importlib.metadata
import importlib.util
import mmap
import os
import pkgutil
import re
import sys
from pathlib import Path

from maxtext_like.config.problems import did_you_mean
from maxtext_like.errors import DoesNotFitError, UserError
from maxtext_like.extras import install

PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu", "metal", "proxy")
"""Platforms that JAX supports without a plugin, or whose plugin registers itself on import."""


ACCELERATORS = {"cuda": "an NVIDIA GPU", "tpu": "a TPU"}
"""Platforms with an extra of the same name, and their devices."""


# Measured with `train gemma3-tiny`, JAX 0.12, two CPU cores and an empty compilation cache. At 1.84 and 2.01 GB the process
# aborts while it compiles. At 2.20 GB the run ends with its own message about memory, and at 2.46 GB it trains.
_LEAST_ADDRESS_SPACE = 2_200_000_000


def check_environment() -> None:
  """Raise an error for settings that JAX would fail on, and print a note about an accelerator that this JAX cannot use.

  Raises:
    UserError: ``JAX_PLATFORMS`` has an unknown platform, or one whose package or device is missing; ``XLA_FLAGS`` has a flag
      that the installed XLA does not have.
    DoesNotFitError: the address space of this process is too small for JAX.
  """
  _check_address_space()
  chosen = os.environ.get("JAX_PLATFORMS", "")
  _check_platforms(chosen)
  _check_flags(os.environ.get("XLA_FLAGS", ""))
  if not chosen.strip():
    for platform, what in ACCELERATORS.items():
      if (device := find_device(platform)) and not _installed(platform):
        print(
          f"note: this machine has {what} ({device}), but the installed JAX supports only the CPU: {install(platform)}",
          file=sys.stderr,
        )


def _check_address_space() -> None:
  """Raise an error if the address space is too small for JAX's threads: JAX would abort without a message."""
  if sys.platform != "linux":
    return
  import resource

  limit = resource.getrlimit(resource.RLIMIT_AS)[0]
  if limit != resource.RLIM_INFINITY and limit < _LEAST_ADDRESS_SPACE:
    raise DoesNotFitError(
      f"the address space of this process is limited to {limit / 1e9:.2f} GB (ulimit -v); JAX, its threads "
      f"and its compiler need {_LEAST_ADDRESS_SPACE / 1e9:.1f} GB for the smallest model\n  fix: ulimit -v unlimited"
    )


def find_device(platform: str, root: Path = Path("/")) -> str | None:
  """Return a file that shows that a device of a platform exists, or None. No driver is started and no file is opened.

  Args:
    platform: a key of ``ACCELERATORS``.
    root: root of the file system.
  """
  if platform == "cuda":
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
      return None
    # The last pattern is for Windows Subsystem for Linux, where /dev/dxg may be a GPU of any vendor.
    patterns = ["dev/nvidia[0-9]*", "dev/nvidiactl", "proc/driver/nvidia/gpus/*", "usr/lib/wsl/lib/nvidia-smi"]
  else:
    patterns = ["dev/accel[0-9]*", "dev/accel/accel[0-9]*"]
    if any(name in os.environ for name in ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_NAME")):
      patterns.append("dev/vfio/[0-9]*")  # newer TPUs; without one of the variables above it may be another device
  return next((f"/{found.relative_to(root)}" for pattern in patterns for found in sorted(root.glob(pattern))), None)


def _installed(platform: str) -> bool:
  """Return True if the package for a platform is installed."""
  if platform == "tpu":
    return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None
  return any(platform in name for name in _plugins())


def backend_error(error: RuntimeError) -> UserError | None:
  """Return JAX's failure to start a platform as an error that names JAX_PLATFORMS, or None for any other error."""
  if not str(error).startswith("Unable to initialize backend"):
    return None
  chosen = os.environ.get("JAX_PLATFORMS")
  cause = f"environment variable JAX_PLATFORMS={chosen}" if chosen else "JAX"
  return UserError(
    f"{cause}: {str(error).splitlines()[0]}\n  fix: unset JAX_PLATFORMS, or install the package for this platform"
  )


def _check_platforms(value: str) -> None:
  names = [name.strip() for name in value.split(",") if name.strip()]
  if not names:
    return
  known = {*PLATFORMS, *_plugins()}
  place = f"environment variable JAX_PLATFORMS={value}"
  for name in names:
    if name.lower() not in known:
      raise UserError(
        f"{place}: unknown platform {name!r}{did_you_mean(name, PLATFORMS)}\n  fix: unset it, or set it to cpu, cuda or tpu"
      )
    platform = {"gpu": "cuda"}.get(name.lower(), name.lower())
    if name.lower() == "gpu" and _installed("rocm"):
      continue
    if platform in ACCELERATORS and not _installed(platform):
      raise UserError(
        f"{place}: JAX is installed without support for {ACCELERATORS[platform]}\n  fix: {install(platform)}, or unset it"
      )
    if platform == "cuda" and find_device(platform) is None:
      hidden = "CUDA_VISIBLE_DEVICES hides it" if "CUDA_VISIBLE_DEVICES" in os.environ else "nvidia-smi should show it"
      raise UserError(f"{place}: no NVIDIA GPU was found ({hidden})\n  fix: unset it to run on the CPU")
    if platform in ("rocm", "metal") and not _installed(platform):
      raise UserError(
        f"{place}: JAX is installed without a plugin for {platform}\n  fix: unset it, or set it to cpu, cuda or tpu"
      )


def _plugins() -> set[str]:
  found = {point.name for point in importlib.metadata.entry_points(group="jax_plugins")}
  if (package := importlib.util.find_spec("jax_plugins")) is not None:
    found |= {module.name for module in pkgutil.iter_modules(package.submodule_search_locations)}
  return {name.lower() for name in found}


def _check_flags(value: str) -> None:
  flags = [word for word in value.split() if word.startswith("--")]
  library = _xla_library()
  if not flags or library is None:  # without '--' the value is the name of a file, which XLA reads and checks
    return
  with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
    for flag in flags:
      name = re.split("=", flag[2:])[0]
      # The library contains the name of a flag as a C string. Another string of the library also passes this check; XLA then
      # aborts with its own message, which names the variable.
      if text.find(b"\0" + name.encode() + b"\0") < 0:
        raise UserError(
          f"environment variable XLA_FLAGS: the installed XLA has no flag --{name}"
          "\n  fix: remove it; flags of TPU programs belong in LIBTPU_INIT_ARGS"
        )


def _xla_library() -> Path | None:
  package = importlib.util.find_spec("jaxlib")
  for folder in (package.submodule_search_locations or ()) if package else ():
    library = Path(folder, "libjax_common.so")
    if library.is_file():
      return library
  return None
