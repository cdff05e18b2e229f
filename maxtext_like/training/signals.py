"""SIGTERM and Ctrl-C: the first one asks the loop to stop after its step, the second one ends the process at once.

Python runs signal handlers between two bytecodes of the main thread, which may sit in a compilation or a collective for
minutes. So the C-level handler writes the signal's number into a pipe and a thread of ours reads it there.
"""

import contextlib
import os
import shlex
import signal
import sys
import threading
from types import FrameType
from typing import Any

from maxtext_like.errors import ExitError, InterruptedRunError, RetryableError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _ignore(number: int, frame: FrameType | None) -> None:
  """The handler that Python wants; all work is done by the thread at the other end of the pipe."""


class StopRequest(contextlib.AbstractContextManager["StopRequest"]):
  """Listens for SIGTERM and SIGINT while it is entered. Main thread only.

  Raises:
    ValueError: entered outside the main thread.
  """

  def __init__(self) -> None:
    self.requested: signal.Signals | None = None
    self._before: dict[signal.Signals, Any] = {}
    self._read = self._write = -1
    self._old_wakeup = -1
    self._thread: threading.Thread | None = None

  def __enter__(self) -> "StopRequest":
    self._read, self._write = os.pipe()
    os.set_blocking(self._write, False)
    self._before = {number: signal.signal(number, _ignore) for number in _SIGNALS}
    self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
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

  def _listen(self) -> None:
    while byte := os.read(self._read, 1)[0]:
      if byte not in _SIGNALS:
        continue
      received = signal.Signals(byte)
      if self.requested is not None:
        os.write(2, f"\n{received.name} again: quitting now, without a checkpoint\n".encode())
        os._exit(128 + received)
      self.requested = received
      os.write(2, f"\n{received.name}: stopping after this step, with a checkpoint; once more to quit now\n".encode())

  def should_stop(self, step: int) -> bool:
    """Says whether to stop after ``step``. The loop asks once a step, on every process with the same step.

    One process answers from its own signal. With several, all have to stop at the same step: that is
    ``jax.experimental.multihost_utils.reached_preemption_sync_point(step)``, to be asked here once the project starts
    ``jax.distributed`` (whose own notifier then takes SIGTERM).
    """
    del step
    return self.requested is not None

  def error(self, step: int, checkpoint: str | None) -> ExitError:
    """Returns the error that ends a stopped run: exit code 42 after SIGTERM, 130 after Ctrl-C.

    Args:
      step: finished steps.
      checkpoint: path of the checkpoint that holds them; None when the run keeps none.
    """
    name = self.requested.name if self.requested is not None else "request"
    resume = shlex.join([os.path.basename(sys.executable), *sys.argv])
    if checkpoint is None:
      message = f"stopped by {name} after step {step}; checkpointing is off, so nothing is kept"
    else:
      message = f"stopped by {name} after step {step}, saved in {checkpoint}; to go on from there: {resume}"
    kind = InterruptedRunError if self.requested == signal.SIGINT else RetryableError
    return kind(message)
