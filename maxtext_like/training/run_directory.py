"""The directory of one run: made and proved writable before anything is compiled, and held by one process at a time.

Two runs in one directory destroy each other's checkpoints, so the holder's name lies in ``run.lock``: host, process,
start. Whether the holder lives is seen in the process table of the same machine; from elsewhere by a heartbeat that
is watched for change, since the clocks of two hosts need not agree.
"""

import fcntl
import json
import logging
import os
import platform
import shlex
import sys
import threading
import time
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

from maxtext_like.checkpoint import atomic
from maxtext_like.errors import UserError

_log = logging.getLogger(__name__)
LOCK_NAME = "run.lock"
_HEARTBEAT_SECONDS = 5.0
_WATCH_SECONDS = 16.0  # three heartbeats


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
    "command": shlex.join(sys.argv),
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
    self._stop = threading.Event()
    self._heart: threading.Thread | None = None

  @property
  def checkpoints(self) -> Path:
    """Where the run's checkpoints lie."""
    return self.path / "checkpoints"

  def write_text(self, name: str, text: str) -> Path:
    """Writes one of the run's files atomically and returns its path."""
    atomic.write_text(self.path / name, text)
    return self.path / name

  def __enter__(self) -> "RunDirectory":
    """Makes the directory, proves that it can be written and takes the lock.

    Raises:
      UserError: unusable path, or a running process holds it (named in the message).
    """
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      self._acquire()
    except (OSError, ValueError) as error:
      reason = getattr(error, "strerror", None) or str(error)
      raise UserError(
        f"run directory {self.path}: cannot be used: {reason}; choose another with output_dir=... or run_name=..."
      ) from error
    self._heart = threading.Thread(target=self._beat, name="run-lock-heartbeat", daemon=True)
    self._heart.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._stop.set()
    if self._heart is not None:
      self._heart.join()
    if self._holder() == self._identity:
      self._lock.unlink(missing_ok=True)
    self._identity = None

  def _acquire(self) -> None:
    # The flock only orders processes that look at the same moment; it is released when the look is over, so a forked
    # data worker that outlives its trainer holds nothing.
    with open(self.path / f"{LOCK_NAME}.guard", "a", encoding="utf-8") as guard:
      fcntl.flock(guard, fcntl.LOCK_EX)
      holder = self._holder()
      if holder is not None:
        name = "process {pid} on {host}, started {started} ({command})".format_map(defaultdict(str, holder))
        if self._alive(holder):
          raise UserError(f"run directory {self.path}: in use by {name}; wait for it, stop it, or choose another run_name")
        _log.warning("%s: taking over the lock of %s, which is gone", self.path, name)
      self._identity = _identity()
      atomic.write_text(self._lock, json.dumps(self._identity, indent=1) + "\n")

  def _holder(self) -> dict[str, Any] | None:
    """Returns what the lock file says; None when there is none, or none that can be read (writes are atomic)."""
    try:
      holder = json.loads(self._lock.read_text(encoding="utf-8"))
    except FileNotFoundError:
      return None
    except ValueError:
      _log.warning("%s is not a lock file; replaced", self._lock)
      return None
    return holder if isinstance(holder, dict) else None

  def _alive(self, holder: dict[str, Any]) -> bool:
    here = _identity()
    if holder.get("host") == here["host"] and holder.get("boot") != here["boot"]:
      return False  # the machine was restarted since
    if all(holder.get(key) == here[key] for key in ("host", "boot", "pid_namespace")):
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
    _log.warning("%s: held from %s; watching its heartbeat for %d s", self.path, holder.get("host"), _WATCH_SECONDS)
    before = self._lock.stat().st_mtime_ns
    deadline = time.monotonic() + _WATCH_SECONDS
    while time.monotonic() < deadline:
      time.sleep(0.5)
      if not self._lock.exists():
        return False
      if self._lock.stat().st_mtime_ns != before:
        return True
    return False

  def _beat(self) -> None:
    while not self._stop.wait(_HEARTBEAT_SECONDS):
      try:
        os.utime(self._lock)
      except OSError as error:
        # Nothing to save here: the directory is gone or its disk is away, and the next write of the run will say so.
        _log.warning("%s: heartbeat failed: %s", self._lock, error.strerror)
        return
