"""Writes one step of a run at a time: disk space, arrays, hashes, manifest, rename, and removal of old steps.

``manager`` decides when to save and what to do after a failure; this module carries a save out.
"""

import dataclasses
import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from maxtext_like.atomic import Fence
from maxtext_like.checkpoint.store import manifest, sidecar_files
from maxtext_like.checkpoint.store.array_writer import ArrayWriter
from maxtext_like.checkpoint.store.best_steps import record_best, recorded_best
from maxtext_like.checkpoint.store.mirror import Mirror
from maxtext_like.checkpoint.store.remote_steps import RemoteSteps
from maxtext_like.checkpoint.store.steps import StepDirectories
from maxtext_like.checkpoint.store.stored_state import free_bytes
from maxtext_like.errors import RefusedCredentialsError, RetryableError
from maxtext_like.sharding import processes
from maxtext_like.storage import Place, is_first_report, refusal

_log = logging.getLogger(__name__)
_REFUSED = "refused: "  # marks refused credentials among the reasons that processes exchange
_REPORTED = 1.0  # GB; the speed of a smaller save is not reported

Watch = Callable[[str, str], AbstractContextManager[None]]
"""(kind, description) -> context that limits the duration of a save."""


@dataclasses.dataclass
class Statistics:
  """Number, outcome and cost of the saves of a run. Times are wall-clock seconds."""

  saved: int = 0
  skipped_busy: int = 0
  refused_nonfinite: int = 0
  failures: int = 0
  blocked_seconds: float = 0.0
  write_seconds: float = 0.0
  hash_seconds: float = 0.0


@dataclasses.dataclass
class PendingSave:
  """A save in progress. Its thread fills in the outcome.

  Attributes:
    step: number of the step.
    needed_bytes: bytes of its arrays and tokenizer.
    best: step with the lowest evaluation loss, and that loss; None if there is none.
    error: why the save failed.
    blocked_seconds: time until the arrays could be changed again.
    write_seconds, hash_seconds: time until the arrays were written, and for the rest.
    thread: the thread of the save.
  """

  step: int
  needed_bytes: int
  best: tuple[int, float] | None = None
  error: BaseException | None = None
  blocked_seconds: float = 0.0
  write_seconds: float = 0.0
  hash_seconds: float = 0.0
  thread: threading.Thread = dataclasses.field(default_factory=threading.Thread)


class StepWriter:
  """Writes steps one after the other.

  With several processes, every process calls the same methods in the same order.

  Args:
    steps: the steps of the run.
    fence: as for ``CheckpointManager``.
    tokenizer: files stored with every step, by name.
    complete: called with the step after it is complete and renamed, by the thread of the save.
    watch: limits the duration of a save.
    mirror: second location of the steps, if any.
    max_to_keep: number of complete steps to keep; None keeps all.
    peers_seconds: how long the processes of a run wait for each other.
  """

  def __init__(
    self,
    steps: StepDirectories | RemoteSteps,
    *,
    fence: Fence,
    tokenizer: dict[str, bytes],
    complete: Callable[[int], None],
    watch: Watch,
    mirror: Mirror | None,
    max_to_keep: int | None,
    peers_seconds: float,
  ):
    self._steps, self._fence, self._tokenizer = steps, fence, tokenizer
    self._complete, self._watch, self._mirror = complete, watch, mirror
    self._max_to_keep, self._peers_seconds = max_to_keep, peers_seconds
    self._arrays = ArrayWriter(peers_seconds)
    self._saves = 0

  def start(self, pending: PendingSave, record: manifest.Manifest, flat: dict[str, Any], begin: float) -> None:
    """Starts a save. Returns as soon as the arrays may be changed or donated.

    The thread of ``pending`` then completes the step. If ``pending.error`` is set, the save failed at once and the thread was
    not started.

    Args:
      pending: the save.
      record: its manifest without ``files``.
      flat: arrays by name.
      begin: ``time.monotonic()`` at the start of the save.
    """
    step = pending.step
    pending.thread = threading.Thread(target=self._finish, args=(pending, record, begin), name=f"checkpoint-{step}")
    self._saves += 1
    self._arrays.begin()
    try:
      with self._watch("save", f"the save of step {step}"):
        if problem := processes.from_primary(lambda: self._prepare(step, pending.needed_bytes), self._peers_seconds):
          raise OSError(*problem)
        path = self._steps.saving(step, self._saves) / manifest.STATE_NAME
        self._with_others(pending, lambda: self._arrays.save(path, flat, self._saves))
    except Exception as error:  # orbax raises bare Exceptions
      pending.error = error
    else:
      pending.blocked_seconds = time.monotonic() - begin
      pending.thread.start()

  def _prepare(self, step: int, needed_bytes: int) -> tuple[int, str] | None:
    """Creates the directory of a save. Returns (errno, reason) if that fails, else None."""
    free = free_bytes(self._steps.directory)
    if free is not None and free < needed_bytes:  # a full disk would also break the other files of the run
      return errno.ENOSPC, "not started: not enough free disk space"
    try:
      self._steps.prepare(step, self._saves)
    except OSError as error:
      return error.errno or errno.EIO, error.strerror or str(error)
    return None

  def _finish(self, pending: PendingSave, record: manifest.Manifest, begin: float) -> None:
    """Body of the thread of a save. Afterwards the step is complete and renamed, or ``pending.error`` holds the reason."""
    turn = f"save-{self._saves}"
    try:
      with self._watch("save", f"the save of step {pending.step}"):
        # Every process waits for its own shards. Then process 0 completes the step, and all processes confirm it.
        self._with_others(pending, self._arrays.wait_until_finished)
        written = time.monotonic()
        if processes.primary():
          self._with_others(pending, lambda: self._publish(pending.step, record), alone=True)
        said = processes.everyone("", self._peers_seconds, turn)
        if any(said):
          self._raise_refused(said)
          raise RetryableError("; ".join(f"{processes.name_of(i)}: {why}" for i, why in enumerate(said) if why))
        pending.write_seconds, pending.hash_seconds = written - begin, time.monotonic() - written
        if (size := pending.needed_bytes / 1e9) >= _REPORTED:
          _log.info(
            "checkpoint of step %d: %.1f GB written in %.1f s, %.2f GB/s, and hashed in %.1f s; training waited %.2f s",
            pending.step, size, pending.write_seconds, size / pending.write_seconds, pending.hash_seconds,
            pending.blocked_seconds,
          )  # fmt: skip
    except BaseException as error:
      pending.error = error
      return
    if not processes.primary():
      return
    try:
      # The step is complete. Record the best step, start the copy to the mirror and remove old steps.
      with self._watch("save", "the removal of old checkpoints"):
        self._clean_up(pending)
    except OSError as error:  # the new step is complete; leftovers of an old one are removed at the next start
      if is_first_report(error):
        _log.warning("%s: cannot remove old checkpoints: %s", self._steps.directory, reason(error))

  def _publish(self, step: int, record: manifest.Manifest) -> None:
    """Completes a step whose arrays are written: adds the tokenizer, hashes and manifest, and renames it."""
    sidecar_files.write(self._steps.saving(step, self._saves), self._tokenizer)
    self._steps.publish(step, self._saves, record)
    self._complete(step)

  def _clean_up(self, pending: PendingSave) -> None:
    """Records the best step, offers the new step to the mirror, and removes old steps except those still needed."""
    best, directory = pending.best, self._steps.directory
    spare = set() if best is None else {best[0]}
    try:
      if best is not None and recorded_best(directory) != best[0] and self._steps.has(best[0]):
        record_best(directory, *best, self._fence)
    finally:  # the mirror reads which step is recorded as the best
      if self._mirror is not None and isinstance(self._steps, StepDirectories):
        self._mirror.offer(self._steps.path(pending.step))
        spare |= self._mirror.needed
    self._steps.drop_old(self._max_to_keep, spare)

  def _with_others(self, pending: PendingSave, do: Callable[[], None], *, alone: bool = False) -> None:
    """Runs a part of a save that may fail. If it fails in one process, every process logs the error and raises.

    Args:
      pending: the save.
      do: the part of the save.
      alone: True if ``do`` does not wait for the other processes.
    """
    try:
      do() if alone else processes.together(do, f"failed-save-{self._saves}")
    except Exception as error:
      why = self._why(error)
      if processes.count() > 1 and not why.startswith(_REFUSED):
        _log.error("checkpoint of step %d failed in %s: %s", pending.step, processes.name_of(processes.index()), why)
      self._raise_refused(processes.everyone(why, self._peers_seconds, f"save-{self._saves}"))
      raise

  def _why(self, error: Exception) -> str:
    """Returns an error in one line. It begins with ``_REFUSED`` if the store refused the credentials."""
    refused = refusal(error, str(self._steps.directory)) if isinstance(self._steps.directory, Place) else None
    return f"{_REFUSED}{refused.strerror}" if refused is not None else reason(error)

  def _raise_refused(self, said: list[str]) -> None:
    """Raises if the credentials of any process were refused: every process must come to the same decision.

    Args:
      said: the result of ``_why`` in every process, "" for success.

    Raises:
      RefusedCredentialsError: names the processes if there are several.
    """
    refused = {i: why.removeprefix(_REFUSED) for i, why in enumerate(said) if why.startswith(_REFUSED)}
    if refused:
      alone = len(said) == 1
      raise RefusedCredentialsError("; ".join(why if alone else f"{processes.name_of(i)}: {why}" for i, why in refused.items()))

  def discard(self, step: int) -> None:
    """Removes the files of a failed save, and abandons its threads."""
    if processes.primary():  # no barrier: process 0 also creates the directory again when the save is retried
      self._steps.discard(step, self._saves)
    self._arrays.give_up()

  def close(self) -> None:
    """Closes the writer of the arrays."""
    self._arrays.close()


def reason(error: Exception) -> str:
  """Returns an error in one line. Of a long TensorStore message it keeps only the reason of the operating system."""
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  said = re.search(r"os_error_code='(\d+)'", str(error))
  if said:
    return os.strerror(int(said[1]))
  return re.sub(r" \[\w+='.*", "", " ".join(str(error).split()))[:300] or type(error).__name__
