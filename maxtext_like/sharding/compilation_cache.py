"""JAX's persistent compilation cache: compiled programs are reused by later processes."""

import functools
import logging
import os
import threading
from typing import Any

import jax

from maxtext_like.sharding import processes

_log = logging.getLogger(__name__)


def use_compilation_cache(directory: str | None) -> None:
  """Keeps compiled programs in ``directory`` for later runs. None disables the cache."""
  if directory is None:
    jax.config.update("jax_enable_compilation_cache", False)
    return
  path = os.path.expanduser(directory)
  try:
    os.makedirs(path, exist_ok=True)
  except OSError as error:
    _log.warning("compilation_cache_dir %s: %s; compiled programs are not cached", directory, error.strerror)
    jax.config.update("jax_enable_compilation_cache", False)
    return
  jax.config.update("jax_compilation_cache_dir", path)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
  if processes.count() > 1 and jax.default_backend() == "cpu":
    _let_every_process_write()


def _let_every_process_write() -> None:
  """Lets every process write its compiled programs to the cache.

  JAX lets only process 0 write. That is right on GPUs and TPUs, where all processes look up a program under the same key. On
  CPUs the key differs between processes, so the others would find nothing and compile again at every start.
  """
  from jax._src import compiler, distributed  # JAX has no public option for this

  write, state, lock = compiler._cache_write, distributed.global_state, threading.Lock()
  if hasattr(write, "__wrapped__"):
    return

  @functools.wraps(write)
  def write_as_process_0(*args: Any) -> None:
    with lock:
      number, state.process_id = state.process_id, 0
      try:
        write(*args)
      finally:
        state.process_id = number

  compiler._cache_write = write_as_process_0
