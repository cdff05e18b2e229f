"""The directory of one run: created and checked for writing before anything is compiled, and locked by one process at a time.

Two runs in one directory would destroy each other's checkpoints. The file ``run.lock`` therefore names the holder: host,
process and start time. On the same machine the process table shows whether the holder is alive. From another machine a
heartbeat shows
it: the file's time must change. Its value is not compared with the local clock, because clocks of two hosts may differ.

A holder that was suspended, or whose disk was unreachable, may find that another process took the lock or that it was removed.
So it checks the lock at each heartbeat and before every write. A process that lost the lock ends at once and writes nothing
more. Operations that two processes must never do, such as renaming a finished checkpoint, run in ``exclusive``, which blocks
takeovers.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from maxtext_like import atomic, strict_json
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.masking import masked
from maxtext_like.storage import Place
from maxtext_like.training.loop.watchdog import end_now
from maxtext_like.typed_command import typed_command

_log = logging.getLogger(__name__)
LOCK_NAME = "run.lock"
_HEARTBEAT_SECONDS = 5.0
_WATCH_SECONDS = 16.0  # three heartbeats
SHARED_SECONDS = 30.0  # network file systems cache directory contents for this long
_GUARD_SECONDS = 20.0  # a new process waits this long for one that holds the guard, for example while it renames a checkpoint


def _start_ticks(pid: int) -> int | None:
  """Return the start time of a process in clock ticks since boot; None without /proc or if it is not running."""
  try:
    # The command name is in parentheses and may itself contain spaces and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])  # a zombie is dead; its parent has not yet collected it
  except (OSError, ValueError, IndexError):
    return None


def _read(path: str) -> str:
  try:
    return Path(path).read_text().strip()
  except OSError:
    return ""


def _identity() -> dict[str, Any]:
  """Identify this process uniquely, also if its process number is used again."""
  try:
    # Process numbers are only valid inside their namespace.
    namespace = os.readlink("/proc/self/ns/pid")
  except OSError:
    namespace = ""
  return {
    "host": platform.node(),
    "boot": _read("/proc/sys/kernel/random/boot_id"),
    "pid_namespace": namespace,
    "pid": os.getpid(),
    "start_ticks": _start_ticks(os.getpid()),
    "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    "command": typed_command(),
    "token": secrets.token_hex(8),
  }


class RunDirectory:
  """``<output_dir>/<run_name>/``. As a context manager it holds the run's lock.

  Args:
    output_dir: relative to the working directory, or absolute.
    run_name: name of one directory; spaces and all letters are allowed.

  Raises:
    UserError: ``run_name`` is not the name of one directory.
  """

  def __init__(self, output_dir: str | Path, run_name: str):
    if not run_name or run_name in (".", "..") or "/" in run_name or "\0" in run_name or "\0" in str(output_dir):
      raise UserError(
        f"run_name {run_name!r} (in {str(output_dir)!r}): must be the name of one directory, without '/'\n  fix: run_name=NAME"
      )
    # The path must stay valid if the working directory changes.
    self.path = Path(os.path.abspath(Path(os.path.expanduser(output_dir)) / run_name))
    self._lock = self.path / LOCK_NAME
    self._identity: dict[str, Any] | None = None
    self._created: list[Path] = []  # directories that this process created, the innermost first
    # Threads of this process take the guard one at a time.
    self._inside = threading.RLock()
    self._depth = 0
    self._stop = threading.Event()
    self._heart: threading.Thread | None = None

  url = ""  # set for a remote directory

  @property
  def shown(self) -> str:
    """The path for messages, relative to the working directory if possible; or a URL."""
    here = Path.cwd()
    return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)

  def checkpoint_saved(self) -> None:
    """Called after a checkpoint was saved."""

  @property
  def home(self) -> Path | Place:
    """The location of the run, valid for every process and machine."""
    return self.path

  @property
  def checkpoints(self) -> Path | Place:
    """The directory of the run's checkpoints."""
    return self.path / "checkpoints"

  def write_text(self, name: str, text: str) -> Path:
    """Write one of the run's files atomically and return its path. See ``require_held``."""
    self.require_held()
    atomic.write_text(self.path / name, text, self.fence if self._identity is not None else contextlib.nullcontext)
    return self.path / name

  def keep_previous(self, name: str, text: str) -> None:
    """Keep a file that ``text`` is about to replace as config.1.yml, config.2.yml, ... (the next free name), if it differs.

    A failure is only logged.
    """
    path = self.path / name
    try:
      earlier = masked(path.read_text(encoding="utf-8", errors="backslashreplace"))  # earlier versions wrote secrets too
      if earlier != text:
        number = 1
        while (copy := path.with_stem(f"{path.stem}.{number}")).exists():
          number += 1
        self.write_text(copy.name, earlier)
    except FileNotFoundError:
      return
    except OSError as error:
      _log.warning("%s: %s; the previous file is not kept", path, error.strerror)

  def __enter__(self) -> "RunDirectory":
    """Create the directory, check that it is writable, and take the lock.

    Raises:
      UserError: the path is unusable, or a running process (named in the message) holds the lock.
    """
    try:
      # Remember which directories did not exist, to remove them if nothing is written.
      self._created = [path for path in (self.path, *self.path.parents) if not path.exists()]
      self.path.mkdir(parents=True, exist_ok=True)
      require_regular_files(self.path)
      self._acquire()
    except (OSError, ValueError) as error:
      reason = getattr(error, "strerror", None) or str(error)
      raise UserError(
        f"run directory {self.path} cannot be used: {reason}\n  fix: choose another with output_dir=... or run_name=..."
      ) from error
    # From here on a heartbeat keeps the lock visible to other machines.
    self._heart = threading.Thread(target=self._beat, name="run-lock-heartbeat", daemon=True)
    self._heart.start()
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
    # Stop the heartbeat, then remove the lock if it is still ours.
    self._stop.set()
    if self._heart is not None:
      self._heart.join()
    why = None
    try:
      # Another process may have taken over the lock, which must then stay. Check again while no other process can change it.
      why = self._why_lost()
      if why is None:
        with self._guard():
          if self._why_lost() is None:
            self._lock.unlink()
            self._remove_created()
    except OSError as failure:
      _log.warning("%s cannot be removed: %s", self._lock, failure.strerror)
    self._identity = None
    # Report a lost directory, but do not hide another error that is already being raised.
    if why is None:
      return
    if error is None or isinstance(error, OSError):  # an OSError may be a consequence of the lost directory
      raise RetryableError(f"run directory {self.path}: {why}") from error
    _log.error("run directory %s: %s", self.path, why)

  def _remove_created(self) -> None:
    """Remove the directories that this process created if they are empty. Needs the guard."""
    if not self._created or any(path.name != f"{LOCK_NAME}.guard" for path in self.path.iterdir()):
      return
    (self.path / f"{LOCK_NAME}.guard").unlink()
    with contextlib.suppress(OSError):  # another run may have started in one of them
      for path in self._created:
        path.rmdir()

  @property
  def holder(self) -> str:
    """The token of this process's lock; empty if it holds none."""
    return self._identity["token"] if self._identity else ""

  def require_shared(self, holder: str) -> None:
    """Check that this process sees the directory that process 0 has locked. Called by the other processes of a run.

    Raises:
      UserError: it does not: each host has its own directory of this name.
    """
    deadline = time.monotonic() + SHARED_SECONDS
    found = None
    while time.monotonic() < deadline:  # network file systems show new files late
      with contextlib.suppress(OSError):
        found = self._read_lock()
      if found is not None and found.get("token") == holder:
        return
      time.sleep(0.1)
    raise UserError(
      f"run directory {self.path}: on {platform.node()} it is not the directory that process 0 has locked; all processes of a "
      "run need one shared directory\n  fix: set output_dir to a directory on a disk that all hosts share"
    )

  # Holding the lock.

  def require_held(self) -> None:
    """Check before a write that this process still holds the lock. Otherwise end the process with exit code 42.

    The lock file is read each time. No other process can take it over within three heartbeats, but it may have been removed
    with its directory, and the directory created again by a save in progress.

    Raises:
      OSError: the lock file cannot be read, so its state is unknown.
    """
    if self._identity is not None:
      self._end_if_lost()

  @contextlib.contextmanager
  def fence(self) -> Iterator[None]:
    """Hold the directory and block takeovers inside the context. For renames and removals, which are fast.

    Appending a row only checks the lock before the write (``require_held``): a process that is suspended inside the fence
    blocks all others, which is worse than one surplus row.

    Raises:
      OSError: the lock file cannot be read, so its state is unknown.
    """
    self._end_if_lost()
    with self._guard():
      self._end_if_lost()
      yield

  @contextlib.contextmanager
  def exclusive(self) -> Iterator[None]:
    """A ``fence`` for the run's checkpoints, wherever they are."""
    with self.fence():
      yield

  def _end_if_lost(self) -> None:
    why = self._why_lost()
    if why is not None:
      self._abandon(why)

  def _why_lost(self) -> str | None:
    """Return how the lock was lost, or None if this process holds it. Raises OSError from the disk."""
    try:
      holder = self._read_lock()
    except FileNotFoundError:
      what = f"its {LOCK_NAME} was removed" if self.path.is_dir() else "it was removed or renamed"
      return f"{what} during the run"
    if holder == self._identity:
      return None
    return f"{holder_name(holder or {})} took it over, because this process had sent no heartbeat for some time"

  def _abandon(self, why: str) -> NoReturn:
    end_now(RetryableError(f"run directory {self.path}: {why}; this process ends and writes nothing more into it"))

  @contextlib.contextmanager
  def _guard(self, seconds: float = float("inf")) -> Iterator[None]:
    """Serialize processes and threads that check and then act. The system releases it if its holder dies.

    Raises:
      BlockingIOError: another process still holds it after ``seconds``.
    """
    with self._inside:
      # Nested use in the same thread.
      if self._depth:
        yield
        return
      # The file is opened each time, so that a forked data worker that outlives its trainer does not hold the lock.
      with open(self.path / f"{LOCK_NAME}.guard", "a", encoding="utf-8") as guard:
        deadline = time.monotonic() + seconds
        while True:
          try:
            fcntl.flock(guard, fcntl.LOCK_EX | (0 if seconds == float("inf") else fcntl.LOCK_NB))
            break
          except BlockingIOError:
            if time.monotonic() > deadline:
              raise
            time.sleep(0.05)
        self._depth += 1
        try:
          yield
        finally:
          self._depth -= 1

  # Taking the lock.

  def _acquire(self) -> None:
    while True:
      holder = self._holder()
      # Check outside the guard: watching a heartbeat takes time, and a living holder may need the guard.
      if holder is not None and self._alive(holder):
        raise self._in_use(holder)
      try:
        with self._guard(_GUARD_SECONDS):
          if self._holder() != holder:
            continue  # another process was faster
          if holder is not None:
            _log.warning("%s: taking over the lock of %s, which is no longer running", self.path, holder_name(holder))
          elif self._lock.exists():
            _log.warning("%s is not a valid lock file and is replaced", self._lock)
          self._identity = _identity()
          atomic.write_text(self._lock, json.dumps(self._identity, indent=1) + "\n")
          return
      except BlockingIOError:
        raise self._in_use(holder or {}) from None

  def _in_use(self, holder: dict[str, Any]) -> UserError:
    name = holder_name(holder)
    return UserError(f"run directory {self.path}: in use by {name}\n  fix: wait for it, stop it, or choose another run_name")

  def _read_lock(self) -> dict[str, Any] | None:
    """Return the contents of the lock file; None if they are invalid (writes are atomic)."""
    try:
      holder = strict_json.loads(self._lock.read_bytes())
    except ValueError:
      return None
    return holder if isinstance(holder, dict) else None

  def _holder(self) -> dict[str, Any] | None:
    """Return the process that the lock file names; None if there is no valid lock file."""
    try:
      return self._read_lock()
    except FileNotFoundError:
      return None

  def _alive(self, holder: dict[str, Any]) -> bool:
    # The process table of this machine knows.
    if (known := is_running_here(holder)) is not None:
      return known
    _log.warning("%s: locked from %s; watching its heartbeat for %d s", self.path, holder.get("host"), _WATCH_SECONDS)
    # Another machine: wait for a change of the heartbeat file's time.
    before = self._last_beat()
    deadline = time.monotonic() + _WATCH_SECONDS
    while time.monotonic() < deadline:
      time.sleep(min(0.5, _WATCH_SECONDS / 4))
      now = self._last_beat()
      if now is None:
        return False
      if now != before:
        return True
    return False

  def _last_beat(self) -> int | None:
    """Return the time of the last heartbeat by the file server's clock; None without a lock file."""
    try:
      with open(self._lock, "rb") as lock:  # opening makes a network file system refresh its cache
        return os.fstat(lock.fileno()).st_mtime_ns
    except FileNotFoundError:
      return None

  def _beat(self) -> None:
    failing = False
    while not self._stop.wait(_HEARTBEAT_SECONDS):
      try:
        # A process that lost its directory must end before it writes there.
        self._end_if_lost()
        os.utime(self._lock)
      # The storage may be unreachable for a while. Warn once, and try again at the next beat.
      except OSError as error:
        if not failing:
          reason = error.strerror or os.strerror(error.errno or errno.EIO)
          _log.warning("%s: heartbeat failed: %s; retrying", self._lock, reason)
        failing = True
        continue
      if failing:
        _log.warning("%s: heartbeat succeeded again", self._lock)
      failing = False


def require_regular_files(run: Path) -> None:
  """Raise UserError if something in a run directory cannot be the file that its name says.

  Reading a pipe, a socket or a device may never end or fill the memory. A directory with the name of a file cannot be read.
  """
  for path in sorted(run.iterdir()):
    with contextlib.suppress(FileNotFoundError):  # a broken link, or a file that another run just removed
      if path.is_dir():
        # goodput.json is only a statistic, which never ends a run.
        if path.suffix in (".json", ".jsonl", ".yml") and path.name != "goodput.json":
          raise UserError(f"{path} is a directory, not a file: a run cannot read or write it\n  fix: remove it")
      elif not path.is_file() and path.stat():
        raise UserError(not_regular(path))


def not_regular(path: Path) -> str:
  """Return the message about a file of a run that is not a regular file or directory."""
  where = f" (a link to {path.resolve()})" if path.is_symlink() else ""
  return f"{path}{where} is a pipe, a socket or a device, not a regular file: a run cannot read or write it\n  fix: remove it"


def is_running_here(holder: dict[str, Any]) -> bool | None:
  """Return True if the holder of a lock is running on this machine, False if not, None if it is on another machine."""
  # Same host: another boot means that the process is gone.
  here = _identity()
  if holder.get("host") == here["host"] and holder.get("boot") != here["boot"]:
    return False  # the machine was restarted
  if any(holder.get(key) != here[key] for key in ("host", "boot", "pid_namespace")):
    return None
  # Same machine and namespace: the start time distinguishes processes with the same number.
  pid = holder.get("pid")
  if not isinstance(pid, int):
    return False
  # The system uses process numbers again. The start time shows whether it is the same process.
  if here["start_ticks"] is not None:
    return _start_ticks(pid) is not None and _start_ticks(pid) == holder.get("start_ticks")
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    return True
  return True


def holder_name(holder: dict[str, Any]) -> str:
  """Describe the holder of a lock for messages."""
  return "process {pid} on {host}, started {started} ({command})".format_map(defaultdict(lambda: "(unknown)", holder))
