"""Standard input, output and error of the process, which a caller may have closed or may close under way."""

import contextlib
import logging
import os
import select
import sys


def open_closed() -> None:
  """Puts /dev/null where a standard stream is closed: else the next file that is opened takes its number, and gets what
  libraries write there."""
  for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
    try:
      os.fstat(descriptor)
    except OSError:
      null = os.open(os.devnull, os.O_RDWR)
      if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def say_error(text: str) -> None:
  """Prints to standard error; where nobody takes it, the exit code has to say it alone."""
  with contextlib.suppress(OSError):
    print(text, file=sys.stderr, flush=True)


class LogLines(logging.Handler):
  """Warnings as lines on standard error, as a run shows them. While this is there, no library gives all loggers a handler of
  its own: orbax does when it is imported, and our warnings came with the names of modules."""

  def __init__(self) -> None:
    super().__init__(logging.WARNING)

  def __enter__(self) -> "LogLines":
    logging.getLogger().addHandler(self)
    return self

  def __exit__(self, *_: object) -> None:
    logging.getLogger().removeHandler(self)

  def emit(self, record: logging.LogRecord) -> None:
    whose = "" if record.name.startswith("maxtext_like") else f"{record.name}: "
    say_error(f"{record.levelname.lower()}: {whose}{record.getMessage()}")


def reader_left() -> bool:
  """Says whether the reader of standard output is gone (``| head``).

  /dev/null then takes its place, so that Python does not complain when it flushes at the end.
  """
  try:
    descriptor = sys.stdout.fileno()
  except (OSError, ValueError):
    return False
  poll = select.poll()
  poll.register(descriptor, 0)  # of itself it tells of errors and of a reader that hung up
  if not poll.poll(0):
    return False
  to_null(descriptor)
  return True


def to_null(descriptor: int) -> None:
  """Puts /dev/null in the place of an open file."""
  null = os.open(os.devnull, os.O_WRONLY)
  os.dup2(null, descriptor)
  os.close(null)


def leave(code: int) -> None:
  """Ends the process now, whatever its threads are at."""
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError):
      stream.flush()
  os._exit(code)
