"""A run directory in gs:// or s3://: files are written locally and copied to the store in the background.

Objects cannot be appended to. Metrics, events and other files are therefore written to a local directory, as in a local run,
and a thread copies changed files. The store has the authoritative version: a start begins with its files. Checkpoints and the
files of a failed step are written to the store directly. ``RemoteLock`` is the lock of such a directory.
"""

import contextlib
import json
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from maxtext_like import local_copies
from maxtext_like.errors import RefusedCredentialsError, UserError
from maxtext_like.storage import Place, accepted, failed, is_first_report, refusal
from maxtext_like.training.run.run_directory import LOCK_NAME, SHARED_SECONDS, RunDirectory, holder_name, is_running_here

_log = logging.getLogger(__name__)
_COPY_SECONDS, _LAST_RETRY_SECONDS = 15.0, 300.0
_LEAVE_SECONDS = 60.0
BEAT_SECONDS = 10.0
WATCH_SECONDS = 45.0  # four beats, because a request may take long
_LOOK_SECONDS = 2.0
_KEPT_HERE = ("profile", LOCK_NAME, f"{LOCK_NAME}.guard")  # large, or specific to this machine


class RemoteRunDirectory(RunDirectory):
  """``gs://bucket/runs/<run_name>/``. As a context manager it holds the run's lock, locally and in the store.

  Args:
    output_dir: for example ``gs://bucket/runs``.
    run_name: name of one directory.

  Raises:
    UserError: ``run_name`` is not the name of one directory.
  """

  def __init__(self, output_dir: str, run_name: str):
    # Local files are in a fixed folder for this store, so that the next start finds them.
    self.place = Place(output_dir)
    super().__init__(local_copies.folder().parent / "runs" / self.place.protocol / "/".join(self.place.parts), run_name)
    self.place = self.place / run_name
    self.url = str(self.place)
    self._remote: RemoteLock | None = None
    # State of the copying thread.
    self._copied: dict[str, tuple[int, int]] = {}  # {name: (time, size) when it was copied}
    self._wake = threading.Condition()
    self._asked = self._ending = self._refused = False
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
      # The store's lock comes after the local one, and before the local files are replaced.
      lock = RemoteLock(self.place / LOCK_NAME, self._identity, is_running_here, self._abandon)
      if (holder := lock.acquire()) is not None:
        raise UserError(
          f"run directory {self.place}: in use by {holder_name(holder)}\n"
          "  fix: wait for it, stop it, or choose another run_name"
        )
      self._remote = lock
      self._fetch()
    except OSError as error:
      self.__exit__(None, None, None)
      raise failed(error, writes=True) from error
    except BaseException:
      self.__exit__(None, None, None)
      raise
    # Copy in the background.
    self._copier = threading.Thread(target=self._copy_on, name="run-files", daemon=True)
    self._copier.start()
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
    with self._wake:
      self._ending = True
      self._refused = isinstance(error, RefusedCredentialsError)
      self._wake.notify_all()
    # Release the remote lock on a thread, because the store may not respond.
    if self._remote is not None:
      last = threading.Thread(target=self._leave, name="run-files-end", daemon=True)
      last.start()
      last.join(_LEAVE_SECONDS)
      if last.is_alive():
        _log.warning("%s: the store does not respond; files it lacks are in %s until the next start", self.place, self.path)
    self._remote = None
    super().__exit__(kind, error, trace)

  def _leave(self) -> None:
    """Copy the final files and release the lock."""
    lock = self._remote
    assert lock is not None
    if self._copier is not None:  # otherwise the local files are not yet those of the store
      self._copier.join()
      self._copy_changed(last=True)
    try:
      lock.release()
    except OSError as error:
      if is_first_report(error) and not (self._refused and refusal(error, self.url)):
        _log.warning("%s cannot be removed: %s", error.filename, error.strerror)

  def require_shared(self, holder: str) -> None:
    # A shared file system may show a new file to other hosts only after a while.
    deadline = time.monotonic() + SHARED_SECONDS
    while time.monotonic() < deadline:
      with contextlib.suppress(OSError):
        found = holder_of(self.place / LOCK_NAME)
        if found is not None and found.get("token") == holder:
          return
      time.sleep(0.5)
    raise UserError(
      f"run directory {self.place}: on {platform.node()} it does not contain the lock that process 0 holds\n"
      "  fix: set the same output_dir on all hosts, at a place that all of them can read"
    )

  @contextlib.contextmanager
  def exclusive(self) -> Iterator[None]:
    """Check that this process held the run a moment ago. A store has no lock that could block others for longer."""
    with super().exclusive():
      if self._remote is not None and (why := self._remote.why_lost()) is not None:
        self._abandon(why)
      yield

  def checkpoint_saved(self) -> None:
    """Copy the metrics rows of a saved checkpoint at once."""
    with self._wake:
      self._asked = True
      self._wake.notify_all()

  # The files.

  def _fetch(self) -> None:
    """Replace the local files by those of the store."""
    # Remove local files that the store does not have, then fetch the store's.
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
      # Skip temporary files and those that stay on this machine.
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
      # Retry less and less often while the store fails.
      wait = _COPY_SECONDS if self._copy_changed() else min(2 * wait, _LAST_RETRY_SECONDS)

  def _copy_changed(self, *, last: bool = False) -> bool:
    """Copy every file that changed since its last copy. Returns True if all copies succeeded."""
    try:
      for name, state in list(self._files()):
        if self._copied.get(name) == state:
          continue
        with contextlib.suppress(FileNotFoundError):
          content = (self.path / name).read_bytes()
          if name.endswith(".jsonl"):
            content = content[: content.rfind(b"\n") + 1]  # an incomplete row is copied next time
          (self.place / name).write_bytes(content)
          self._copied[name] = state
      # Remove files that were removed locally.
      for name in set(self._copied) - {name for name, _ in self._files()}:
        (self.place / name).remove()
        del self._copied[name]
    except OSError as error:
      # Report a failure once, and at the end, unless the error that ends the run says it.
      said = (self._refused and refusal(error, self.url)) or not (is_first_report(error) or last)
      if (self._failure is None or last) and not said:
        end = "files it lacks are lost with this machine" if last else "the copy is retried"
        _log.warning("%s: files of the run cannot be copied: %s; %s", self.place, error.strerror, end)
      self._failure = error.strerror or str(error)
      return False
    if self._failure is not None:
      accepted(self.url)
      _log.warning("%s: files of the run can be copied again", self.place)
    self._failure = None
    return True

  def _abandon(self, why: str) -> NoReturn:
    super()._abandon(f"{why}; in {self.place}")


class RemoteLock:
  """The lock of a run in a store: an object that names the holder, created on condition that it does not exist.

  The holder rewrites it every ``BEAT_SECONDS``, on condition that the object is unchanged since its own last write. A process
  that wants the run watches the object. If it does not change, the process replaces it, on condition that it is still the
  watched version. Of several processes that write at the same time only one succeeds; the store reports failure to the others.

  Args:
    place: location of the object.
    identity: identifies the holder uniquely: JSON values with a "token".
    lives: returns whether a holder is running, or None if this machine cannot know.
    lost: called from the heartbeat thread with an explanation if another process has taken the lock.
  """

  def __init__(
    self, place: Place, identity: dict[str, Any], lives: Callable[[dict[str, Any]], bool | None], lost: Callable[[str], None]
  ):
    self._place, self._identity, self._lives, self._lost = place, identity, lives, lost
    self._version = ""
    self._beats = 0
    self._writing = threading.Lock()
    self._stop = threading.Event()
    self._thread: threading.Thread | None = None

  def acquire(self) -> dict[str, Any] | None:
    """Take the lock and keep it. Returns the running holder if there is one, or None if the lock is ours.

    Raises:
      OSError: from the store.
      UserError: the store does not support conditional writes.
    """
    while True:
      # Create the object if there is none. The store lets only one process succeed.
      entry = self._place.entry()
      try:
        if entry is None:
          self._version = self._place.create(self._content())
          self._require_conditions()
          break
        # Respect a running holder and replace a dead one.
        holder = holder_of(self._place)
        if holder is not None and self._living(holder, entry.version):
          return holder
        self._version = self._place.replace(self._content(), entry.version)
        _log.warning("%s: taken over from a holder that is no longer running", self._place)
        break
      except (FileExistsError, FileNotFoundError):
        continue  # another process was faster
    self._thread = threading.Thread(target=self._beat, name="remote-lock", daemon=True)
    self._thread.start()
    return None

  def why_lost(self) -> str | None:
    """Read the object and return how the lock was lost, or None if it is ours. Raises OSError from the store."""
    try:
      holder = holder_of(self._place)
    except FileNotFoundError:
      return "its lock was removed during the run"
    if holder is not None and holder.get("token") == self._identity["token"]:
      return None
    return f"process {(holder or {}).get('pid')} on {(holder or {}).get('host')} took it over"

  def release(self) -> None:
    """Release the lock if it is still ours. Raises OSError from the store."""
    self._stop.set()
    with self._writing:
      if self.why_lost() is None:
        self._place.remove()

  def _require_conditions(self) -> None:
    """Check that the store supports conditional writes. Some S3-compatible stores ignore the condition."""
    try:
      # The lock exists already, so this write must fail.
      self._place.create(b"{}")
    except FileExistsError:
      return
    self._place.remove()
    raise UserError(
      f"{self._place}: the store overwrites an existing object although the request forbids it (If-None-Match)\n"
      "  why: two runs could then use the same directory\n"
      "  fix: set output_dir to a local directory, and checkpoint_mirror to this store"
    )

  def _content(self) -> bytes:
    return json.dumps({**self._identity, "beats": self._beats}, indent=1).encode()

  def _living(self, holder: dict[str, Any], version: str) -> bool:
    # Same machine: its process table knows.
    if (known := self._lives(holder)) is not None:
      return known
    _log.warning("%s: held from %s; watching it for %d s", self._place, holder.get("host"), WATCH_SECONDS)
    # Another machine: wait for a heartbeat.
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
      time.sleep(min(_LOOK_SECONDS, WATCH_SECONDS / 4))
      entry = self._place.entry()
      if entry is None:
        return False
      if entry.version != version:
        return True
    return False

  def _beat(self) -> None:
    failing = False
    while not self._stop.wait(BEAT_SECONDS):
      try:
        with self._writing:
          if self._stop.is_set():
            return
          # Each beat changes the content, so that watchers see a new version.
          self._beats += 1
          self._version = self._place.replace(self._content(), self._version)
      except FileExistsError:
        try:
          # The object has changed: find out whether another process took it.
          why = self.why_lost()
          if why is None:  # an earlier write succeeded although its response was lost
            entry = self._place.entry()
            self._version = entry.version if entry is not None else ""
            continue
        except OSError:
          continue
        self._lost(why)
        return
      except OSError as error:
        if not failing and is_first_report(error):
          _log.warning("%s: heartbeat failed: %s; retrying", self._place, error.strerror)
          failing = True
        continue
      # Report the recovery once.
      if failing:
        _log.warning("%s: heartbeat succeeded again", self._place)
      failing = False


def holder_of(place: Place) -> dict[str, Any] | None:
  """Return the holder that a lock object names; None if the object is invalid. Raises OSError if there is no object."""
  try:
    found = json.loads(place.read_bytes())
  except ValueError:
    return None
  return found if isinstance(found, dict) else None
