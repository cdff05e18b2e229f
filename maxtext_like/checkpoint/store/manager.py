"""Checkpoints of a run: asynchronous saves that count only when proved whole, and the way back to the newest one.

Orbax writes the arrays (``array_writer``; in s3:// ``zarr_arrays`` does); everything that decides whether a step exists is
ours, because orbax hides the errors of asynchronous saves, lists steps that are not there and has no checksums. Layout of a
checkpoint directory::

  120/state/             what orbax writes
  120/COMPLETE.json      our manifest; a step without it is not a checkpoint
  130.saving-5f0c9a21/   a step that is being written; it gets its number when its manifest stands
  110.corrupt/           a step that failed its hashes, set aside; 100.incomplete/ one whose manifest was lost;
                         90.abandoned/ one that the run went back past

One thread per save waits for orbax, makes the files durable, hashes them, writes the manifest, gives the step its name and
drops old steps. The training loop calls ``poll`` every step; a failed save surfaces there.

Of several processes each writes and reads its own parts of the arrays, into one directory; all else is done by process 0, and
a step is whole when all agree that it is. What depends on time is then not decided between saves but at the next one, so that
all decide the same.
"""

import atexit
import contextlib
import errno
import logging
import os
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from maxtext_like.atomic import Fence
from maxtext_like.checkpoint import compatibility
from maxtext_like.checkpoint.store import manifest, restore, sidecar_files, tree
from maxtext_like.checkpoint.store.array_writer import ArrayWriter
from maxtext_like.checkpoint.store.best_steps import name_best, named_best
from maxtext_like.checkpoint.store.disk_space import free_bytes, megabytes, require_room
from maxtext_like.checkpoint.store.mirror import Mirror
from maxtext_like.checkpoint.store.pending_save import PendingSave, Statistics, reason
from maxtext_like.checkpoint.store.steps import StepDirectories
from maxtext_like.checkpoint.store.valid_step import newest_valid
from maxtext_like.checkpoint.weight_sources import open_steps, readable_step
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.sharding import processes
from maxtext_like.storage import Place, failed

_log = logging.getLogger(__name__)


class CheckpointManager:
  """Saves and restores the steps of one run. Use it as a context manager: leaving it waits for the save under way.

  Args:
    directory: where the steps lie; made if missing; it may be in gs:// or s3://. The caller holds the run's lock.
    config: this run's configuration (dataclass or mapping of sections), stored and compared on restore.
    interval: steps between two saves, for ``due``.
    max_to_keep: complete steps that are kept; None keeps all.
    asynchronous: write behind the training; False waits for every save.
    attempts: consecutive failed saves after which the run ends with a RetryableError.
    backoff_seconds: wait after the first failure; doubles with each.
    patience_seconds: how long a save waits for the one before it, before it is skipped. Enough for a small state, so that
      small runs have the same checkpoints every time; nothing beside the minutes that a large state takes.
    tokenizer: files that every step carries, by name (``accompanying_files.of_tokenizer``).
    fence: entered around every rename and removal in ``directory``; raises, or never returns, when that is another's by now.
    saved: takes a step when it is whole and has its name; called by the thread of the save.
    watch: (kind, what) -> context that limits how long a save may take; entered by the thread that waits for the disk.
    mirror: a second place that every complete step is copied to, and a damaged one is replaced from.
    mirror_seconds: how long ``close`` waits for the last copy.
    peers_seconds: how long the processes of a run wait for each other in a save or a restore.

  Raises:
    UserError: the directory cannot be made or read, or holds a step under another's name.
    ValueError: an argument out of range.
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
    watch: Callable[[str, str], AbstractContextManager[None]] = lambda kind, what: contextlib.nullcontext(),
    mirror: Mirror | None = None,
    mirror_seconds: float = 60.0,
    peers_seconds: float = 3600.0,
  ):
    if max_to_keep is not None and max_to_keep < 1:
      raise ValueError(f"max_to_keep is {max_to_keep}; keep at least 1 checkpoint, or all with None")
    if interval < 1 or attempts < 1:
      raise ValueError(f"interval {interval} and attempts {attempts} must be at least 1")
    self.directory = directory if isinstance(directory, Place) else Path(os.path.abspath(directory))
    self._alone, self._peers_seconds = processes.count() == 1, peers_seconds
    token = processes.from_primary(lambda: secrets.token_hex(4), peers_seconds)
    self._steps = open_steps(self.directory, fence, token)
    self._fence, self._saved, self._watch = fence, saved, watch
    self.config = compatibility.record({} if config is None else config)
    self.statistics = Statistics()
    self._interval = interval
    self._max_to_keep = max_to_keep
    self._asynchronous = asynchronous
    self._attempts = attempts
    self._backoff_seconds = backoff_seconds
    self._patience_seconds = patience_seconds
    self._tokenizer = tokenizer or {}
    self._consecutive_failures = 0
    self._retry_at: float | None = None
    self._pending: PendingSave | None = None
    self._arrays = ArrayWriter(peers_seconds)
    self._saves = 0
    self._mirror, self._mirror_seconds = mirror, mirror_seconds
    self._newest_known: int | None = None
    self._run = processes.from_primary(self._open, peers_seconds)
    atexit.register(self._at_exit)

  def _open(self) -> str:
    """Makes the directory, or puts it in order; returns the run's name in manifests."""
    try:
      self._steps.make()
    except OSError as error:
      if isinstance(self.directory, Place):
        raise failed(error) from error
      raise UserError(f"checkpoint directory {self.directory}: {error.strerror}; choose another output_dir") from error
    newest = self._newest_known = self.latest_complete()
    if self._mirror is not None and isinstance(self._steps, StepDirectories) and newest is not None:
      self._mirror.offer(self._steps.path(newest))  # the run may have ended before it was there
    return (newest is not None and manifest.read(self._steps.path(newest)).run) or uuid.uuid4().hex

  def __enter__(self) -> "CheckpointManager":
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    if error is None:
      self.close()
      return
    # The error that ends the run must stay the one that is seen, so a failed save is only told.
    self._join()
    self._tell(self._settle())
    self._shut()

  def complete_steps(self) -> list[int]:
    """Returns the steps whose manifest is whole and whose files have the right sizes, oldest first. Reads no array."""
    try:
      return self._steps.complete()
    except OSError as error:
      if isinstance(self.directory, Place):
        raise failed(error) from error
      if isinstance(error, FileNotFoundError | NotADirectoryError):
        what = "was removed while this run was going on, or its disk is away"
        raise RetryableError(f"checkpoint directory {self.directory}: {what}; put it back and run the same command") from error
      raise

  def latest_complete(self) -> int | None:
    """Returns the newest step that counts, or None. ``restore`` checks the hashes too."""
    return max(self.complete_steps(), default=None)

  def newest_before(self, step: int) -> int | None:
    """The newest complete step before this one, of those that are due rather than one that a stop has left; None: none is.

    Waits for the save under way.

    Raises:
      RetryableError: as ``poll``.
    """
    self.wait()
    before = processes.from_primary(lambda: [s for s in self.complete_steps() if s < step], self._peers_seconds)
    return max([s for s in before if s % self._interval == 0] or before, default=None)

  def preflight(self, state: Any) -> None:
    """Compares the bytes of a state (arrays or shapes) with the free space, before anything is compiled.

    ``max_to_keep`` + 1 checkpoints exist for a moment in every save. Less room than that is a warning, less than one a
    refusal.

    Raises:
      UserError: not even one more checkpoint fits.
    """
    if isinstance(self.directory, Place):
      return
    size = tree.total_bytes(tree.flatten(state))
    require_room(self.directory, size, existing=len(self.complete_steps()), kept=self._max_to_keep)

  # Saving.

  def due(self, step: int) -> bool:
    """Says whether to save after ``step``: at every interval, and alone as soon as a failed save may be tried again."""
    if self._retry_at is not None and self._alone:
      return time.monotonic() >= self._retry_at
    return step % self._interval == 0

  @property
  def busy(self) -> bool:
    """A save is still being written."""
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
    """Starts to save ``state`` after ``step`` finished steps; returns as soon as the arrays may be changed or donated.

    Args:
      step: finished training steps.
      state: nested dicts, optax states and None over arrays.
      extra: JSON values stored with the step (position in the data, versions of the tokenizer, ...).
      finite: bool or boolean scalar array from the compiled step: every array of the state is finite.
      best: the step with the lowest held-out loss, which is named in ``best.json`` and never dropped, and that loss.

    Returns:
      Whether a save was started (or the step is already there). False when the state is not finite, when the save
      before is still being written, or when this one failed at once; each is logged and counted in ``statistics``.

    Raises:
      RetryableError: the last ``attempts`` saves failed.
      ValueError: ``extra`` is not JSON or a leaf is not an array.
    """
    begin = time.monotonic()
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
    flat = tree.flatten(state)
    record = manifest.Manifest(
      step=step,
      finite=True,
      config=self.config,
      extra=compatibility.record(extra or {}),
      leaves=tree.describe(flat),
      files={},
      versions=manifest.versions(),
      run=self._run,
    )
    pending = PendingSave(step, tree.total_bytes(flat) + sum(map(len, self._tokenizer.values())), best=best)
    pending.thread = threading.Thread(target=self._finish, args=(pending, record, begin), name=f"checkpoint-{step}")
    self._pending = pending
    self._saves += 1
    self._arrays.begin()
    try:
      with self._watch("save", f"the save of step {step}"):
        if problem := processes.from_primary(lambda: self._make_room(step, pending.needed_bytes), self._peers_seconds):
          raise OSError(*problem)
        path = self._steps.saving(step, self._saves) / manifest.STATE_NAME
        self._with_others(pending, lambda: self._arrays.save(path, flat, self._saves))
    except Exception as error:  # orbax raises bare Exceptions; poll tells, counts and re-raises after the last attempt
      pending.error = error
    else:
      pending.thread.start()
    self.statistics.blocked_seconds += time.monotonic() - begin
    if not self._asynchronous:
      self._join()
    if pending.error is not None:
      self._take_note()
      return False
    return True

  # A store is not asked in the loop of the training, which would wait for it.

  def _is_saved(self, step: int) -> bool:
    return step == self._newest_known if isinstance(self.directory, Place) else step in self.complete_steps()

  def _kept(self) -> int | None:
    return self._newest_known if isinstance(self.directory, Place) else self.latest_complete()

  def _make_room(self, step: int, needed_bytes: int) -> tuple[int, str] | None:
    """Makes the directory that a step is written to; returns the error, as OSError has it, when it cannot be."""
    free = free_bytes(self.directory)
    if free is not None and free < needed_bytes:  # filling the disk would break the run's other files too
      return errno.ENOSPC, "not started: the disk is too full"
    try:
      self._steps.prepare(step, self._saves)
    except OSError as error:
      return error.errno or errno.EIO, error.strerror or str(error)
    return None

  def _finish(self, pending: PendingSave, record: manifest.Manifest, begin: float) -> None:
    """Body of a save's thread: after it either the step has its name or ``pending.error`` says why not."""
    turn = f"save-{self._saves}"
    try:
      with self._watch("save", f"the save of step {pending.step}"):
        self._with_others(pending, self._arrays.wait_until_finished)
        written = time.monotonic()
        if processes.primary():
          self._with_others(pending, lambda: self._complete(pending.step, record), alone=True)
        said = processes.everyone("", self._peers_seconds, turn)
        if wrong := [f"{processes.name_of(i)}: {why}" for i, why in enumerate(said) if why]:
          raise RetryableError("; ".join(wrong))
        pending.write_seconds, pending.hash_seconds = written - begin, time.monotonic() - written
    except BaseException as error:
      pending.error = error
      return
    if not processes.primary():
      return
    try:
      with self._watch("save", "the removal of old checkpoints"):
        spare = set() if pending.best is None else {pending.best[0]}
        try:
          if pending.best is not None and named_best(self.directory) != pending.best[0] and self._steps.has(pending.best[0]):
            name_best(self.directory, *pending.best, self._fence)
        finally:  # the mirror looks which is named
          if self._mirror is not None and isinstance(self._steps, StepDirectories):
            self._mirror.offer(self._steps.path(pending.step))
            spare |= self._mirror.needed
        self._steps.drop_old(self._max_to_keep, spare)
    except OSError as error:  # the new step is whole; what is left of an old one is cleaned at the next start
      _log.warning("%s: cannot remove old checkpoints: %s", self.directory, error)

  def _with_others(self, pending: PendingSave, do: Callable[[], None], *, alone: bool = False) -> None:
    """A part of a save, in which orbax waits for the other processes (``alone``: not in this one). When it fails in one of
    them, all say so, and raise."""
    try:
      do() if alone else processes.together(do, f"failed-save-{self._saves}")
    except Exception as error:
      if not self._alone:
        _log.error("checkpoint of step %d failed in %s: %s", pending.step, processes.name_of(processes.index()), reason(error))
      processes.everyone(reason(error), self._peers_seconds, f"save-{self._saves}")
      raise

  def _complete(self, step: int, record: manifest.Manifest) -> None:
    """What makes a step of arrays that are written: tokenizer, hashes, manifest, name."""
    sidecar_files.write(self._steps.saving(step, self._saves), self._tokenizer)
    self._steps.publish(step, self._saves, record)
    self._newest_known = step
    self._saved(step)

  def poll(self) -> None:
    """Looks, without waiting, how the save under way is doing. Call it every step.

    Raises:
      RetryableError: the last ``attempts`` saves failed; the message names path, free and needed bytes.
    """
    if self._alone:
      self._take_note()

  def _take_note(self) -> None:
    if self.busy:
      return
    message = self._settle()
    if message is not None and self._consecutive_failures >= self._attempts:
      self._retry_at = None
      raise RetryableError(f"{message}; {self._remedy}, and run the same command again")
    self._tell(message)

  @property
  def _remedy(self) -> str:
    return "see that the store answers" if isinstance(self.directory, Place) else "free some space there, or mend it"

  def _settle(self) -> str | None:
    """Takes note of how a finished save ended; returns the message of a failed one."""
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
    free = free_bytes(self.directory)  # before the half-written step goes
    if processes.primary():  # which makes it anew when it is tried again: nobody may come late to this
      self._steps.discard(pending.step, self._saves)
    self._arrays.give_up()
    room = "" if isinstance(self.directory, Place) else f", {megabytes(free) if free is not None else 'unknown'} were free"
    last = self._consecutive_failures >= self._attempts
    kept = self._kept()
    message = (
      f"checkpoint of step {pending.step} failed ({self._consecutive_failures} of {self._attempts}): "
      f"{self._steps.path(pending.step)}: "
      f"needs {megabytes(pending.needed_bytes)}{room}: "
      f"{reason(pending.error)}; "
      + ("no earlier step to keep" if kept is None else f"step {kept} is kept")
      + ("" if last else f"; trying again in {delay:.0f} s")
    )
    return message

  def _tell(self, message: str | None) -> None:
    if message is not None:
      _log.error("%s", message)

  def _join(self, timeout: float | None = None) -> None:
    if self._pending is not None and self._pending.thread.ident is not None:
      with self._watch("save", f"the wait for the save of step {self._pending.step}"):
        self._pending.thread.join(timeout)

  def wait(self) -> bool:
    """Waits for the save under way; returns whether there was none or it is complete.

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
    """The save at the end of a run: waits, tries again with back-off, and returns only with the step on the disk.

    Returns:
      False when the state is not finite and so was refused.

    Raises:
      RetryableError: it failed ``attempts`` times.
    """
    self._join()
    self._tell(self._settle())
    self._consecutive_failures = 0
    while True:
      if not bool(finite):
        return self.save(step, state, extra, finite=False)
      if self.save(step, state, extra, best=best) and self.wait():
        return True
      if self._retry_at is not None:
        time.sleep(max(0.0, self._retry_at - time.monotonic()))

  def close(self) -> None:
    """Waits for the save under way and ends the use of the manager.

    Raises:
      RetryableError: the last save failed, so the newest step that was asked for is missing.
    """
    self._join()
    message = self._settle()
    self._shut()
    if message is not None:
      raise RetryableError(message)

  def _shut(self) -> None:
    atexit.unregister(self._at_exit)
    self._arrays.close()
    if self._mirror is not None:
      self._mirror.close(self._mirror_seconds)

  def _at_exit(self) -> None:
    """Last guard for a program that never closed its manager: it must not end with 0 and without its last step."""
    self._join()
    message = self._settle()
    if message is not None:
      self._tell(message)
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(RetryableError.exit_code)

  # Restoring.

  def restore(self, like: Any, *, step: int | None = None, allow_dtype_change: bool = False) -> restore.Restored | None:
    """Reads the newest valid step into the shapes, dtypes and shardings of ``like``.

    A step that fails its hashes is renamed to ``N.corrupt``, told, and the one before it is used.

    Args:
      like: tree of ``jax.ShapeDtypeStruct`` (with shardings) of the state.
      step: this one, not the newest.
      allow_dtype_change: cast floats to the dtypes of ``like``, with a range check, instead of refusing.

    Returns:
      None when there is no checkpoint at all.

    Raises:
      UserError: all steps are corrupt, or the newest is of another model or has other arrays, or one has another's name.
    """
    wanted = tree.flatten(like)
    same = {"config": self.config or None, "allow_dtype_change": allow_dtype_change, "resumes": True}
    choose = lambda: newest_valid(self._steps, lambda p, m: restore.check(p, m, wanted, **same), self._copied_back, step)
    try:
      number = processes.from_primary(choose, self._peers_seconds)
      if number is None:
        return None
      self._newest_known = number
      path = readable_step(self._steps.path(number))
      stored = manifest.read(path)
    except OSError as error:
      raise failed(error) from error
    return restore.Restored(number, restore.read(path, stored, like), stored.extra, stored.config, path)

  def abandon_after(self, step: int) -> None:
    """The run has gone back to this step: later ones no longer count, here and in the mirror. No save may be under way.

    Raises:
      RetryableError: they cannot be moved aside.
    """
    processes.from_primary(lambda: self._abandon_after(step), self._peers_seconds)

  def _abandon_after(self, step: int) -> None:
    try:
      later = self._steps.abandon_after(step)
    except OSError as error:
      raise RetryableError(f"{error.filename or self.directory}: {error.strerror}") from error
    self._newest_known = step
    if later and self._mirror is not None:
      self._mirror.forget(step, self._run)

  def _copied_back(self, step: int, damage: Exception) -> bool:
    """Whether a damaged step was replaced from the mirror."""
    try:
      if self._mirror is None or not isinstance(self._steps, StepDirectories) or not self._mirror.fetch(step, self._steps):
        return False
    except RetryableError as error:
      _log.warning("%s", error)
      return False
    _log.error("step %d is corrupt: %s; copied back from %s", step, damage, self._mirror)
    return True
