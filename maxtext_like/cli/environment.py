"""Judges environment variables of other programs before JAX does, which aborts, or speaks of backends."""

import importlib.metadata
import importlib.util
import mmap
import os
import pkgutil
import re
from pathlib import Path

from maxtext_like.config.problems import did_you_mean
from maxtext_like.errors import UserError

PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu", "metal", "proxy")
"""Names that JAX knows without a plugin, or whose plugin registers itself when it is imported."""


def check_environment() -> None:
  """Refuses what JAX would fail on.

  Raises:
    UserError: ``JAX_PLATFORMS`` names no platform, ``XLA_FLAGS`` holds a flag that the installed XLA does not know.
  """
  _check_platforms(os.environ.get("JAX_PLATFORMS", ""))
  _check_flags(os.environ.get("XLA_FLAGS", ""))


def backend_error(error: RuntimeError) -> UserError | None:
  """JAX's failure to start a platform as an error that names the variable; None for any other error."""
  if not str(error).startswith("Unable to initialize backend"):
    return None
  chosen = os.environ.get("JAX_PLATFORMS")
  cause = f"environment variable JAX_PLATFORMS={chosen}" if chosen else "JAX"
  return UserError(f"{cause}: {str(error).splitlines()[0]}\n  fix: unset JAX_PLATFORMS, or install what it needs")


def _check_platforms(value: str) -> None:
  names = [name.strip() for name in value.split(",") if name.strip()]
  if not names:
    return
  known = {*PLATFORMS, *_plugins()}
  for name in names:
    if name.lower() not in known:
      raise UserError(
        f"environment variable JAX_PLATFORMS={value}: no platform {name!r}{did_you_mean(name, PLATFORMS)}"
        "\n  fix: unset it, or set it to cpu, cuda or tpu"
      )


def _plugins() -> set[str]:
  found = {point.name for point in importlib.metadata.entry_points(group="jax_plugins")}
  if (package := importlib.util.find_spec("jax_plugins")) is not None:
    found |= {module.name for module in pkgutil.iter_modules(package.submodule_search_locations)}
  return {name.lower() for name in found}


def _check_flags(value: str) -> None:
  flags = [word for word in value.split() if word.startswith("--")]
  library = _xla_library()
  if not flags or library is None:  # without '--' the value names a file of flags, which XLA reads and judges
    return
  with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
    for flag in flags:
      name = re.split("=", flag[2:])[0]
      # A flag's name lies in the library as a C string. A word that lies there for another reason passes, and XLA then
      # aborts with its own message, which names the variable too.
      if text.find(b"\0" + name.encode() + b"\0") < 0:
        raise UserError(
          f"environment variable XLA_FLAGS: the installed XLA has no flag --{name}"
          "\n  fix: take it out; flags of TPU programs belong into LIBTPU_INIT_ARGS"
        )


def _xla_library() -> Path | None:
  package = importlib.util.find_spec("jaxlib")
  for folder in (package.submodule_search_locations or ()) if package else ():
    library = Path(folder, "libjax_common.so")
    if library.is_file():
      return library
  return None
