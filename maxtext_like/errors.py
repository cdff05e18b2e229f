"""The exit codes of the command line, as exceptions. Launchers act on the codes (XPK restarts a job on 42 and 127-255)."""

from collections.abc import Sequence


class ExitError(Exception):
  """An error that ends the program with its own exit code and one message, no traceback."""

  exit_code = 1


class UserError(ExitError):
  """Wrong usage, configuration or input. A retry repeats it."""

  exit_code = 2


class NonFiniteError(ExitError):
  """Training failed in a way that a retry repeats: non-finite numbers.

  Attributes:
    what: happened.
    remedies: what to try.
    notes: further lines of the message.
  """

  exit_code = 3

  def __init__(self, what: str, remedies: Sequence[str] = (), notes: Sequence[str] = ()):
    super().__init__("\n".join([what, *([f"what to try: {'; '.join(remedies)}"] if remedies else []), *notes]))
    self.what, self.remedies, self.notes = what, tuple(remedies), tuple(notes)


class NoProgressError(ExitError):
  """The run was restarted again and again and did not get on. A retry repeats it."""

  exit_code = 3


class DoesNotFitError(ExitError):
  """The run does not fit the memory of the machine."""

  exit_code = 4


class RetryableError(ExitError):
  """A fault that a restart can mend: preempted, peer lost, hang, storage outage."""

  exit_code = 42


class StoppedRunError(ExitError):
  """A stop that was asked for; no error, but not the end of the run either."""


class PreemptedRunError(StoppedRunError, RetryableError):
  """Stopped by SIGTERM, or by a terminal that went away."""

  exit_code = 42


class InterruptedRunError(StoppedRunError):
  """Stopped by Ctrl-C."""

  exit_code = 130
