"""A second place for a run's checkpoints: a mounted disk, or object storage through fsspec, for when the first one is lost.

Layout: ``<checkpoint_mirror>/<run_name>/checkpoints/N``, the same as in the run's directory, so a mirror on a disk is a run to
every command. A step is copied after it was proved whole, on a thread of its own, file by file with its hashes and the
manifest last; until then a file ``COPYING`` marks it as ours and unfinished. What fails is told, tried again, and ends no run.
The step that the run names as its best is there as long as the run keeps it, and named there in the same way.

Every checkpoint holds the name of its run's life, drawn at random at its first start: two runs that happen to share a name, and
so a place in the mirror, are told apart by it and refused.
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
from maxtext_like.checkpoint.store.best_steps import name_best, parsed, written
from maxtext_like.checkpoint.store.steps import StepDirectories, is_step_name
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.masking import masked
from maxtext_like.storage import as_oserror, failed, require_usable

_log = logging.getLogger(__name__)
_MARKER = "COPYING"
_CHUNK_BYTES = 16 << 20
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 5.0, 600.0


class Mirror:
  """The steps of one run in their second place.

  Args:
    place: a path, or a URL that fsspec knows.
    run_name: of the run.
    own: where the run itself keeps its steps.
    keep: newest steps that are kept beside the best; None: all.

  Raises:
    UserError: as ``require_usable``; or it is the run's own directory.
  """

  def __init__(self, place: str, run_name: str, own: Path, keep: int | None):
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    require_usable("checkpoint_mirror", place)
    if "://" not in place:
      place = os.path.abspath(os.path.expanduser(place))
    self._files, root = fsspec.core.url_to_fs(place)
    self._root = f"{root.rstrip('/')}/{run_name}/checkpoints"
    self._name = f"checkpoint_mirror {masked(place)}"
    self._local = isinstance(self._files, LocalFileSystem)
    self._own, self._keep = own, keep
    if self._local and os.path.realpath(self._root) == os.path.realpath(own):
      raise UserError(f"checkpoint_mirror = {place} is where the run itself writes\n  fix: another place, on another disk")
    self._condition = threading.Condition()
    self._wanted: Path | None = None
    self._copying: Path | None = None
    self._copying_best: Path | None = None
    self._forgotten: tuple[int, str] | None = None  # steps after this one, of this run, are to go
    self._failure: str | None = None
    self._closing = False
    self._thread: threading.Thread | None = None

  def __str__(self) -> str:
    return self._name

  # Copying.

  def offer(self, step: Path) -> None:
    """Hands over a complete step; one that still waits is passed over for it. Never waits, never raises."""
    with self._condition:
      self._wanted = step
      self._wake()

  def forget(self, step: int, run: str) -> None:
    """The run has gone back to this step: later ones of it are not copied any more, and removed. Never waits, never raises."""
    with self._condition:
      self._wanted, self._copying = (
        None if path is not None and int(path.name) > step else path for path in (self._wanted, self._copying)
      )
      before = self._forgotten
      self._forgotten = (step if before is None else min(step, before[0]), run)  # what was saved since is not there yet
      self._wake()

  def _wake(self) -> None:
    if self._thread is None:
      self._thread = threading.Thread(target=self._work, name="checkpoint-mirror", daemon=True)
      self._thread.start()
    self._condition.notify_all()

  @property
  def needed(self) -> set[int]:
    """The own steps that are to be copied or are being copied, which must not be dropped meanwhile."""
    with self._condition:
      return {int(path.name) for path in (self._wanted, self._copying, self._copying_best) if path is not None}

  def close(self, seconds: float) -> None:
    """Waits for what was handed over, at most so long; what is still not there is told. The next start offers it again."""
    with self._condition:
      self._closing = True
      self._condition.notify_all()
    if self._thread is not None:
      self._thread.join(seconds)
      if missing := self.needed:
        reason = self._failure or f"it took more than {seconds:.0f} s"
        _log.warning("%s: step %d is not there: %s; the next start of this run copies it", self._name, max(missing), reason)

  def _work(self) -> None:
    delay = _FIRST_RETRY_SECONDS
    while True:
      with self._condition:
        self._condition.wait_for(lambda: self._wanted is not None or self._forgotten is not None or self._closing)
        forgotten = self._forgotten
        if self._wanted is None and forgotten is None:
          return
        if forgotten is None:  # else first what is to go
          self._copying, self._wanted = self._wanted, None
        last, step = self._closing, self._copying
      try:
        if forgotten is not None:
          self._remove_after(*forgotten)
        elif step is not None:
          self._copy(step)
      except manifest.DamageError as error:  # what is no whole step here would be none there
        _log.error("%s: step %s is not copied: %s", self._name, step and step.name, error)
      except Exception as error:  # fsspec's many kinds; none of them may end a run
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        with self._condition:
          if forgotten is None and self._copying is None:
            continue  # it was moved aside meanwhile
          if reason != self._failure:
            what = (
              f"step {step.name} is not there yet" if step is not None else "steps that the run went back past are still there"
            )
            _log.warning("%s: %s: %s; it is tried again", self._name, what, reason)
          self._wanted = self._wanted or self._copying
          self._failure, self._copying = reason, None
          if last:
            return
          self._condition.wait_for(lambda: self._closing, delay)
        delay = min(2 * delay, _LAST_RETRY_SECONDS)
        continue
      with self._condition:
        if self._failure is not None:
          _log.warning("%s: works again%s", self._name, f", step {step.name} is there" if step is not None else "")
        self._failure, self._copying = None, None
        if self._forgotten is forgotten:
          self._forgotten = None
      delay = _FIRST_RETRY_SECONDS

  def _copy(self, step: Path) -> None:
    """A step, and the best one where it is not there: it may have waited while others were copied, and been passed over."""
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
    """The step that the run keeps as its best, and its loss."""
    try:
      best = parsed((self._own / BEST_FILE).read_bytes())
    except FileNotFoundError:
      return None
    return best if best is not None and manifest.is_whole(self._own / str(best[0]), best[0]) else None

  def _best(self) -> tuple[int, float] | None:
    """The same of what is written down in the mirror, whether that step is there or not."""
    try:
      content: Any = self._files.cat_file(f"{self._root}/{BEST_FILE}")
    except FileNotFoundError:
      return None
    return parsed(content)

  def _name_best(self, step: int, eval_loss: float) -> None:
    if self._local:
      name_best(Path(self._root), step, eval_loss)
    else:
      self._write(f"{self._root}/{BEST_FILE}", written(step, eval_loss).encode())

  def _copy_step(self, step: Path) -> manifest.Manifest | None:
    """Copies a step that is not there yet; returns its manifest, None for one that cannot be told from another run's."""
    text = (step / manifest.FILE_NAME).read_text(encoding="utf-8")
    stored = manifest.parse(text, str(step))
    if not stored.run:
      return None  # of a version that did not tell runs apart
    there = f"{self._root}/{step.name}"
    self._files.invalidate_cache()
    if self._manifest(stored.step) != stored:
      self._files.makedirs(there, exist_ok=True)
      self._write(f"{there}/{_MARKER}", stored.run.encode())
      for name, expected in stored.files.items():
        self._copy_file(step / name, f"{there}/{name}", expected["xxh3_128"])
      self._write(f"{there}/{manifest.FILE_NAME}", text.encode())
      if self._manifest(stored.step) != stored:
        raise OSError("the manifest reads back otherwise than it was written")
      self._files.rm_file(f"{there}/{_MARKER}")
    return stored

  def _copy_file(self, source: Path, target: str, expected: str) -> None:
    if self._files.exists(target) and self._hash(target) == expected:  # of a copy that was interrupted
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
      raise OSError(f"{target} reads back otherwise than it was written")

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
      if number < newest.step and number != best and self._files.exists(f"{there}/{_MARKER}"):  # a copy that was never finished
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
    """The manifest first: a half-removed step never counts."""
    self._files.rm_file(f"{self._root}/{number}/{manifest.FILE_NAME}")
    self._files.rm(f"{self._root}/{number}", recursive=True)

  # Looking and bringing back.

  def steps(self) -> dict[int, manifest.Manifest]:
    """The complete steps by number; what fsspec raises where the place does not answer."""
    found = {number: self._manifest(number) for number in self._numbered()}
    return {number: stored for number, stored in found.items() if stored is not None}

  def bring_back(self, own: StepDirectories, *, resume: bool) -> int | None:
    """Copies the newest step, and the best one, back where the run's own steps are gone or older; returns the newest, None when
    there was no need.

    Raises:
      UserError: the mirror holds steps of another run, or ``resume`` is false and it holds some; it is not set up on this
        machine, and the run has no step of its own to go on from; or as ``own.make``.
      RetryableError: the mirror does not answer, and the run has no step of its own to go on from.
    """
    mine = own.complete() if own.directory.is_dir() else []
    try:
      theirs = self.steps()
    except Exception as error:
      if mine:
        _log.warning("%s: cannot be looked at: %s", self._name, error)
        return None
      what = failed(as_oserror(error, self._root))
      raise type(what)(f"{self._name}: cannot be looked at, and the run has no checkpoint of its own: {what}") from error
    if not theirs:
      return None
    lives = {stored.run for stored in theirs.values()}
    if mine:
      lives.add(manifest.read(own.path(mine[-1])).run)
    if len(lives) > 1 or not resume:
      why = "resume is false" if len(lives) == 1 else "steps of different runs of that name are there or in the run directory"
      raise UserError(
        f"{self._name}: {self._root} holds step {max(theirs)}, and {why}: they would be mixed\n"
        "  fix: choose another run_name or another checkpoint_mirror, or move away what is not of this run"
      )
    abandoned = own.abandoned()  # and not removed there before the run was killed
    theirs = {number: stored for number, stored in theirs.items() if number not in abandoned}
    if not theirs or (mine and mine[-1] >= max(theirs)):
      return None
    try:
      own.make()  # which removes what a copy that was killed left: its room is needed
      mine = own.complete()  # a save that only lacked its name has it now
    except OSError as error:
      raise RetryableError(f"{own.directory}: {error.strerror}") from error
    best = self._there_and_best(theirs)
    if best is not None and best[0] < max(theirs) and not own.has(best[0]):
      self.fetch(best[0], own)  # first: with the newest one in its place nobody asks again
    for number in sorted(theirs, reverse=True):
      if mine and mine[-1] >= number:
        return None
      if own.has(number) or self.fetch(number, own):
        if best is not None and own.has(best[0]):
          name_best(own.directory, *best)
        return number
    raise UserError(f"{self._name}: none of its steps ({', '.join(map(str, sorted(theirs)))}) is whole, see above")

  def _there_and_best(self, theirs: Collection[int]) -> tuple[int, float] | None:
    try:
      best = self._best()
    except Exception as error:  # fsspec's many kinds
      raise RetryableError(f"{self._name}: {BEST_FILE} cannot be read: {error}") from error
    return best if best is not None and best[0] in theirs else None

  def fetch(self, number: int, own: StepDirectories) -> bool:
    """Copies one step back under its hashes; False, and told, when it is not there or not whole.

    Raises:
      RetryableError: it could not be read, or not be written here.
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
      raise RetryableError(f"{self._name}: step {number} cannot be copied to {own.directory}: {error}") from error
    finally:
      shutil.rmtree(target, ignore_errors=True)

  def _numbered(self) -> list[int]:
    self._files.invalidate_cache()
    try:
      names = [str(path).rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)]
    except FileNotFoundError:
      return []
    return sorted(int(name) for name in names if is_step_name(name))

  def _manifest(self, number: int) -> manifest.Manifest | None:
    """The manifest of a step; None without one, or with one that is not whole or of another step."""
    path = f"{self._root}/{number}/{manifest.FILE_NAME}"
    try:
      text: Any = self._files.cat_file(path)
      stored = manifest.parse(text.decode(), path)
    except (FileNotFoundError, UnicodeDecodeError, manifest.DamageError):
      return None
    return stored if stored.step == number else None
