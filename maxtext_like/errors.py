"""Exceptions that carry the exit code of the command line. Job launchers act on the codes: XPK restarts on 42 and 127-255."""

from collections.abc import Sequence

_OUT_OF_MEMORY = (
  "RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "OUT_OF_MEMORY", "ALLOC_FAILED", "ailed to allocate", "MemoryError",
)  # fmt: skip
"""Parts of the messages of XLA, CUDA and cuDNN when memory does not suffice."""


def is_out_of_memory(error: BaseException) -> bool:
  """Return True if an error says that the memory of the host or of a device does not suffice."""
  return isinstance(error, MemoryError) or any(part in str(error) for part in _OUT_OF_MEMORY)


class ExitError(Exception):
  """An error that ends the program with its exit code and one message, without a traceback."""

  exit_code = 1


class UserError(ExitError):
  """Wrong usage, configuration or input. Repeating the command fails again."""

  exit_code = 2

  def __init__(self, what: str, *, fix: str = ""):
    """Joins the parts of the message.

    Args:
      what: what is wrong, with place and value, and why.
      fix: what to type; "" if ``what`` has a line ``fix:`` already.
    """
    super().__init__(f"{what}\n  fix: {fix}" if fix else what)


class NonFiniteError(ExitError):
  """Training failed because of non-finite numbers. Repeating the command fails again.

  Attributes:
    what: description of the failure.
    remedies: settings to try.
    notes: further lines of the message.
  """

  exit_code = 3

  def __init__(self, what: str, remedies: Sequence[str] = (), notes: Sequence[str] = ()):
    super().__init__("\n".join([what, *([f"what to try: {'; '.join(remedies)}"] if remedies else []), *notes]))
    self.what, self.remedies, self.notes = what, tuple(remedies), tuple(notes)


class NoProgressError(ExitError):
  """The run restarted several times without completing a further step. Repeating the command fails again."""

  exit_code = 3


class DoesNotFitError(ExitError):
  """The run does not fit the memory of the machine."""

  exit_code = 4


class RetryableError(ExitError):
  """A failure that a restart can recover from: preemption, a lost peer, a hang, a storage outage."""

  exit_code = 42


class RefusedCredentialsError(RetryableError):
  """The store refused the credentials of a run that has started: they have expired, or a permission was removed.

  A new process reads credentials again, so the same command resumes the run once they are renewed. If they are still refused,
  that start ends with a ``UserError``, and a launcher does not repeat it.
  """


class StoppedRunError(ExitError):
  """The run stopped because someone asked it to. This is not a failure, but the run has not finished."""


class PreemptedRunError(StoppedRunError, RetryableError):
  """Stopped by SIGTERM, or because the terminal closed."""

  exit_code = 42


class InterruptedRunError(StoppedRunError):
  """Stopped by Ctrl-C."""

  exit_code = 130
