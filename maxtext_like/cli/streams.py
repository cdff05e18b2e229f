"""Handles standard streams that are closed at the start or that the reader closes, and prints warnings and errors."""

import contextlib
import logging
import os
import select
import sys


def open_closed() -> None:
  """Open /dev/null for each closed standard stream. Otherwise the next opened file would get its descriptor, and libraries
  would write into that file."""
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
  """Print to standard error, and ignore an error of writing: the exit code still reports the failure."""
  with contextlib.suppress(OSError):
    print(text, file=sys.stderr, flush=True)


class LogLines(logging.Handler):
  """Prints warnings as lines on standard error. While this handler is installed, libraries such as orbax do not add a root
  handler of their own, which would prefix our warnings with module names."""

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
  """Return True if the reader of standard output has closed it (``| head``).

  In that case standard output is replaced by /dev/null, so that Python's flush at exit raises no error.
  """
  try:
    descriptor = sys.stdout.fileno()
  except (OSError, ValueError):
    return False
  poll = select.poll()
  poll.register(descriptor, 0)  # poll always reports errors and a closed reader
  if not poll.poll(0):
    return False
  to_null(descriptor)
  return True


def to_null(descriptor: int) -> None:
  """Replace an open file by /dev/null."""
  null = os.open(os.devnull, os.O_WRONLY)
  os.dup2(null, descriptor)
  os.close(null)


def leave(code: int) -> None:
  """End the process now without waiting for its threads."""
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError):
      stream.flush()
  os._exit(code)
