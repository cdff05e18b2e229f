"""Time limits for operations that may hang: compilation, a step, a save, the shutdown. At the limit the process ends, exit
code 42.

A blocked thread cannot notice that a device stopped or that a disk's ``fsync`` never returns, and joining it would hang too. A
separate thread therefore measures the time. At the limit it records the stacks of all threads and ends the process with
``os._exit``. Checkpoints need no cleanup: the newest complete one stays valid.

Only time in which this process could run counts: a suspended process (SIGSTOP, Ctrl-Z, a sleeping laptop) does not time out.
"""

import contextlib
import faulthandler
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from maxtext_like.errors import ExitError, InterruptedRunError, RetryableError
from maxtext_like.training.loop.signals import StopRequest
from maxtext_like.training.sinks.output import say_on_stderr

STACKS_NAME = "stacks.txt"
_TICK_SECONDS = 0.5
_FAREWELL_SECONDS = 2.0  # maximum time for writing the last messages
_BYTES_PER_SECOND = 50e6  # of a slow network disk; extends the limits of reading or writing a state
_GROWING = ("read", "save", "exit")
_LIMIT_OF = {"first_step": "compile", "read": "compile"}  # kinds that use the limit of another kind
_IN_A_STEP = ("first_step", "step", "data")  # these keep their own limits after a stop request


def end_now(error: ExitError, write: Callable[[], None] | None = None) -> NoReturn:
  """End the process from any thread at once, without waiting, closing or writing anything else.

  Use it if continuing would do harm, for example in a directory that another process has taken over, or is impossible, for
  example after a write that never returns. The message goes to standard error, unless that blocks.

  Args:
    error: provides the message and the exit code.
    write: writes further last messages; it may block forever.
  """
  # Write on threads, because a full pipe or a dead disk would block this one.
  writers = [threading.Thread(target=_to_standard_error, args=(f"\nerror: {error}\n",), daemon=True)]
  if write is not None:
    writers.append(threading.Thread(target=write, daemon=True))
  for writer in writers:
    writer.start()
  for writer in writers:
    writer.join(_FAREWELL_SECONDS)
  os._exit(error.exit_code)


def _to_standard_error(text: str) -> None:
  with contextlib.suppress(OSError):  # standard error is closed or its disk is full
    left = text.encode(errors="replace")
    while left:
      left = left[os.write(2, left) :]


def stacks() -> str:
  """Return the stacks of all threads, newest call first. Reads no source files, because their disk may be the one that
  hangs."""
  # faulthandler writes to a file descriptor, so dump into memory and read it back.
  names = "".join(f"  0x{thread.ident or 0:016x} {thread.name}\n" for thread in threading.enumerate())
  with tempfile.TemporaryFile() if not hasattr(os, "memfd_create") else open(os.memfd_create("stacks"), "w+b") as file:
    faulthandler.dump_traceback(file, all_threads=True)
    file.seek(0)
    return f"threads:\n{names}{file.read().decode(errors='replace')}"


@dataclass(eq=False)
class _Watched:
  kind: str
  what: str
  seconds: float = 0.0
  warned: bool = False


class Watchdog(contextlib.AbstractContextManager["Watchdog"]):
  """Watches one run while it is entered. ``watch`` sets what a thread is doing; of nested ones the innermost counts.

  Args:
    limits: seconds by kind (compile, step, data, save, exit). 0 or a missing kind means no limit.

  Attributes:
    state_bytes: size of a checkpoint; limits of reading, saving and shutdown are extended by a second per 50 MB.
    directory: run directory for a copy of the stacks; None until this process holds it.
    stop: the stop request. After a signal the shutdown limit counts, except during a step; the loop calls ``begin_shutdown``
      after
      its last step.
  """

  def __init__(self, limits: Mapping[str, float] = {}):
    # Threads and what they are doing, innermost last.
    self._limits = limits
    self._lock = threading.Lock()
    self._watched: dict[int, list[_Watched]] = {}
    self._exit: _Watched | None = None
    self._ended = threading.Event()
    self._thread: threading.Thread | None = None
    self.state_bytes = 0
    self.directory: Path | None = None
    self.stop: StopRequest | None = None

  def __enter__(self) -> "Watchdog":
    self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._ended.set()
    if self._thread is not None:
      self._thread.join()
    _watch_the_end_of_the_program(self.limit("exit"))

  def limit(self, kind: str) -> float:
    """Return the limit of a kind in seconds, extended for reading or writing a large state. Infinite without a limit."""
    # A limit of 0 means none. Large states get more time.
    seconds = self._limits.get(_LIMIT_OF.get(kind, kind), 0)
    if seconds <= 0:
      return float("inf")
    return seconds + (self.state_bytes / _BYTES_PER_SECOND if kind in _GROWING else 0.0)

  @contextlib.contextmanager
  def watch(self, kind: str, what: str | None = None, *, thread: int | None = None) -> Iterator[None]:
    """Limit the time that a thread spends inside the context.

    Args:
      kind: compile, first_step (includes compilation), step, data, read (of a state), save or exit.
      what: name for the message; default: the kind.
      thread: identifier of the thread that waits for this work; default: the calling thread.
    """
    # Entries of a thread are nested; the innermost one counts.
    entry, thread = _Watched(kind, what or kind), thread or threading.get_ident()
    with self._lock:
      self._watched.setdefault(thread, []).append(entry)
    try:
      yield
    finally:
      with self._lock:
        self._watched[thread].remove(entry)  # not necessarily the last one, if the thread was abandoned
        if not self._watched[thread]:
          del self._watched[thread]

  def restart(self, kind: str | None = None, what: str | None = None, *, thread: int | None = None) -> None:
    """Record progress of a thread: its time starts again from 0. It may be doing something else from now on.

    Args:
      kind: as in ``watch``; None for the same.
      what: as in ``watch``; None for the same.
      thread: identifier of the waiting thread if another one makes the progress; default: the calling thread.
    """
    with self._lock:
      for entry in self._watched.get(thread or threading.get_ident(), [])[-1:]:
        entry.kind, entry.what = kind or entry.kind, what or entry.what
        entry.seconds, entry.warned = 0.0, False

  def begin_shutdown(self) -> None:
    """Start the shutdown limit, as after a signal."""
    self._exit = self._exit or _Watched("exit", "the shutdown of the run")

  def _run(self) -> None:
    before = time.monotonic()
    while not self._ended.wait(_TICK_SECONDS):
      # Limit the counted time, so that a suspended process does not time out.
      now = time.monotonic()
      self._tick(min(now - before, 4 * _TICK_SECONDS))  # after a longer gap the process was suspended or had no CPU time
      before = now

  def _tick(self, seconds: float) -> None:
    with self._lock:
      # The current work of each thread.
      counted = [entries[-1] for entries in self._watched.values()]
    # After a stop request the shutdown limit counts, except during a step.
    if self.stop is not None and self.stop.requested is not None and not any(e.kind in _IN_A_STEP for e in counted):
      self.begin_shutdown()
    with self._lock:
      # Advance all counters by the same time.
      if self._exit is not None:
        counted.append(self._exit)
      for entry in counted:
        entry.seconds += seconds
    for entry in counted:
      # End at the limit; warn once at half of it.
      limit = self.limit(entry.kind)
      if entry.seconds >= limit:
        self._end(entry, limit)
      if entry.seconds >= limit / 2 and not entry.warned:
        entry.warned = True
        say_on_stderr(
          f"\nwarning: {entry.what} has taken {entry.seconds:.0f} s; after {limit:.0f} s the run ends with exit code 42"
        )

  def _end(self, entry: _Watched, limit: float) -> NoReturn:
    # Stacks first: they show where each thread hangs.
    where = stacks()
    interrupted = self.stop is not None and self.stop.requested == signal.SIGINT
    place = ""
    if self.directory is not None:
      place = f", also in {self.directory / STACKS_NAME}"
    # Name the key that sets the limit.
    kind = _LIMIT_OF.get(entry.kind, entry.kind)
    key = f"watchdog_{kind}_seconds"
    # A run that Ctrl-C stopped keeps its exit code.
    error = (InterruptedRunError if interrupted else RetryableError)(
      f"{entry.what} takes longer than {limit:.0f} s ({key}={self._limits.get(kind, 0):g}): the run ends; its newest complete "
      f"checkpoint is unchanged\n  fix: run the same command again, which resumes the run, or raise {key}\n"
      f"stacks of all threads{place}:\n{where}"
    )
    end_now(error, lambda: self._keep(f"{error}\n"))

  def _keep(self, text: str) -> None:
    if self.directory is not None:
      with contextlib.suppress(OSError):  # the disk may be the cause; standard error has the text as well
        (self.directory / STACKS_NAME).write_text(text, encoding="utf-8")


_end_is_watched = threading.Lock()


def _watch_the_end_of_the_program(limit: float) -> None:
  """End a program that does not end within ``limit`` seconds after its main thread. The first call counts."""
  if limit == float("inf") or not _end_is_watched.acquire(blocking=False):
    return

  # Waits for the main thread, then gives the rest of the program its time.
  def wait(seconds: float, tell: bool) -> None:
    threading.main_thread().join()
    time.sleep(seconds)
    if tell:
      _to_standard_error(f"\nerror: the program did not end within {limit:.0f} s (watchdog_exit_seconds)\n{stacks()}\n")
    os._exit(RetryableError.exit_code)

  # Threads cannot be started while the interpreter shuts down, so both threads are started now.
  for seconds, tell in ((limit, True), (limit + _FAREWELL_SECONDS, False)):
    threading.Thread(target=wait, args=(seconds, tell), name="watchdog-end", daemon=True).start()
