"""The checkpoints of a run: asynchronous verified saves, retries after failures, and restoring the newest valid step.

Orbax writes the arrays (``array_writer``), or ``zarr_arrays`` for s3://. This package decides whether a step exists, because
orbax hides the errors of asynchronous saves, lists steps that do not exist and keeps no checksums. Layout of a checkpoint
directory::

  120/state/             the arrays, written by orbax
  120/COMPLETE.json      the manifest; a step without it is not a checkpoint
  130.saving-5f0c9a21/   a step that is being written; it is renamed to its number after its manifest is written
  110.corrupt/           a step whose files no longer match their hashes
  100.incomplete/        a step whose manifest was lost
  90.abandoned/          a step that the run discarded when it went back to an earlier step

Each save has a thread that waits for orbax, flushes and hashes the files, writes the manifest, renames the step and removes old
steps. The training loop calls ``poll`` at every step, which raises the error of a failed save.

With several processes, each process writes and reads its own shards in one shared directory. Process 0 does everything else,
and a step is complete only if every process confirms it. Decisions that depend on time are then made at the next save instead
of in between, so that all processes decide alike.
"""

import atexit
import contextlib
import logging
import os
import secrets
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxtext_like.atomic import Fence
from maxtext_like.checkpoint.store import manifest, stored_state
from maxtext_like.checkpoint.store.mirror import Mirror
from maxtext_like.checkpoint.store.step_writer import PendingSave, Statistics, StepWriter, Watch, reason
from maxtext_like.checkpoint.store.steps import StepDirectories
from maxtext_like.checkpoint.store.stored_state import free_bytes, megabytes, require_disk_space
from maxtext_like.checkpoint.weight_sources import open_steps, readable_step
from maxtext_like.errors import RefusedCredentialsError, RetryableError, UserError
from maxtext_like.sharding import processes
from maxtext_like.storage import Place, failed, refusal, renewal

_log = logging.getLogger(__name__)


class CheckpointManager:
  """Saves and restores the steps of one run. Use it as a context manager: on exit it waits for the save in progress.

  Args:
    directory: directory of the steps, created if missing; it may be in gs:// or s3://. The caller holds the run's lock.
    config: configuration of this run (dataclass or mapping of sections), stored with each step and compared on restore.
    interval: steps between two saves, for ``due``.
    max_to_keep: number of complete steps to keep; None keeps all.
    asynchronous: save in the background; False waits for every save.
    attempts: number of consecutive failed saves after which the run ends with a RetryableError. If a store refuses the
      credentials, the first failed save ends the run.
    backoff_seconds: wait after the first failure; it doubles with each further failure.
    patience_seconds: how long a save waits for the previous one before it is skipped. This is enough for a small state, so
      that small runs always have the same checkpoints, and negligible compared with the minutes that a large state takes.
    tokenizer: files stored with every step, by name (``sidecar_files.of_tokenizer``).
    fence: context entered around every rename and removal in ``directory``; it raises, or never returns, if another process
      has taken over the directory.
    saved: called with the step after it is complete and renamed, by the thread of the save.
    watch: (kind, description) -> context that limits the duration of a save; entered by the thread that waits for the disk.
    mirror: second location to which every complete step is copied, and from which a damaged step is replaced.
    mirror_seconds: how long ``close`` waits for the last copy to the mirror.
    peers_seconds: how long the processes of a run wait for each other in a save or a restore.

  Raises:
    UserError: the directory cannot be created or read, or contains a step whose name differs from its manifest.
    ValueError: an argument is out of range.
  """

  def __init__(
    self,
    directory: Path | Place | str,
    *,
    config: Any = None,
    interval: int = 1,
    max_to_keep: int | None = 3,
    asynchronous: bool = True,
    attempts: int = 3,
    backoff_seconds: float = 1.0,
    patience_seconds: float = 2.0,
    tokenizer: dict[str, bytes] | None = None,
    fence: Fence = contextlib.nullcontext,
    saved: Callable[[int], None] = lambda step: None,
    watch: Watch = lambda kind, what: contextlib.nullcontext(),
    mirror: Mirror | None = None,
    mirror_seconds: float = 60.0,
    peers_seconds: float = 3600.0,
  ):
    if max_to_keep is not None and max_to_keep < 1:
      raise ValueError(f"max_to_keep is {max_to_keep}; it must be at least 1, or None to keep all checkpoints")
    if interval < 1 or attempts < 1:
      raise ValueError(f"interval is {interval} and attempts is {attempts}; both must be at least 1")
    self.directory = directory if isinstance(directory, Place) else Path(os.path.abspath(directory))
    self._alone, self._peers_seconds = processes.count() == 1, peers_seconds
    token = processes.from_primary(lambda: secrets.token_hex(4), peers_seconds)
    self._steps = open_steps(self.directory, fence, token)
    self._saved, self._watch = saved, watch
    self.config = manifest.record({} if config is None else config)
    self.statistics = Statistics()
    self._interval = interval
    self._max_to_keep = max_to_keep
    self._asynchronous = asynchronous
    self._attempts = attempts
    self._backoff_seconds = backoff_seconds
    self._patience_seconds = patience_seconds
    self._tokenizer = tokenizer or {}
    self._writer = StepWriter(
      self._steps, fence=fence, tokenizer=self._tokenizer, complete=self._note_complete, watch=watch, mirror=mirror,
      max_to_keep=max_to_keep, peers_seconds=peers_seconds,
    )  # fmt: skip
    self._consecutive_failures = 0
    self._retry_at: float | None = None
    self._pending: PendingSave | None = None
    self._mirror, self._mirror_seconds = mirror, mirror_seconds
    self._newest_known: int | None = None
    self._started = False  # True once a step was restored or a save was started
    self._run = processes.from_primary(self._open, peers_seconds)
    atexit.register(self._at_exit)

  def _open(self) -> str:
    """Creates the directory, or cleans up after interrupted saves. Returns the random id of the run, stored in manifests."""
    try:
      self._steps.make()
    except OSError as error:
      if isinstance(self.directory, Place):
        raise failed(error, writes=True) from error
      raise UserError(
        f"checkpoint directory {self.directory}: {error.strerror}", fix="set output_dir to a directory that can be written"
      ) from error
    newest = self._newest_known = self.latest_complete()
    if self._mirror is not None and isinstance(self._steps, StepDirectories) and newest is not None:
      self._mirror.offer(self._steps.path(newest))  # the last run may have ended before the copy was complete
    return (newest is not None and manifest.read(self._steps.path(newest)).run) or uuid.uuid4().hex

  def __enter__(self) -> "CheckpointManager":
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    if error is None:
      self.close()
      return
    # The error that ends the run must stay visible, so the failure of a save is only logged here.
    self._join()
    self._tell(self._settle())
    self._shut()

  def complete_steps(self) -> list[int]:
    """Returns the steps whose manifest is intact and whose files have the right sizes, oldest first. Reads no arrays."""
    try:
      return self._steps.complete()
    except OSError as error:
      if isinstance(self.directory, Place):
        raise self._failed(error) from error
      if isinstance(error, FileNotFoundError | NotADirectoryError):
        what = "the directory was removed during the run, or its disk is not mounted"
        raise RetryableError(f"checkpoint directory {self.directory}: {what}; restore it and run the same command") from error
      raise

  def latest_complete(self) -> int | None:
    """Returns the newest complete step, or None. ``restore`` also checks the hashes."""
    return max(self.complete_steps(), default=None)

  def newest_before(self, step: int) -> int | None:
    """Returns the newest complete step before ``step``, or None. Waits for the save in progress.

    Steps at the regular interval are preferred to a step that was saved when the run was stopped.

    Raises:
      RetryableError: as ``poll``.
    """
    self.wait()
    before = processes.from_primary(lambda: [s for s in self.complete_steps() if s < step], self._peers_seconds)
    return max([s for s in before if s % self._interval == 0] or before, default=None)

  def preflight(self, state: Any) -> None:
    """Compares the size of a state (arrays or shapes) with the free disk space, before anything is compiled.

    During every save ``max_to_keep`` + 1 checkpoints exist. Too little space for these logs a warning.

    Raises:
      UserError: not even one more checkpoint fits.
    """
    if isinstance(self.directory, Place):
      return
    size = stored_state.total_bytes(stored_state.flatten(state))
    require_disk_space(self.directory, size, existing=len(self.complete_steps()), kept=self._max_to_keep)

  # Saving.

  def due(self, step: int) -> bool:
    """Returns True if the state after ``step`` should be saved: at every interval, and when a failed save can be retried.

    With several processes a failed save is retried at the next interval only.
    """
    if self._retry_at is not None and self._alone:
      return time.monotonic() >= self._retry_at
    return step % self._interval == 0

  @property
  def busy(self) -> bool:
    """True while a save is being written."""
    return self._pending is not None and self._pending.thread.is_alive()

  def save(
    self,
    step: int,
    state: Any,
    extra: dict[str, Any] | None = None,
    *,
    finite: Any = True,
    best: tuple[int, float] | None = None,
  ) -> bool:
    """Starts to save ``state``. Returns as soon as the arrays may be changed or donated.

    Args:
      step: number of finished training steps.
      state: nested dicts, optax states and None over arrays.
      extra: JSON values stored with the step, such as the position in the data and the tokenizer version.
      finite: bool or boolean scalar array from the compiled step: True if every array of the state is finite.
      best: step with the lowest evaluation loss, and that loss. The step is recorded in ``best.json`` and never removed.

    Returns:
      True if a save was started, or if the step is already saved. False if the state is not finite, the previous save is still
      being written, or this save failed at once. Each case is logged and counted in ``statistics``.

    Raises:
      RetryableError: the last ``attempts`` saves failed.
      ValueError: ``extra`` is not JSON or a leaf is not an array.
    """
    # Settle the previous save first: its failure may end the run, and while it is being written this one is skipped.
    begin, self._started = time.monotonic(), True
    self._join(self._patience_seconds if self._alone else None)
    self._take_note()
    if not bool(finite):
      self.statistics.refused_nonfinite += 1
      _log.error("checkpoint of step %d refused: the state is not finite; step %s is kept", step, self._kept())
      return False
    if self._pending is not None:
      self.statistics.skipped_busy += 1
      _log.warning(
        "checkpoint of step %d skipped: step %d is still being written (%d skipped so far); raise checkpoint_interval",
        step,
        self._pending.step,
        self.statistics.skipped_busy,
      )
      return False
    if processes.from_primary(lambda: self._is_saved(step), self._peers_seconds):
      return True

    # Describe the state, and start writing. The thread completes the step after the arrays are written.
    flat = stored_state.flatten(state)
    record = manifest.Manifest(
      step=step,
      finite=True,
      config=self.config,
      extra=manifest.record(extra or {}),
      leaves=stored_state.describe(flat),
      files={},
      versions=manifest.versions(),
      run=self._run,
    )
    needed_bytes = stored_state.total_bytes(flat) + sum(map(len, self._tokenizer.values()))
    pending = self._pending = PendingSave(step, needed_bytes, best=best)
    self._writer.start(pending, record, flat, begin)
    self.statistics.blocked_seconds += time.monotonic() - begin
    if not self._asynchronous:
      self._join()
    if pending.error is not None:
      self._take_note()
      return False
    return True

  # The training loop must not wait for a remote store, so these two use the step that this process saved last.

  def _is_saved(self, step: int) -> bool:
    return step == self._newest_known if isinstance(self.directory, Place) else step in self.complete_steps()

  def _kept(self) -> int | None:
    return self._newest_known if isinstance(self.directory, Place) else self.latest_complete()

  def _note_complete(self, step: int) -> None:
    self._newest_known = step
    self._saved(step)

  def poll(self) -> None:
    """Checks the save in progress without waiting. Call it at every step.

    Raises:
      RetryableError: the last ``attempts`` saves failed; the message gives the path and the free and needed bytes.
    """
    if self._alone:
      self._take_note()

  def _take_note(self) -> None:
    if self.busy:
      return
    error = self._settle()
    if isinstance(error, RefusedCredentialsError):
      raise error
    if error is not None and self._consecutive_failures >= self._attempts:
      self._retry_at = None
      raise RetryableError(f"{error}; {self._remedy}, and run the same command again")
    self._tell(error)

  @property
  def _remedy(self) -> str:
    return "check that the store is reachable" if isinstance(self.directory, Place) else "free disk space or repair the disk"

  def _failed(self, error: OSError) -> UserError | RetryableError:
    """Returns the exception to raise for an error of the store: as at a start, or for a run that has started."""
    refused = refusal(error, str(self.directory)) if self._started else None
    return failed(error, writes=True) if refused is None else self._refused(f"{refused.filename}: {refused.strerror}")

  def _refused(self, what: str) -> RefusedCredentialsError:
    fix = f"{renewal(str(self.directory))}, and run the same command again"
    return RefusedCredentialsError(f"{what}; {self._what_is_kept()}\n  fix: {fix}")

  def _what_is_kept(self) -> str:
    kept = self._kept()
    return "there is no earlier step" if kept is None else f"step {kept} is kept"

  def _settle(self) -> RetryableError | None:
    """Records the outcome of a finished save. Returns the error of a failed one, else None."""
    pending, self._pending = self._pending, None
    if pending is None:
      return None
    if pending.error is None:
      self.statistics.saved += 1
      self.statistics.write_seconds += pending.write_seconds
      self.statistics.hash_seconds += pending.hash_seconds
      self._consecutive_failures, self._retry_at = 0, None
      return None
    if not isinstance(pending.error, Exception):
      raise pending.error
    self.statistics.failures += 1
    self._consecutive_failures += 1
    delay = self._backoff_seconds * 2 ** (self._consecutive_failures - 1)
    self._retry_at = time.monotonic() + delay
    free = free_bytes(self.directory)  # measured before the partial step is removed
    self._writer.discard(pending.step)
    path = self._steps.path(pending.step)
    if isinstance(pending.error, RefusedCredentialsError):
      self._retry_at = None
      return self._refused(f"{path}: the checkpoint cannot be saved: {pending.error}")
    room = "" if isinstance(self.directory, Place) else f", {megabytes(free) if free is not None else 'unknown'} free"
    last = self._consecutive_failures >= self._attempts
    return RetryableError(
      f"checkpoint of step {pending.step} failed ({self._consecutive_failures} of {self._attempts}): {path}: "
      f"needs {megabytes(pending.needed_bytes)}{room}: {reason(pending.error)}; {self._what_is_kept()}"
      + ("" if last else f"; retrying in {delay:.0f} s")
    )

  def _tell(self, error: RetryableError | None) -> None:
    if error is not None:
      _log.error("%s", error)

  def _join(self, timeout: float | None = None) -> None:
    if self._pending is not None and self._pending.thread.ident is not None:
      with self._watch("save", f"the wait for the save of step {self._pending.step}"):
        self._pending.thread.join(timeout)

  def wait(self) -> bool:
    """Waits for the save in progress. Returns True if there was none or it succeeded.

    Raises:
      RetryableError: as ``poll``.
    """
    failures = self.statistics.failures
    self._join()
    self._take_note()
    return self.statistics.failures == failures

  def save_and_wait(
    self,
    step: int,
    state: Any,
    extra: dict[str, Any] | None = None,
    *,
    finite: Any = True,
    best: tuple[int, float] | None = None,
  ) -> bool:
    """Saves at the end of a run: waits, retries with backoff, and returns only when the step is on the disk.

    Returns:
      True if the step is saved; False if the state is not finite and was therefore refused.

    Raises:
      RetryableError: the save failed ``attempts`` times.
    """
    self._join()
    error = self._settle()
    if isinstance(error, RefusedCredentialsError):
      raise error
    self._tell(error)
    self._consecutive_failures = 0
    while True:
      if not bool(finite):
        return self.save(step, state, extra, finite=False)
      if self.save(step, state, extra, best=best) and self.wait():
        return True
      if self._retry_at is not None:
        time.sleep(max(0.0, self._retry_at - time.monotonic()))

  def close(self) -> None:
    """Waits for the save in progress and closes the manager.

    Raises:
      RetryableError: the last save failed, so the newest requested step is missing.
    """
    self._join()
    error = self._settle()
    self._shut()
    if error is not None:
      raise error

  def _shut(self) -> None:
    atexit.unregister(self._at_exit)
    self._writer.close()
    if self._mirror is not None:
      self._mirror.close(self._mirror_seconds)

  def _at_exit(self) -> None:
    """Catches a program that never closed its manager: it must not exit with 0 although its last step is missing."""
    self._join()
    error = self._settle()
    if error is not None:
      self._tell(error)
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(RetryableError.exit_code)

  # Restoring.

  def restore(self, like: Any, *, step: int | None = None, allow_dtype_change: bool = False) -> stored_state.Restored | None:
    """Reads the newest valid step into the shapes, dtypes and shardings of ``like``.

    A step whose files no longer match their hashes is logged and renamed to ``N.corrupt``, and the step before it is used.

    Args:
      like: tree of ``jax.ShapeDtypeStruct`` (with shardings) of the state.
      step: the newest step to consider; None for no limit.
      allow_dtype_change: cast floats to the dtypes of ``like``, with a range check, instead of refusing.

    Returns:
      The restored state, or None if there is no checkpoint at all.

    Raises:
      UserError: all steps are corrupt, the newest has another model or other arrays, or a step has another step's name.
    """
    wanted = stored_state.flatten(like)
    same = {"config": self.config or None, "allow_dtype_change": allow_dtype_change, "resumes": True}
    choose = lambda: stored_state.newest_valid(
      self._steps, lambda p, m: stored_state.check(p, m, wanted, **same), self._copied_back, step
    )
    try:
      number = processes.from_primary(choose, self._peers_seconds)
      if number is None:
        return None
      self._newest_known = number
      path = readable_step(self._steps.path(number))
      stored = manifest.read(path)
    except OSError as error:
      raise self._failed(error) from error
    try:
      state = stored_state.read(path, stored, like)
    except PermissionError as error:
      raise self._failed(error) from error
    self._started = True
    return stored_state.Restored(number, state, stored.extra, stored.config, path)

  def abandon_after(self, step: int) -> None:
    """Discards the steps after ``step``, to which the run has gone back, here and in the mirror. No save may be in progress.

    Raises:
      RetryableError: the steps cannot be renamed. A RefusedCredentialsError if the store refused the credentials.
    """
    processes.from_primary(lambda: self._abandon_after(step), self._peers_seconds)

  def _abandon_after(self, step: int) -> None:
    try:
      later = self._steps.abandon_after(step)
    except OSError as error:
      what = f"{error.filename or self.directory}: {error.strerror}"
      if isinstance(self.directory, Place) and refusal(error, str(self.directory)) is not None:
        raise self._refused(what) from error
      raise RetryableError(what) from error
    self._newest_known = step
    if later and self._mirror is not None:
      self._mirror.forget(step, self._run)

  def _copied_back(self, step: int, damage: Exception) -> bool:
    """Replaces a damaged step from the mirror. Returns True if that succeeded."""
    try:
      if self._mirror is None or not isinstance(self._steps, StepDirectories) or not self._mirror.fetch(step, self._steps):
        return False
    except (RetryableError, UserError) as error:
      _log.warning("%s", error)
      return False
    _log.error("step %d is corrupt: %s; it was restored from %s", step, damage, self._mirror)
    return True
