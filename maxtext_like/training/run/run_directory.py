"""The directory of one run: made and proved writable before anything is compiled, and held by one process at a time.

Two runs in one directory destroy each other's checkpoints, so the holder's name lies in ``run.lock``: host, process,
start. Whether the holder lives is seen in the process table of the same machine; from elsewhere by a heartbeat that
is watched for change, since the clocks of two hosts need not agree.

A holder that was stopped, or whose disk was away, may find another's name there, or none. So it looks at each beat and
before every write; whoever lost the directory ends at once and writes nothing more.
What must never be done by two, such as giving a checkpoint its name, is done in ``exclusive``: no takeover falls inside.
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
SHARED_SECONDS = 30.0  # network file systems keep what they know of a directory for so long
_GUARD_SECONDS = 20.0  # how long a new process waits for one that holds the guard, as for the rename of a checkpoint


def _start_ticks(pid: int) -> int | None:
  """Returns when a process started, in clock ticks since boot; None without /proc or without such a living process."""
  try:
    # The command name, in parentheses, may itself hold spaces and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])  # a zombie is dead, its parent only has not looked yet
  except (OSError, ValueError, IndexError):
    return None


def _read(path: str) -> str:
  try:
    return Path(path).read_text().strip()
  except OSError:
    return ""


def _identity() -> dict[str, Any]:
  """Returns what tells this process from every other, also after its number is given out again."""
  try:
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
    output_dir: relative paths are taken from the working directory.
    run_name: one path component; spaces and any letters are fine.

  Raises:
    UserError: ``run_name`` is not one path component.
  """

  def __init__(self, output_dir: str | Path, run_name: str):
    if not run_name or run_name in (".", "..") or "/" in run_name or "\0" in run_name or "\0" in str(output_dir):
      raise UserError(f"run_name {run_name!r} (in {str(output_dir)!r}): must be the name of one directory, without '/'")
    self.path = Path(os.path.abspath(Path(os.path.expanduser(output_dir)) / run_name))
    self._lock = self.path / LOCK_NAME
    self._identity: dict[str, Any] | None = None
    self._made: list[Path] = []  # directories that entering made, the innermost first
    self._inside = threading.RLock()
    self._depth = 0
    self._stop = threading.Event()
    self._heart: threading.Thread | None = None

  url = ""  # of one in a store

  @property
  def shown(self) -> str:
    """What people are told: from the working directory, or as a URL."""
    here = Path.cwd()
    return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)

  def saved(self) -> None:
    """A checkpoint is there."""

  @property
  def home(self) -> Path | Place:
    """Where the run is, for every process and machine."""
    return self.path

  @property
  def checkpoints(self) -> Path | Place:
    """Where the run's checkpoints lie."""
    return self.path / "checkpoints"

  def write_text(self, name: str, text: str) -> Path:
    """Writes one of the run's files atomically and returns its path; see ``require_held``."""
    self.require_held()
    atomic.write_text(self.path / name, text, self.fence if self._identity is not None else contextlib.nullcontext)
    return self.path / name

  def keep_earlier(self, name: str, text: str) -> None:
    """Copies a file that ``text`` is about to replace to the next free of config.1.yml, config.2.yml, ..., if it differs.

    Where that fails it is told, and the run goes on.
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
      _log.warning("%s: %s; the earlier one is not kept", path, error.strerror)

  def __enter__(self) -> "RunDirectory":
    """Makes the directory, proves that it can be written and takes the lock.

    Raises:
      UserError: unusable path, or a running process holds it (named in the message).
    """
    try:
      self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
      self.path.mkdir(parents=True, exist_ok=True)
      require_regular_files(self.path)
      self._acquire()
    except (OSError, ValueError) as error:
      reason = getattr(error, "strerror", None) or str(error)
      raise UserError(
        f"run directory {self.path}: cannot be used: {reason}; choose another with output_dir=... or run_name=..."
      ) from error
    self._heart = threading.Thread(target=self._beat, name="run-lock-heartbeat", daemon=True)
    self._heart.start()
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
    self._stop.set()
    if self._heart is not None:
      self._heart.join()
    why = None
    try:
      why = self._why_lost()
      if why is None:
        with self._guard():
          if self._why_lost() is None:
            self._lock.unlink()
            self._unmake()
    except OSError as failure:
      _log.warning("%s cannot be removed: %s", self._lock, failure.strerror)
    self._identity = None
    if why is None:
      return
    if error is None or isinstance(error, OSError):  # a file that cannot be written because its directory is gone
      raise RetryableError(f"run directory {self.path}: {why}") from error
    _log.error("run directory %s: %s", self.path, why)

  def _unmake(self) -> None:
    """Removes the directories that were made for this process, where nothing is left in them. Under the guard."""
    if not self._made or any(path.name != f"{LOCK_NAME}.guard" for path in self.path.iterdir()):
      return
    (self.path / f"{LOCK_NAME}.guard").unlink()
    with contextlib.suppress(OSError):  # another run is in there by now
      for path in self._made:
        path.rmdir()

  @property
  def holder(self) -> str:
    """What tells the process that holds it from every other."""
    return self._identity["token"] if self._identity else ""

  def require_shared(self, holder: str) -> None:
    """For the other processes of a run: looks whether their directory is the one that process 0 holds.

    Raises:
      UserError: it is not: each host has one of its own under this name.
    """
    deadline = time.monotonic() + SHARED_SECONDS
    found = None
    while time.monotonic() < deadline:  # a network disk shows new files late
      with contextlib.suppress(OSError):
        found = self._read_lock()
      if found is not None and found.get("token") == holder:
        return
      time.sleep(0.1)
    raise UserError(
      f"run directory {self.path}: on {platform.node()} it is not the one that process 0 holds; several processes need one "
      "directory that all of their hosts see\n  fix: output_dir=... on a disk that they share"
    )

  # Holding it.

  def require_held(self) -> None:
    """Returns when the directory is this process's; before every write into it. Else it ends the process, exit code 42.

    It reads the lock: within three heartbeats nobody can have taken the directory over, but it may have been removed, and
    made again by a save under way.

    Raises:
      OSError: the lock cannot be read, so nobody knows.
    """
    if self._identity is not None:
      self._look()

  @contextlib.contextmanager
  def fence(self) -> Iterator[None]:
    """Inside, the directory is this process's and cannot be taken over: for renames and removals, which are quick.

    A row that is appended only looks before it (``require_held``): who is stopped in here keeps others from taking over,
    which is worse than one row too many.

    Raises:
      OSError: the lock cannot be read, so nobody knows.
    """
    self._look()
    with self._guard():
      self._look()
      yield

  @contextlib.contextmanager
  def exclusive(self) -> Iterator[None]:
    """A ``fence`` for what others read as the run's: its checkpoints, wherever they are."""
    with self.fence():
      yield

  def _look(self) -> None:
    why = self._why_lost()
    if why is not None:
      self._abandon(why)

  def _why_lost(self) -> str | None:
    """Returns what became of the lock in a few words; None: it is this process's. OSError as the disk gives it."""
    try:
      holder = self._read_lock()
    except FileNotFoundError:
      what = f"its {LOCK_NAME} was removed" if self.path.is_dir() else "it was removed or renamed"
      return f"{what} while this run was going on"
    if holder == self._identity:
      return None
    return f"{name_of(holder or {})} took it over, because this process had not given a sign of life for a while"

  def _abandon(self, why: str) -> NoReturn:
    end_now(RetryableError(f"run directory {self.path}: {why}; this process stops here and writes nothing more into it"))

  @contextlib.contextmanager
  def _guard(self, seconds: float = float("inf")) -> Iterator[None]:
    """Orders processes and threads that look and act. Freed by the system when its holder dies.

    Raises:
      BlockingIOError: another process still has it after ``seconds``.
    """
    with self._inside:
      if self._depth:
        yield
        return
      # Opened anew each time, so that a forked data worker that outlives its trainer holds nothing.
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

  # Taking it.

  def _acquire(self) -> None:
    while True:
      holder = self._holder()
      # Judged outside the guard: watching a heartbeat takes a while, in which a living holder may need it.
      if holder is not None and self._alive(holder):
        raise self._in_use(holder)
      try:
        with self._guard(_GUARD_SECONDS):
          if self._holder() != holder:
            continue  # somebody was faster
          if holder is not None:
            _log.warning("%s: taking over the lock of %s, which is gone", self.path, name_of(holder))
          elif self._lock.exists():
            _log.warning("%s is not a lock file; replaced", self._lock)
          self._identity = _identity()
          atomic.write_text(self._lock, json.dumps(self._identity, indent=1) + "\n")
          return
      except BlockingIOError:
        raise self._in_use(holder or {}) from None

  def _in_use(self, holder: dict[str, Any]) -> UserError:
    name = name_of(holder)
    return UserError(f"run directory {self.path}: in use by {name}; wait for it, stop it, or choose another run_name")

  def _read_lock(self) -> dict[str, Any] | None:
    """Returns what the lock file says; None when that is not a lock (writes are atomic)."""
    try:
      holder = strict_json.loads(self._lock.read_bytes())
    except ValueError:
      return None
    return holder if isinstance(holder, dict) else None

  def _holder(self) -> dict[str, Any] | None:
    """Returns who the lock file names; None when there is none, or none that can be read."""
    try:
      return self._read_lock()
    except FileNotFoundError:
      return None

  def _alive(self, holder: dict[str, Any]) -> bool:
    if (known := lives_here(holder)) is not None:
      return known
    _log.warning("%s: held from %s; watching its heartbeat for %d s", self.path, holder.get("host"), _WATCH_SECONDS)
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
    """Returns when the lock was touched last, by its file server's clock; None without a lock."""
    try:
      with open(self._lock, "rb") as lock:  # opening makes a network file system look anew
        return os.fstat(lock.fileno()).st_mtime_ns
    except FileNotFoundError:
      return None

  def _beat(self) -> None:
    failing = False
    while not self._stop.wait(_HEARTBEAT_SECONDS):
      try:
        self._look()
        os.utime(self._lock)
      except OSError as error:
        if not failing:
          reason = error.strerror or os.strerror(error.errno or errno.EIO)
          _log.warning("%s: heartbeat failed: %s; trying on", self._lock, reason)
        failing = True
        continue
      if failing:
        _log.warning("%s: heartbeat works again", self._lock)
      failing = False


def require_regular_files(run: Path) -> None:
  """Refuse a directory with a pipe, a socket or a device in it: reading one never ends, or fills the memory. UserError."""
  for path in sorted(run.iterdir()):
    with contextlib.suppress(FileNotFoundError):  # a link to nowhere, or a file of a run that ends now
      if not (path.is_file() or path.is_dir()) and path.stat():
        raise UserError(not_regular(path))


def not_regular(path: Path) -> str:
  """The message about a file of a run that is neither a file nor a directory."""
  where = f" (a link to {path.resolve()})" if path.is_symlink() else ""
  return f"{path}{where} is a pipe, a socket or a device, not a regular file: a run cannot read or write it\n  fix: remove it"


def lives_here(holder: dict[str, Any]) -> bool | None:
  """Whether the holder of a lock lives, as this machine's process table has it; None: it is another's."""
  here = _identity()
  if holder.get("host") == here["host"] and holder.get("boot") != here["boot"]:
    return False  # the machine was restarted since
  if any(holder.get(key) != here[key] for key in ("host", "boot", "pid_namespace")):
    return None
  pid = holder.get("pid")
  if not isinstance(pid, int):
    return False
  if here["start_ticks"] is not None:
    return _start_ticks(pid) is not None and _start_ticks(pid) == holder.get("start_ticks")
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    return True
  return True


def name_of(holder: dict[str, Any]) -> str:
  """How messages call the holder of a lock."""
  return "process {pid} on {host}, started {started} ({command})".format_map(defaultdict(lambda: "(unknown)", holder))
