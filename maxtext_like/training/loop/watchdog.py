"""Time limits for what may hang: compiling, a step, a save, the way out. What takes longer ends the process, exit code 42.

A device that stopped, a disk whose ``fsync`` never returns: nothing inside the blocked thread can notice, and joining it
would hang too. So a thread of its own counts the seconds, and at the limit writes down where every thread is and leaves
through ``os._exit``. Checkpoints need no farewell: the newest whole one stays what it is.

Seconds are those in which this process could run: stopped (SIGSTOP, Ctrl-Z, a sleeping laptop) it does not age.
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
_FAREWELL_SECONDS = 2.0  # for last words; whoever does not read them by then has lost them
_BYTES_PER_SECOND = 50e6  # a slow network disk: what reads or writes a state may take so much longer
_GROWING = ("read", "save", "exit")
_LIMIT_OF = {"first_step": "compile", "read": "compile"}  # kinds with the limit of another
_IN_A_STEP = ("first_step", "step", "data")  # they end by their own limits, after a signal too


def end_now(error: ExitError, write: Callable[[], None] | None = None) -> NoReturn:
  """Ends the process from any thread and at once: nothing is waited for, closed or written any more.

  For when going on would do harm, as in a directory that is another's, or is not possible, as behind a write that never
  returns. Standard error gets the message, as far as it takes it: a full pipe must not keep us.

  Args:
    error: its message and its exit code.
    write: further last words, which may block for ever.
  """
  writers = [threading.Thread(target=_to_standard_error, args=(f"\nerror: {error}\n",), daemon=True)]
  if write is not None:
    writers.append(threading.Thread(target=write, daemon=True))
  for writer in writers:
    writer.start()
  for writer in writers:
    writer.join(_FAREWELL_SECONDS)
  os._exit(error.exit_code)


def _to_standard_error(text: str) -> None:
  with contextlib.suppress(OSError):  # closed, or its disk is full: there is nobody left to tell
    left = text.encode(errors="replace")
    while left:
      left = left[os.write(2, left) :]


def stacks() -> str:
  """Where every thread is, the newest call first, without reading a source file: its disk may be the one that hangs."""
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
  """Watches one run while it is entered; ``watch`` says what a thread is at. Of nested ones the innermost counts.

  Args:
    limits: seconds by kind (compile, step, data, save, exit); 0, or a kind that is not there: no limit.

  Attributes:
    state_bytes: of a checkpoint; reading one, a save and the way out may take a second more for every 50 MB.
    directory: of the run, for a copy of the stacks; None until it is this process's.
    stop: from its signal on the way out is counted, outside of a step; who steps says ``leave`` at the end of the last one.
  """

  def __init__(self, limits: Mapping[str, float] = {}):
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
    """Seconds that a kind may take; what reads or writes a state has more for a large one. Infinite without a limit."""
    seconds = self._limits.get(_LIMIT_OF.get(kind, kind), 0)
    if seconds <= 0:
      return float("inf")
    return seconds + (self.state_bytes / _BYTES_PER_SECOND if kind in _GROWING else 0.0)

  @contextlib.contextmanager
  def watch(self, kind: str, what: str | None = None, *, thread: int | None = None) -> Iterator[None]:
    """Limits what a thread does inside.

    Args:
      kind: compile, first_step (which compiles too), step, data, read (of a state), save or exit.
      what: for the message; default: the kind.
      thread: its identifier, where the calling one works for it; None: the calling one.
    """
    entry, thread = _Watched(kind, what or kind), thread or threading.get_ident()
    with self._lock:
      self._watched.setdefault(thread, []).append(entry)
    try:
      yield
    finally:
      with self._lock:
        self._watched[thread].remove(entry)  # not the last where the thread left this one to itself
        if not self._watched[thread]:
          del self._watched[thread]

  def again(self, kind: str | None = None, what: str | None = None, *, thread: int | None = None) -> None:
    """A thread got on with what it is at, which counts anew from here; it may be something else by now.

    Args:
      kind: as ``watch``; None: the same.
      what: as ``watch``; None: the same.
      thread: its identifier, where another one does what it waits for; None: the calling one.
    """
    with self._lock:
      for entry in self._watched.get(thread or threading.get_ident(), [])[-1:]:
        entry.kind, entry.what = kind or entry.kind, what or entry.what
        entry.seconds, entry.warned = 0.0, False

  def leave(self) -> None:
    """From here on the way out is counted, as after a signal."""
    self._exit = self._exit or _Watched("exit", "the way out of the run")

  def _run(self) -> None:
    before = time.monotonic()
    while not self._ended.wait(_TICK_SECONDS):
      now = time.monotonic()
      self._tick(min(now - before, 4 * _TICK_SECONDS))  # a longer gap: the process was stopped, or had no core
      before = now

  def _tick(self, seconds: float) -> None:
    with self._lock:
      counted = [entries[-1] for entries in self._watched.values()]
    if self.stop is not None and self.stop.requested is not None and not any(e.kind in _IN_A_STEP for e in counted):
      self.leave()
    with self._lock:
      if self._exit is not None:
        counted.append(self._exit)
      for entry in counted:
        entry.seconds += seconds
    for entry in counted:
      limit = self.limit(entry.kind)
      if entry.seconds >= limit:
        self._end(entry, limit)
      if entry.seconds >= limit / 2 and not entry.warned:
        entry.warned = True
        say_on_stderr(
          f"\nwarning: {entry.what} takes {entry.seconds:.0f} s by now; after {limit:.0f} s the run ends with exit code 42"
        )

  def _end(self, entry: _Watched, limit: float) -> NoReturn:
    where = stacks()
    interrupted = self.stop is not None and self.stop.requested == signal.SIGINT
    place = ""
    if self.directory is not None:
      place = f", also in {self.directory / STACKS_NAME}"
    key = f"watchdog_{_LIMIT_OF.get(entry.kind, entry.kind)}_seconds"
    error = (InterruptedRunError if interrupted else RetryableError)(
      f"{entry.what} takes longer than {limit:.0f} s ({key}): the run ends here, and the newest whole "
      f"checkpoint stays as it is; the same command goes on from there\nwhere every thread was{place}\n{where}"
    )
    end_now(error, lambda: self._keep(f"{error}\n"))

  def _keep(self, text: str) -> None:
    if self.directory is not None:
      with contextlib.suppress(OSError):  # the disk may be what is broken; standard error has it
        (self.directory / STACKS_NAME).write_text(text, encoding="utf-8")


_end_is_watched = threading.Lock()


def _watch_the_end_of_the_program(limit: float) -> None:
  """Ends a program whose main thread is done and which does not end within ``limit`` seconds; of several, the first counts."""
  if limit == float("inf") or not _end_is_watched.acquire(blocking=False):
    return

  def wait(seconds: float, tell: bool) -> None:
    threading.main_thread().join()
    time.sleep(seconds)
    if tell:
      _to_standard_error(f"\nerror: the program did not end within {limit:.0f} s (watchdog_exit_seconds)\n{stacks()}\n")
    os._exit(RetryableError.exit_code)

  # An interpreter that ends starts no threads any more, so the one for last words that nobody takes is here from now on.
  for seconds, tell in ((limit, True), (limit + _FAREWELL_SECONDS, False)):
    threading.Thread(target=wait, args=(seconds, tell), name="watchdog-end", daemon=True).start()
