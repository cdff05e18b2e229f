"""A second location for a run's checkpoints, on another disk or in an object store, in case the first one is lost.

The layout ``<checkpoint_mirror>/<run_name>/checkpoints/N`` equals that of a run directory, so every command accepts a mirror on
a disk as a run. A background thread copies each complete step: file by file with hashes, the manifest last. A file ``COPYING``
marks an unfinished copy until then. Failures are logged and retried and never end the run. The step recorded as the best is
kept and recorded in the mirror too.

Every checkpoint contains a random id that the run drew at its first start. Two runs of the same name share a folder in the
mirror; the ids tell them apart, and mixing them is refused.
"""

import logging
import os
import shutil
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import xxhash

from maxtext_like import atomic
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.best_steps import FILE_NAME as BEST_FILE
from maxtext_like.checkpoint.store.best_steps import parse, record_best, to_text
from maxtext_like.checkpoint.store.steps import StepDirectories, is_step_name
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.masking import masked
from maxtext_like.storage import as_oserror, failed, is_remote, refusal, renewal, require_usable, set_up_client

_log = logging.getLogger(__name__)
_MARKER = "COPYING"
_CHUNK_BYTES = 16 << 20
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 5.0, 600.0


class Mirror:
  """The copies of one run's steps in the mirror.

  Args:
    place: a path, or a URL that fsspec supports.
    run_name: name of the run.
    own: directory of the run's own steps.
    keep: number of newest steps to keep in addition to the best; None keeps all.

  Raises:
    UserError: as ``require_usable``; or ``place`` is the run's own directory.
  """

  def __init__(self, place: str, run_name: str, own: Path, keep: int | None):
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    require_usable("checkpoint_mirror", place)
    if "://" not in place:
      place = os.path.abspath(os.path.expanduser(place))
    protocol = place.partition("://")[0].lower() if is_remote(place) else ""
    set_up_client(protocol)
    self._files, root = fsspec.core.url_to_fs(place)
    self._root = f"{root.rstrip('/')}/{run_name}/checkpoints"
    self._name = f"checkpoint_mirror {masked(place)}"
    self._local = isinstance(self._files, LocalFileSystem)
    self._url = self._root if self._local else f"{protocol}://{self._root.lstrip('/')}"
    self._own, self._keep = own, keep
    if self._local and os.path.realpath(self._root) == os.path.realpath(own):
      raise UserError(f"checkpoint_mirror = {place} is the run's own directory\n  fix: choose a place on another disk")
    self._condition = threading.Condition()
    self._wanted: Path | None = None
    self._copying: Path | None = None
    self._copying_best: Path | None = None
    self._forgotten: tuple[int, str] | None = None  # (step, run id): later steps of this run must be removed
    self._failure: str | None = None
    self._closing = False
    self._thread: threading.Thread | None = None

  def __str__(self) -> str:
    return self._name

  # Copying.

  def offer(self, step: Path) -> None:
    """Queues a complete step for copying, replacing one that still waits. Never blocks, never raises."""
    with self._condition:
      self._wanted = step
      self._wake()

  def forget(self, step: int, run: str) -> None:
    """Removes copies of the run's steps after ``step``, to which the run has gone back. Never blocks, never raises."""
    with self._condition:
      self._wanted, self._copying = (
        None if path is not None and int(path.name) > step else path for path in (self._wanted, self._copying)
      )
      before = self._forgotten
      self._forgotten = (step if before is None else min(step, before[0]), run)  # no later save has been copied since
      self._wake()

  def _wake(self) -> None:
    if self._thread is None:
      self._thread = threading.Thread(target=self._work, name="checkpoint-mirror", daemon=True)
      self._thread.start()
    self._condition.notify_all()

  @property
  def needed(self) -> set[int]:
    """The run's own steps that are queued or being copied. They must not be removed in the meantime."""
    with self._condition:
      return {int(path.name) for path in (self._wanted, self._copying, self._copying_best) if path is not None}

  def close(self, seconds: float) -> None:
    """Waits for queued copies, at most ``seconds``. A missing copy is logged; the next start of the run queues it again."""
    with self._condition:
      self._closing = True
      self._condition.notify_all()
    if self._thread is not None:
      self._thread.join(seconds)
      if missing := self.needed:
        reason = self._failure or f"copying took more than {seconds:.0f} s"
        _log.warning("%s: step %d is not copied: %s; the next start of this run copies it", self._name, max(missing), reason)

  def _work(self) -> None:
    delay = _FIRST_RETRY_SECONDS
    while True:
      with self._condition:
        # Wait for work. Removals come before copies.
        self._condition.wait_for(lambda: self._wanted is not None or self._forgotten is not None or self._closing)
        forgotten = self._forgotten
        if self._wanted is None and forgotten is None:
          return
        if forgotten is None:
          self._copying, self._wanted = self._wanted, None
        last, step = self._closing, self._copying
      try:
        if forgotten is not None:
          self._remove_after(*forgotten)
        elif step is not None:
          self._copy(step)
      except manifest.DamageError as error:  # a damaged step must not be copied
        _log.error("%s: step %s is not copied: %s", self._name, step and step.name, error)
      except Exception as error:  # fsspec raises many types; a failing mirror must not end the run
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if (refused := refusal(error, self._url)) is not None:
          reason = f"{refused.strerror}; {renewal(self._url)}"
        with self._condition:
          if forgotten is None and self._copying is None:
            continue  # the step was abandoned in the meantime
          # Log each new reason once, and retry with backoff.
          if reason != self._failure:
            what = f"step {step.name} is not copied yet" if step is not None else "abandoned steps are not removed yet"
            _log.warning("%s: %s: %s; retrying", self._name, what, reason)
          self._wanted = self._wanted or self._copying
          self._failure, self._copying = reason, None
          if last:
            return
          self._condition.wait_for(lambda: self._closing, delay)
        delay = min(2 * delay, _LAST_RETRY_SECONDS)
        continue
      with self._condition:
        if self._failure is not None:
          _log.warning("%s: works again%s", self._name, f", step {step.name} is copied" if step is not None else "")
        self._failure, self._copying = None, None
        if self._forgotten is forgotten:
          self._forgotten = None
      delay = _FIRST_RETRY_SECONDS

  def _copy(self, step: Path) -> None:
    """Copies a step, and the best step if its copy is missing: other steps may have replaced it in the queue."""
    if (stored := self._copy_step(step)) is None:
      return
    best = self._own_best()
    self._drop_old(stored, best and best[0])
    if best is None:
      return
    try:
      with self._condition:
        self._copying_best = self._own / str(best[0])
      self._copy_step(self._copying_best)
      if self._best() != best:
        self._name_best(*best)
    finally:
      with self._condition:
        self._copying_best = None

  def _own_best(self) -> tuple[int, float] | None:
    """Returns the step that the run records as its best, and its loss; None if there is none or it is damaged."""
    try:
      best = parse((self._own / BEST_FILE).read_bytes())
    except FileNotFoundError:
      return None
    return best if best is not None and manifest.is_complete(self._own / str(best[0]), best[0]) else None

  def _best(self) -> tuple[int, float] | None:
    """Returns the best step and loss that the mirror records, even if that step is missing in the mirror."""
    try:
      content: Any = self._files.cat_file(f"{self._root}/{BEST_FILE}")
    except FileNotFoundError:
      return None
    return parse(content)

  def _name_best(self, step: int, eval_loss: float) -> None:
    if self._local:
      record_best(Path(self._root), step, eval_loss)
    else:
      self._write(f"{self._root}/{BEST_FILE}", to_text(step, eval_loss).encode())

  def _copy_step(self, step: Path) -> manifest.Manifest | None:
    """Copies a step if its copy is missing. Returns its manifest, or None if the manifest has no run id."""
    text = (step / manifest.FILE_NAME).read_text(encoding="utf-8")
    stored = manifest.parse(text, str(step))
    if not stored.run:
      return None  # written by a version without run ids
    there = f"{self._root}/{step.name}"
    self._files.invalidate_cache()
    if self._manifest(stored.step) != stored:
      self._files.makedirs(there, exist_ok=True)
      self._write(f"{there}/{_MARKER}", stored.run.encode())
      for name, expected in stored.files.items():
        self._copy_file(step / name, f"{there}/{name}", expected["xxh3_128"])
      self._write(f"{there}/{manifest.FILE_NAME}", text.encode())
      if self._manifest(stored.step) != stored:
        raise OSError("the manifest in the mirror differs from the written one")
      self._files.rm_file(f"{there}/{_MARKER}")
    return stored

  def _copy_file(self, source: Path, target: str, expected: str) -> None:
    if self._files.exists(target) and self._hash(target) == expected:  # left by an interrupted copy
      return
    self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
    digest = xxhash.xxh3_128()
    with open(source, "rb", buffering=0) as read, self._files.open(target, "wb") as written:
      while chunk := read.read(_CHUNK_BYTES):
        digest.update(chunk)
        written.write(chunk)
      if self._local:
        written.flush()
        os.fsync(written.fileno())
    if digest.hexdigest() != expected:
      raise manifest.DamageError(f"file {source} has changed since it was written")
    if self._hash(target) != expected:
      raise OSError(f"{target} differs from the written data")

  def _write(self, path: str, content: bytes) -> None:
    if self._local:
      atomic.write_text(Path(path), content.decode())
    else:
      self._files.pipe_file(path, content)

  def _hash(self, path: str) -> str:
    digest = xxhash.xxh3_128()
    with self._files.open(path, "rb") as file:
      while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()

  def _drop_old(self, newest: manifest.Manifest, best: int | None) -> None:
    for number in self._numbered():
      there = f"{self._root}/{number}"
      if number < newest.step and number != best and self._files.exists(f"{there}/{_MARKER}"):  # an unfinished copy
        self._files.rm(there, recursive=True)
    mine = sorted(number for number, stored in self.steps().items() if stored.run == newest.run)
    for number in mine[: -self._keep] if self._keep else []:
      if number != best:
        self._remove(number)

  def _remove_after(self, step: int, run: str) -> None:
    for number, stored in self.steps().items():
      if number > step and stored.run == run:
        self._remove(number)

  def _remove(self, number: int) -> None:
    """Removes the manifest first, so that a partly removed step never counts."""
    self._files.rm_file(f"{self._root}/{number}/{manifest.FILE_NAME}")
    self._files.rm(f"{self._root}/{number}", recursive=True)

  # Reading and restoring.

  def steps(self) -> dict[int, manifest.Manifest]:
    """Returns the manifests of the complete steps by number. Raises the errors of fsspec if the mirror does not answer."""
    found = {number: self._manifest(number) for number in self._numbered()}
    return {number: stored for number, stored in found.items() if stored is not None}

  def bring_back(self, own: StepDirectories, *, resume: bool) -> int | None:
    """Restores the newest and the best step to the run directory if its own steps are missing or older.

    Returns:
      The newest restored step, or None if nothing had to be restored.

    Raises:
      UserError: the mirror contains steps of another run; or ``resume`` is false and it contains steps; or its storage is not
        configured on this machine and the run directory has no step; or as ``own.make``.
      RetryableError: the mirror does not answer, and the run directory has no step.
    """
    mine = own.complete() if own.directory.is_dir() else []
    # Compare the steps of the run with those of the mirror.
    try:
      theirs = self.steps()
    except Exception as error:
      if mine:
        _log.warning("%s: cannot be read: %s", self._name, error)
        return None
      what = failed(as_oserror(error, self._url), writes=True)
      raise type(what)(f"{self._name}: cannot be read, and the run directory has no checkpoint: {what}") from error
    if not theirs:
      return None
    lives = {stored.run for stored in theirs.values()}
    if mine:
      lives.add(manifest.read(own.path(mine[-1])).run)
    if len(lives) > 1 or not resume:
      why = "resume is false" if len(lives) == 1 else "steps of different runs of that name are in the mirror or run directory"
      raise UserError(
        f"{self._name}: {self._root} holds step {max(theirs)}, and {why}: the steps would be mixed\n"
        "  fix: choose another run_name or another checkpoint_mirror, or move the steps that do not belong to this run"
      )
    abandoned = own.abandoned()  # the run may have been killed before it removed their copies
    theirs = {number: stored for number, stored in theirs.items() if number not in abandoned}
    if not theirs or (mine and mine[-1] >= max(theirs)):
      return None
    try:
      own.make()  # removes the leftovers of an interrupted copy, whose disk space is needed
      mine = own.complete()  # a save that was complete except for its name is included now
    except OSError as error:
      raise RetryableError(f"{own.directory}: {error.strerror}") from error
    # Restore the best step first: once the newest step is in place, no later start restores the best one.
    best = self._there_and_best(theirs)
    if best is not None and best[0] < max(theirs) and not own.has(best[0]):
      self.fetch(best[0], own)
    for number in sorted(theirs, reverse=True):
      if mine and mine[-1] >= number:
        return None
      if own.has(number) or self.fetch(number, own):
        if best is not None and own.has(best[0]):
          record_best(own.directory, *best)
        return number
    raise UserError(
      f"{self._name}: none of its steps ({', '.join(map(str, sorted(theirs)))}) is intact; see the log above",
      fix="name another mirror, or remove this one and start a new run",
    )

  def _there_and_best(self, theirs: Collection[int]) -> tuple[int, float] | None:
    try:
      best = self._best()
    except Exception as error:  # fsspec raises many types
      raise self._cannot(f"{self._name}: {BEST_FILE} cannot be read", error) from error
    return best if best is not None and best[0] in theirs else None

  def fetch(self, number: int, own: StepDirectories) -> bool:
    """Copies one step back and verifies its hashes. Returns False if it is missing, or damaged (which is logged).

    Raises:
      RetryableError: the step cannot be read from the mirror or written here.
      UserError: the mirror refused the credentials.
    """
    target = own.saving(number)
    try:
      stored = self._manifest(number)
      if stored is None:
        return False
      target.mkdir(parents=True)
      for name, expected in stored.files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(f"{self._root}/{number}/{name}", str(target / name))
        if manifest.hash_file(target / name, sync=True)[1] != expected["xxh3_128"]:
          _log.error("%s: step %d is damaged: %s has changed since it was written", self._name, number, name)
          return False
      manifest.write(target, stored)
      own.commit(number)
      atomic.sync_directory(own.directory)
      return True
    except Exception as error:
      raise self._cannot(f"{self._name}: step {number} cannot be copied to {own.directory}", error) from error
    finally:
      shutil.rmtree(target, ignore_errors=True)

  def _cannot(self, what: str, error: Exception) -> UserError | RetryableError:
    refused = refusal(error, self._url)
    if refused is None:
      return RetryableError(f"{what}: {error}")
    return UserError(f"{what}: {refused.strerror}", fix=f"{renewal(self._url)}, or use ones that may read and write this place")

  def _numbered(self) -> list[int]:
    self._files.invalidate_cache()
    try:
      names = [str(path).rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)]
    except FileNotFoundError:
      return []
    return sorted(int(name) for name in names if is_step_name(name))

  def _manifest(self, number: int) -> manifest.Manifest | None:
    """Returns the manifest of a step; None if it is missing, damaged, or of another step."""
    path = f"{self._root}/{number}/{manifest.FILE_NAME}"
    try:
      text: Any = self._files.cat_file(path)
      stored = manifest.parse(text.decode(), path)
    except (FileNotFoundError, UnicodeDecodeError, manifest.DamageError):
      return None
    return stored if stored.step == number else None
