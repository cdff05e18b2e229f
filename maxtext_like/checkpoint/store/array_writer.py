"""Writes the arrays of a run's checkpoints with orbax, or with ``zarr_arrays`` for s3://."""

import logging
import threading
from pathlib import Path
from typing import Any

from maxtext_like.abandoned_threads import leave_behind
from maxtext_like.checkpoint.store import restore, zarr_arrays
from maxtext_like.checkpoint.store.pending_save import hide_calls_into_closed_loops, told_by_us
from maxtext_like.sharding import host_memory, processes
from maxtext_like.storage import Place


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
    if isinstance(path, Place) and zarr_arrays.are_for(path):
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
      pinned = False if any(map(host_memory.lies_there, flat.values())) else None
      handler = ocp.PyTreeCheckpointHandler(
        use_zarr3=True, use_compression=False, multiprocessing_options=options, enable_pinned_host_transfer=pinned
      )
      self._inner = ocp.AsyncCheckpointer(handler, multiprocessing_options=options)
      logging.getLogger("absl").addFilter(told_by_us)
      hide_calls_into_closed_loops()
    self._inner.save(restore.for_orbax(path), args=ocp.args.PyTreeSave(host_memory.copied(flat)))

  def wait_until_finished(self) -> None:
    """Waits for the slow phase. Raises the errors of orbax or TensorStore."""
    self._inner.wait_until_finished()

  def give_up(self) -> None:
    """Abandons a failed save: the next save gets a new writer, and nothing waits for the threads of this one.

    Orbax waits minutes for the part that failed, and the interpreter would wait for its threads at exit.
    """
    self._inner = None
    own = (thread for thread in threading.enumerate() if not thread.daemon and thread not in self._threads_before)
    leave_behind(own, calls_back=True)

  def close(self) -> None:
    """Closes the writer."""
    if self._inner is not None:
      self._inner.close()
      self._inner = None
