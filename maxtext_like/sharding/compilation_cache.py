"""Compiled programs that outlive their process."""

import logging
import os

import jax

_log = logging.getLogger(__name__)


def use_compilation_cache(directory: str | None) -> None:
  """Keeps compiled programs between runs in ``directory``; None: not."""
  if directory is None:
    jax.config.update("jax_enable_compilation_cache", False)
    return
  path = os.path.expanduser(directory)
  try:
    os.makedirs(path, exist_ok=True)
  except OSError as error:
    _log.warning("compilation_cache_dir %s: %s; compiled programs are not kept", directory, error.strerror)
    jax.config.update("jax_enable_compilation_cache", False)
    return
  jax.config.update("jax_compilation_cache_dir", path)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
