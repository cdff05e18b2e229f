"""Writes the arrays of a run's checkpoints with orbax, or with ``zarr_arrays`` for s3://."""

import functools
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxtext_like.abandoned_threads import abandon
from maxtext_like.checkpoint.store import stored_state, zarr_arrays
from maxtext_like.sharding import host_memory, processes
from maxtext_like.storage import Place

# TensorStore writes a data file with one thread. Orbax makes files of 2 GB on a disk, with which a state of a few GB would use
# few cores. Files must not be too small either: the part of an array on one device is split into chunks no larger than a file.
_FILES = 64  # data files of a save by one process, if their size is within the limits
_LEAST_BYTES, _MOST_BYTES = 128 << 20, 2 << 30


class ArrayWriter:
  """Writes states one after the other. Each save has two phases: a copy that reads the state, and the slow write.

  Args:
    seconds: how long processes wait for each other.
  """

  def __init__(self, seconds: float):
    self._seconds = seconds
    self._inner: Any = None
    self._threads_before: set[threading.Thread] = set()

  def begin(self) -> None:
    """Call before a save. Records the threads that exist, so that ``give_up`` finds those of the save."""
    self._threads_before = {*threading.enumerate()}

  def save(self, path: Path | Place, flat: dict[str, Any], number: int) -> None:
    """Starts a save; afterwards the arrays may be changed. Raises the errors of orbax or TensorStore.

    Args:
      path: folder of the arrays.
      flat: arrays by name.
      number: number of the save, counted in this process.
    """
    if isinstance(path, Place) and zarr_arrays.uses_zarr(path):
      self._inner = self._inner or zarr_arrays.Writer(self._seconds)
      self._inner.save(path, flat)
      return
    import orbax.checkpoint as ocp

    if self._inner is None:
      # Compression saves 8 % on weights and doubles the time. Without it the size on the disk is known in advance.
      # Each checkpointer has its own barrier names: after a failed save, only some processes may have passed the old ones.
      # With explicit processes orbax uses barriers of the coordinator, which can be abandoned, instead of device collectives.
      alone = processes.count() == 1
      options = ocp.options.MultiprocessingOptions(
        active_processes=None if alone else set(range(processes.count())),
        barrier_sync_key_prefix=None if alone else f"from-save-{number}",
      )
      # Arrays in pinned host memory leave no space there for orbax's own transfers.
      pinned = False if any(map(host_memory.is_on_host, flat.values())) else None
      handler = ocp.PyTreeCheckpointHandler(
        use_zarr3=True, use_compression=False, multiprocessing_options=options, enable_pinned_host_transfer=pinned
      )
      self._inner = ocp.AsyncCheckpointer(handler, multiprocessing_options=options)
      logging.getLogger("absl").addFilter(drop_reported)
      logging.getLogger("asyncio").addFilter(drop_unread)
      hide_calls_into_closed_loops()
    size = file_bytes(flat) if isinstance(path, Path) else None  # None: orbax knows what suits an object store
    arguments = ocp.args.PyTreeSave(host_memory.to_numpy(flat), ocdbt_target_data_file_size=size)
    self._inner.save(stored_state.for_orbax(path), args=arguments)

  def wait_until_finished(self) -> None:
    """Waits for the slow phase. Raises the errors of orbax or TensorStore."""
    self._inner.wait_until_finished()

  def give_up(self) -> None:
    """Abandons a failed save: the next save gets a new writer, and nothing waits for the threads of this one.

    Orbax waits minutes for the part that failed, and the interpreter would wait for its threads at exit.
    """
    self._inner = None
    own = (thread for thread in threading.enumerate() if not thread.daemon and thread not in self._threads_before)
    abandon(own, calls_back=True)

  def close(self) -> None:
    """Closes the writer."""
    if self._inner is not None:
      self._inner.close()
      self._inner = None


def file_bytes(flat: dict[str, Any]) -> int:
  """Returns the size of data files for a save of these arrays by this process."""
  own = sum(shard.data.nbytes for x in flat.values() for shard in x.addressable_shards if shard.replica_id == 0)
  return min(max(own // _FILES, _LEAST_BYTES), _MOST_BYTES)


_REPORTED = (
  "Handler Commit operations or",
  "_SignalingThread.run() raised",
  "Failed to write metadata=",
  "Failed to update metadata=",
)


def drop_reported(entry: logging.LogRecord) -> bool:
  """Logging filter that drops orbax's tracebacks of a failed asynchronous save; the manager reports the failure in one line."""
  return not any(part in str(entry.msg) for part in _REPORTED)


def drop_unread(entry: logging.LogRecord) -> bool:
  """Logging filter that drops asyncio's tracebacks of orbax's writes that fail after the first failed write of a save.

  Orbax reads only the first error. asyncio prints the others when it collects their tasks.
  """
  text = str(entry.msg)
  return not (text.startswith("Task exception was never retrieved") and "/orbax/checkpoint/" in text)


@functools.cache
def hide_calls_into_closed_loops() -> None:
  """Installs ``without_calls_into_closed_loops`` as ``sys.unraisablehook``, once per process."""
  sys.unraisablehook = without_calls_into_closed_loops(sys.unraisablehook)


def without_calls_into_closed_loops(hook: Callable[[Any], object]) -> Callable[[Any], object]:
  """Returns an unraisable-exception hook that drops TensorStore's errors after a failed save.

  When one array cannot be written, orbax closes its event loop while TensorStore still writes the others. Each finished write
  then calls the closed loop, and Python prints a traceback for each. The failed save has already been reported in one line.

  Args:
    hook: called with every other exception.
  """

  def filtered(unraisable: Any) -> None:
    error, trace = unraisable.exc_value, unraisable.exc_traceback
    from_native_code = trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
    if not (from_native_code and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
      hook(unraisable)

  return filtered
