"""Stop requests by SIGTERM, Ctrl-C or a closed terminal: the loop stops after its step; a second signal ends the process at
once.

A SIGTERM or Ctrl-C within a second of the first signal counts as the same request, unless both are Ctrl-C. The system sends two
within milliseconds if a launcher is killed, and supervisors signal a process group as well as its leader.

Python runs signal handlers between two bytecodes of the main thread, which may be in a compilation or a collective for minutes.
The C-level handler therefore writes the signal's number into a pipe, and a separate thread reads it. Signals are blocked in all
other threads: the system delivers a signal to one thread only, and that one may be waiting for an unresponsive disk. Work that
leaves nothing to save also runs on a thread (``StopRequest.interruptible``), so that the main thread can stop waiting for it.
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

from maxtext_like.abandoned_threads import abandon
from maxtext_like.errors import InterruptedRunError, PreemptedRunError, StoppedRunError
from maxtext_like.sharding.processes import Agreement
from maxtext_like.training.sinks.output import say_on_stderr
from maxtext_like.typed_command import is_command, typed_command

_QUITTING = (signal.SIGTERM, signal.SIGINT)  # a second one ends the process; SIGHUP may come twice, from shell and kernel
_SIGNALS = (*_QUITTING, signal.SIGHUP)
_SAME_REQUEST_SECONDS = 1.0
_STACK_BYTES = 64 << 20  # for threads that trace and compile; the default may be a quarter of the main thread's
T = TypeVar("T")


def _ignore(number: int, frame: FrameType | None) -> None:
  """Python requires a handler. The thread that reads the pipe does the work."""


class StopRequested(Exception):
  """Work or a wait was interrupted because a stop was requested."""


class StopRequest(contextlib.AbstractContextManager["StopRequest"]):
  """Listens for SIGTERM, SIGINT and SIGHUP while it is entered. Main thread only.

  A SIGHUP that was ignored before, as under ``nohup``, stays ignored. While several processes train together, a stop request in
  one of them stops all at a step that they agree on. Before and after training each process stops independently.

  Args:
    agreement: exchanges requests between the processes of the run; None for a single process.

  Attributes:
    requested: the signal that requested the stop, or None.
    training: True if there are finished steps that a stop has to save.

  Raises:
    ValueError: entered outside the main thread.
  """

  def __init__(self, agreement: Agreement | None = None) -> None:
    # Agreement between processes: the step of the last question, and whether all have agreed to stop.
    self._agreement, self._asked_at, self._agreed = agreement, -1, False
    self._between: Agreement | None = None
    self._heard: signal.Signals | None = None  # received by this process
    self._heard_at = 0.0
    self.requested: signal.Signals | None = None
    self.training = False
    # Everything that __exit__ restores.
    self._before: dict[signal.Signals, Any] = {}
    self._read = self._write = -1
    self._old_wakeup = -1
    self._mask: set[Any] = set()
    self._thread: threading.Thread | None = None
    self._wake = threading.Event()

  def __enter__(self) -> "StopRequest":
    # The pipe carries signal numbers from the C-level handler to our thread.
    self._read, self._write = os.pipe()
    os.set_blocking(self._write, False)
    # An ignored SIGHUP stays ignored.
    heard = [number for number in _SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    self._before = {number: signal.signal(number, _ignore) for number in heard}
    self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
    self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, heard)  # threads that start later inherit it
    # Only the listening thread unblocks the signals.
    self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    # Restore the handlers first, then end the listening thread, then unblock the signals.
    signal.set_wakeup_fd(self._old_wakeup)
    for number, handler in self._before.items():
      signal.signal(number, handler)
    os.write(self._write, b"\0")  # ends the thread; 0 is not a signal
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
      # A second signal quits at once, unless it belongs to the first request.
      received = signal.Signals(byte)
      if self._heard in _QUITTING and received in _QUITTING:
        # The order of two signals pending at the same time is unknown, because the later one may be handled first.
        ctrl_c_twice = self._heard == received == signal.SIGINT
        if not ctrl_c_twice and time.monotonic() - self._heard_at < _SAME_REQUEST_SECONDS:
          continue
        say_on_stderr(f"\n{received.name} again: quitting now, without a checkpoint")
        os._exit(128 + received)
      # In a group of processes the loop decides at a common step; a single process stops independently.
      first = self._heard is None
      if first or received in _QUITTING:
        self._heard, self._heard_at = received, time.monotonic()
        if self._agreement is None or not self.training:
          self.requested = received
      # Tell the user once.
      if first:
        what = "stopping after this step, with a checkpoint" if self.training else "stopping"
        say_on_stderr(f"\n{received.name}: {what}; send it again to quit now")
      self._wake.set()

  def check(self) -> None:
    """Check for a stop request in a wait that can be interrupted.

    Raises:
      StopRequested: a stop was requested.
    """
    if self.requested is not None:
      raise StopRequested

  def check_together(self, part: int) -> None:
    """Check for a stop request in work between two steps that all processes do in the same parts, starting at part 0.

    All processes stop at the same part.

    Raises:
      StopRequested: a stop was requested, in this or another process.
      RetryableError: a process did not reach this part.
    """
    if self._agreement is None:
      return self.check()
    if not self._agreed:
      # Each piece of work between two steps has its own sequence of questions.
      if part == 0 or self._between is None:
        self._between = self._agreement.restarted()
      self._agree(self._between, part)
    if self._agreed:
      raise StopRequested

  def interruptible(self, work: Callable[[], T]) -> T:
    """Run ``work`` on a thread and return its result. For compilations and other work that needs no cleanup.

    Raises:
      StopRequested: a stop was requested; the thread keeps running unattended.
    """
    self.check()
    done: Future[T] = Future()

    def run() -> None:
      try:
        done.set_result(work())
      except BaseException as error:
        done.set_exception(error)

    # Tracing a deep model needs a large stack.
    before = threading.stack_size(_STACK_BYTES)
    try:
      thread = threading.Thread(target=run, name="interruptible", daemon=True)
      thread.start()
    finally:
      threading.stack_size(before)
    done.add_done_callback(lambda _: self._wake.set())
    # Wait for the result or for a stop request.
    while not done.done():
      self._wake.wait()
      self._wake.clear()
      if self.requested is not None and not done.done():
        abandon([thread])
        raise StopRequested
    return done.result()

  def should_stop(self, step: int) -> bool:
    """Return True if the run should stop after ``step``, with the same answer in all processes. Called at every step.

    Raises:
      RetryableError: a process did not reach this step.
    """
    if self._agreement is None:
      return self.requested is not None
    # A request that this process received just before training is still unknown to the others.
    if step != self._asked_at and not self._agreed:
      self._asked_at = step
      self._agree(self._agreement, step)
    return self._agreed

  def _agree(self, agreement: Agreement, number: int) -> None:
    wishes = [wish for wish in agreement(number, self._heard.name if self._heard else "") if wish]
    if wishes:
      self.requested, self._agreed = signal.Signals[wishes[0]], True

  def error(self, step: int, checkpoint: str | None) -> StoppedRunError:
    """Return the error that ends a stopped run: exit code 42, or 130 after Ctrl-C.

    Args:
      step: number of finished steps.
      checkpoint: path of the checkpoint with these steps; None if the run saves none.
    """
    if checkpoint is None:
      return self._error(f"after step {step}; no checkpoint was saved")
    # In a notebook or script, the command line of the process is not the call that trained.
    resume = f"to continue: {typed_command()}" if is_command() else "the same call continues from there"
    return self._error(f"after step {step}, saved in {checkpoint}; {resume}")

  def error_at_start(self) -> StoppedRunError:
    """Return the error that ends a run that was stopped before its first step."""
    return self._error("before the first step; nothing was changed")

  def _error(self, where: str) -> StoppedRunError:
    name = self.requested.name if self.requested is not None else "request"
    kind = InterruptedRunError if self.requested == signal.SIGINT else PreemptedRunError
    return kind(f"stopped by {name} {where}")
