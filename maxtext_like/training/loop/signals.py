"""SIGTERM, Ctrl-C and a terminal that goes away ask the loop to stop after its step; asked twice, the process ends at once.

A SIGTERM or Ctrl-C within a second of the first signal is the same request, unless both are Ctrl-C. The system sends two within
milliseconds to a process whose launcher is killed, and supervisors signal a process group as well as its leader.

Python runs signal handlers between two bytecodes of the main thread, which may sit in a compilation or a collective for
minutes. So the C-level handler writes the signal's number into a pipe and a thread of ours reads it there. No other one takes
these signals: the system hands one to a single thread, and while that waits for a dead disk nobody hears of it. Work in which
nothing is to be saved is done on a thread too (``StopRequest.interruptible``), so that the main thread can leave it.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar

from maxtext_like.abandoned_threads import leave_behind
from maxtext_like.errors import InterruptedRunError, PreemptedRunError, StoppedRunError
from maxtext_like.sharding.processes import Agreement
from maxtext_like.training.sinks.output import say_on_stderr
from maxtext_like.typed_command import is_command, typed_command

_QUITTING = (signal.SIGTERM, signal.SIGINT)  # when they come again; shell and kernel both tell of a terminal that went away
_SIGNALS = (*_QUITTING, signal.SIGHUP)
_SAME_REQUEST_SECONDS = 1.0
_STACK_BYTES = 64 << 20  # of threads that trace and compile; by default they may have a quarter of the main thread's
T = TypeVar("T")


def _ignore(number: int, frame: FrameType | None) -> None:
  """The handler that Python wants; all work is done by the thread at the other end of the pipe."""


class StopAsked(Exception):
  """Work or a wait was left, for a stop was asked for."""


class StopRequest(contextlib.AbstractContextManager["StopRequest"]):
  """Listens for SIGTERM, SIGINT and SIGHUP while it is entered. Main thread only.

  A SIGHUP that was ignored before, as under ``nohup``, still is. While several processes train together, a stop that one of
  them hears of is requested of all at a step that they agree on; before and after, each is on its own.

  Args:
    agreement: of the processes of the run; None: this one is alone.

  Attributes:
    requested: the signal that asked, None before there was one.
    training: steps are done that a stop has to save.

  Raises:
    ValueError: entered outside the main thread.
  """

  def __init__(self, agreement: Agreement | None = None) -> None:
    self._agreement, self._asked_at, self._agreed = agreement, -1, False
    self._between: Agreement | None = None
    self._heard: signal.Signals | None = None  # by this process
    self._heard_at = 0.0
    self.requested: signal.Signals | None = None
    self.training = False
    self._before: dict[signal.Signals, Any] = {}
    self._read = self._write = -1
    self._old_wakeup = -1
    self._mask: set[Any] = set()
    self._thread: threading.Thread | None = None
    self._wake = threading.Event()

  def __enter__(self) -> "StopRequest":
    self._read, self._write = os.pipe()
    os.set_blocking(self._write, False)
    heard = [number for number in _SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    self._before = {number: signal.signal(number, _ignore) for number in heard}
    self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
    self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, heard)  # what starts from here on has it too
    self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    signal.set_wakeup_fd(self._old_wakeup)
    for number, handler in self._before.items():
      signal.signal(number, handler)
    os.write(self._write, b"\0")  # ends the thread; 0 is no signal
    if self._thread is not None:
      self._thread.join()
    os.close(self._write)
    os.close(self._read)
    signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

  def _listen(self) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
    while byte := os.read(self._read, 1)[0]:
      if byte not in self._before:
        continue
      received = signal.Signals(byte)
      if self._heard in _QUITTING and received in _QUITTING:
        # Of two signals that are pending at the same time the later one is handled first, so the order says nothing.
        ctrl_c_twice = self._heard == received == signal.SIGINT
        if not ctrl_c_twice and time.monotonic() - self._heard_at < _SAME_REQUEST_SECONDS:
          continue
        say_on_stderr(f"\n{received.name} again: quitting now, without a checkpoint")
        os._exit(128 + received)
      first = self._heard is None
      if first or received in _QUITTING:
        self._heard, self._heard_at = received, time.monotonic()
        if self._agreement is None or not self.training:
          self.requested = received
      if first:
        what = "stopping after this step, with a checkpoint" if self.training else "stopping"
        say_on_stderr(f"\n{received.name}: {what}; once more to quit now")
      self._wake.set()

  def check(self) -> None:
    """For waits that can be left.

    Raises:
      StopAsked: a stop was asked for.
    """
    if self.requested is not None:
      raise StopAsked

  def check_together(self, part: int) -> None:
    """For work between two steps that every process does in the same parts, from part 0 on: all leave it at the same one.

    Raises:
      StopAsked: a stop was asked for, here or elsewhere.
      RetryableError: a process did not come to this part.
    """
    if self._agreement is None:
      return self.check()
    if not self._agreed:
      if part == 0 or self._between is None:
        self._between = self._agreement.anew()
      self._agree(self._between, part)
    if self._agreed:
      raise StopAsked

  def interruptible(self, work: Callable[[], T]) -> T:
    """Does work on a thread and returns what it gives; for compilations and other work that leaves nothing behind.

    Raises:
      StopAsked: a stop was asked for; the thread is left to itself.
    """
    self.check()
    done: Future[T] = Future()

    def run() -> None:
      try:
        done.set_result(work())
      except BaseException as error:
        done.set_exception(error)

    before = threading.stack_size(_STACK_BYTES)
    try:
      thread = threading.Thread(target=run, name="interruptible", daemon=True)
      thread.start()
    finally:
      threading.stack_size(before)
    done.add_done_callback(lambda _: self._wake.set())
    while not done.done():
      self._wake.wait()
      self._wake.clear()
      if self.requested is not None and not done.done():
        leave_behind([thread])
        raise StopAsked
    return done.result()

  def should_stop(self, step: int) -> bool:
    """Says whether to stop after ``step``, on every process the same. The loop asks at every step.

    Raises:
      RetryableError: a process did not come to this step.
    """
    if self._agreement is None:
      return self.requested is not None
    if step != self._asked_at and not self._agreed:  # also what this one heard just before it trained is news to the others
      self._asked_at = step
      self._agree(self._agreement, step)
    return self._agreed

  def _agree(self, agreement: Agreement, number: int) -> None:
    wishes = [wish for wish in agreement(number, self._heard.name if self._heard else "") if wish]
    if wishes:
      self.requested, self._agreed = signal.Signals[wishes[0]], True

  def error(self, step: int, checkpoint: str | None) -> StoppedRunError:
    """Returns what ends a stopped run: exit code 42, 130 after Ctrl-C.

    Args:
      step: finished steps.
      checkpoint: path of the checkpoint that holds them; None when the run keeps none.
    """
    if checkpoint is None:
      return self._error(f"after step {step}; nothing of it is kept")
    # In a notebook or a script of the user, the words of the process are not the call that trained.
    resume = f"to continue: {typed_command()}" if is_command() else "the same call continues from there"
    return self._error(f"after step {step}, saved in {checkpoint}; {resume}")

  def error_at_start(self) -> StoppedRunError:
    """Returns what ends a run that was stopped before it trained anything."""
    return self._error("before it trained a step; nothing was changed")

  def _error(self, where: str) -> StoppedRunError:
    name = self.requested.name if self.requested is not None else "request"
    kind = InterruptedRunError if self.requested == signal.SIGINT else PreemptedRunError
    return kind(f"stopped by {name} {where}")
