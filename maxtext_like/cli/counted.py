"""Progress of the verbs that evaluate: how many requests are finished, on standard error."""

import sys
import time
from types import TracebackType

SECONDS = 10.0  # between two lines if standard error is not a terminal


class Counted:
  """Shows counts: in one line that is replaced on a terminal, or else in a line every 10 seconds."""

  def __init__(self) -> None:
    self._terminal = sys.stderr.isatty()
    self._shown, self._width = time.monotonic(), 0

  def __enter__(self) -> "Counted":
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    if self._width:
      print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)

  def __call__(self, what: str, finished: int, of: int) -> None:
    """Show the counts of finished and of all requests of a kind."""
    line = f"{what} {finished:,} of {of:,}"
    if self._terminal:
      print(f"\r{line:{self._width}}", end="", file=sys.stderr, flush=True)
      self._width = max(self._width, len(line))
    elif time.monotonic() - self._shown >= SECONDS:
      print(line, file=sys.stderr, flush=True)
      self._shown = time.monotonic()
