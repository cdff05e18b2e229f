"""Who writes the arrays of a run's checkpoints, one state after the other: orbax, or in s3:// ``zarr_arrays``."""

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
  """Each save has two parts: one that takes the state's memory, and one that takes long.

  Args:
    seconds: how long processes wait for each other.
  """

  def __init__(self, seconds: float):
    self._seconds = seconds
    self._inner: Any = None
    self._threads_before: set[threading.Thread] = set()

  def begin(self) -> None:
    """Before anything of a save: the threads that there are now are not its own."""
    self._threads_before = {*threading.enumerate()}

  def save(self, path: Path | Place, flat: dict[str, Any], number: int) -> None:
    """Takes what it writes; the arrays may be changed then. Raises whatever orbax or TensorStore do.

    Args:
      path: of the arrays.
      flat: arrays by name.
      number: of the save, among those of this process.
    """
    if isinstance(path, Place) and zarr_arrays.are_for(path):
      self._inner = self._inner or zarr_arrays.Writer(self._seconds)
      self._inner.save(path, flat)
      return
    import orbax.checkpoint as ocp

    if self._inner is None:
      # Compression gains 8 % on weights and doubles the time; without it the size on the disk is known beforehand.
      # Names of barriers are this checkpointer's own, as those of one that failed may have been passed by some processes only;
      # and with processes that are named they are the coordinator's, which can be left, and no collectives of devices.
      alone = processes.count() == 1
      options = ocp.options.MultiprocessingOptions(
        active_processes=None if alone else set(range(processes.count())),
        barrier_sync_key_prefix=None if alone else f"from-save-{number}",
      )
      # What lies in pinned memory leaves no room there for what orbax would bring to it.
      pinned = False if any(map(host_memory.lies_there, flat.values())) else None
      handler = ocp.PyTreeCheckpointHandler(
        use_zarr3=True, use_compression=False, multiprocessing_options=options, enable_pinned_host_transfer=pinned
      )
      self._inner = ocp.AsyncCheckpointer(handler, multiprocessing_options=options)
      logging.getLogger("absl").addFilter(told_by_us)
      hide_calls_into_closed_loops()
    self._inner.save(restore.for_orbax(path), args=ocp.args.PyTreeSave(host_memory.copied(flat)))

  def wait_until_finished(self) -> None:
    """The long part. Raises whatever orbax or TensorStore do."""
    self._inner.wait_until_finished()

  def give_up(self) -> None:
    """After a save that failed: the next one has a new writer, and nobody waits for the threads of this one.

    Orbax's wait minutes for the part that failed, and the interpreter would wait for them.
    """
    self._inner = None
    own = (thread for thread in threading.enumerate() if not thread.daemon and thread not in self._threads_before)
    leave_behind(own, calls_back=True)

  def close(self) -> None:
    """Ends its use."""
    if self._inner is not None:
      self._inner.close()
      self._inner = None
