"""The directory of a run in gs:// or s3://: files are written on this machine and copied there behind the training.

An object cannot be appended to, so metrics, events and the rest are written to a directory of this machine, where all is as in
a run that has no other, and a thread copies what has changed. What the store has is what counts: a start begins with its
files. The checkpoints, and a failed step, are written to the store alone.
"""

import contextlib
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from maxtext_like import local_copies
from maxtext_like.errors import UserError
from maxtext_like.storage import Place, failed
from maxtext_like.training.run.remote_lock import RemoteLock, holder_of
from maxtext_like.training.run.run_directory import LOCK_NAME, SHARED_SECONDS, RunDirectory, lives_here, name_of

_log = logging.getLogger(__name__)
_COPY_SECONDS, _LAST_RETRY_SECONDS = 15.0, 300.0
_LEAVE_SECONDS = 60.0
_KEPT_HERE = ("profile", LOCK_NAME, f"{LOCK_NAME}.guard")  # large, or of this machine


class RemoteRunDirectory(RunDirectory):
  """``gs://bucket/runs/<run_name>/``. As a context manager it holds the run's lock, here and there.

  Args:
    output_dir: as ``gs://bucket/runs``.
    run_name: one name.

  Raises:
    UserError: ``run_name`` is not one name.
  """

  def __init__(self, output_dir: str, run_name: str):
    self.place = Place(output_dir)
    super().__init__(local_copies.folder().parent / "runs" / self.place.protocol / "/".join(self.place.parts), run_name)
    self.place = self.place / run_name
    self.url = str(self.place)
    self._remote: RemoteLock | None = None
    self._copied: dict[str, tuple[int, int]] = {}  # name to time and size, when it was copied
    self._wake = threading.Condition()
    self._asked = self._ending = False
    self._copier: threading.Thread | None = None
    self._failure: str | None = None

  @property
  def shown(self) -> str:
    return str(self.place)

  @property
  def home(self) -> Place:
    return self.place

  @property
  def checkpoints(self) -> Place:
    return self.place / "checkpoints"

  def __enter__(self) -> "RemoteRunDirectory":
    super().__enter__()
    assert self._identity is not None
    try:
      lock = RemoteLock(self.place / LOCK_NAME, self._identity, lives_here, self._abandon)
      if (holder := lock.acquire()) is not None:
        raise UserError(
          f"run directory {self.place}: in use by {name_of(holder)}; wait for it, stop it, or choose another run_name"
        )
      self._remote = lock
      self._fetch()
    except OSError as error:
      self.__exit__(None, None, None)
      raise failed(error) from error
    except BaseException:
      self.__exit__(None, None, None)
      raise
    self._copier = threading.Thread(target=self._copy_on, name="run-files", daemon=True)
    self._copier.start()
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
    with self._wake:
      self._ending = True
      self._wake.notify_all()
    if self._remote is not None:
      last = threading.Thread(target=self._leave, name="run-files-end", daemon=True)
      last.start()
      last.join(_LEAVE_SECONDS)
      if last.is_alive():
        _log.warning("%s: the store does not answer; what it lacks is in %s, until the next start there", self.place, self.path)
    self._remote = None
    super().__exit__(kind, error, trace)

  def _leave(self) -> None:
    """What is done last: the files as they are in the end, and the lock."""
    lock = self._remote
    assert lock is not None
    if self._copier is not None:  # else what is here is not yet what is there
      self._copier.join()
      self._copy_changed(last=True)
    try:
      lock.release()
    except OSError as error:
      _log.warning("%s cannot be removed: %s", error.filename, error.strerror)

  def require_shared(self, holder: str) -> None:
    deadline = time.monotonic() + SHARED_SECONDS
    while time.monotonic() < deadline:
      with contextlib.suppress(OSError):
        found = holder_of(self.place / LOCK_NAME)
        if found is not None and found.get("token") == holder:
          return
      time.sleep(0.5)
    raise UserError(f"run directory {self.place}: {platform.node()} does not find there the lock that process 0 holds")

  @contextlib.contextmanager
  def exclusive(self) -> Iterator[None]:
    """Inside, the run was this process's a moment ago. A store has no lock that could hold others back for longer."""
    with super().exclusive():
      if self._remote is not None and (why := self._remote.why_lost()) is not None:
        self._abandon(why)
      yield

  def saved(self) -> None:
    """A checkpoint is there: its rows are wanted there too."""
    with self._wake:
      self._asked = True
      self._wake.notify_all()

  # The files.

  def _fetch(self) -> None:
    """Makes the files here those of the store."""
    entries = self.place.children()
    names = {entry.place.name for entry in entries}
    for path in self.path.iterdir():
      if path.name not in names and path.name not in _KEPT_HERE:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for entry in entries:
      if entry.place.name not in _KEPT_HERE:
        (self.path / entry.place.name).write_bytes(entry.place.read_bytes())
    self._copied = dict(self._files())

  def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
    for folder, folders, names in os.walk(self.path):
      inside = Path(folder).relative_to(self.path)
      folders[:] = [name for name in folders if name not in _KEPT_HERE]
      for name in names:
        if name in _KEPT_HERE or name.endswith(".tmp"):
          continue
        with contextlib.suppress(FileNotFoundError):
          status = os.stat(Path(folder, name))
          yield (inside / name).as_posix(), (status.st_mtime_ns, status.st_size)

  def _copy_on(self) -> None:
    wait = _COPY_SECONDS
    while True:
      with self._wake:
        self._wake.wait_for(lambda: self._asked or self._ending, wait)
        if self._ending:
          return
        self._asked = False
      wait = _COPY_SECONDS if self._copy_changed() else min(2 * wait, _LAST_RETRY_SECONDS)

  def _copy_changed(self, *, last: bool = False) -> bool:
    """Copies every file that is another than when it was copied; says whether all went well."""
    try:
      for name, state in list(self._files()):
        if self._copied.get(name) == state:
          continue
        with contextlib.suppress(FileNotFoundError):
          content = (self.path / name).read_bytes()
          if name.endswith(".jsonl"):
            content = content[: content.rfind(b"\n") + 1]  # a row that is being written comes with the next copy
          (self.place / name).write_bytes(content)
          self._copied[name] = state
      for name in set(self._copied) - {name for name, _ in self._files()}:
        (self.place / name).remove()
        del self._copied[name]
    except OSError as error:
      if self._failure is None or last:
        end = "what it lacks is lost with this machine" if last else "it is tried again"
        _log.warning("%s: files of the run cannot be copied there: %s; %s", self.place, error.strerror, end)
      self._failure = error.strerror or str(error)
      return False
    if self._failure is not None:
      _log.warning("%s: takes the files of the run again", self.place)
    self._failure = None
    return True

  def _abandon(self, why: str) -> NoReturn:
    super()._abandon(f"{why}; in {self.place}")
