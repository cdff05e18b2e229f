"""Draws the lines of a run in a pipe, a terminal or a notebook. Open this file to change the appearance of one of them.

``screen_of`` chooses one of the three classes; ``Progress`` decides what is shown.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

_NOTEBOOK_SECONDS = 0.25  # interval between two updates of the line, each of which is a message to the browser


def duration(seconds: float) -> str:
  """Format seconds as 3.2 s, 4:05 or 1:02:03."""
  if seconds < 60:
    return f"{seconds:.1f} s"
  minutes, s = divmod(round(seconds), 60)
  hours, m = divmod(minutes, 60)
  return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


class Screen(Protocol):
  """A place for the lines of a run.

  Attributes:
    live: True if it can show temporary content, so that not every step needs a line.
  """

  live: bool

  def say(self, text: str) -> None:
    """Write lines that stay."""
    ...

  def wait(self, what: str, seconds: float) -> None:
    """Show what the run is waiting for, and for how long."""
    ...

  def bar(self, step: int, last_step: int, numbers: str) -> None:
    """Show the newest step."""
    ...

  def rest(self) -> None:
    """Remove what ``wait`` shows."""
    ...

  def close(self) -> None:
    """Remove temporary content."""
    ...


class Lines:
  """A pipe, a file or a function: all lines stay.

  Args:
    write: takes one or more lines, without the last line break.
  """

  live = False

  def __init__(self, write: Callable[[str], None]):
    self._write = write

  def say(self, text: str) -> None:
    """Write lines."""
    self._write(text)

  def wait(self, what: str, seconds: float) -> None:
    """Do nothing: ``Progress`` writes a line from time to time."""

  def bar(self, step: int, last_step: int, numbers: str) -> None:
    """Do nothing."""

  def rest(self) -> None:
    """Do nothing."""

  def close(self) -> None:
    """Do nothing."""


class Terminal:
  """A spinner while the run waits, a bar while it trains, and lines above them."""

  live = True

  def __init__(self, stream: TextIO):
    self._console = _console(stream)
    self._live: Any = None
    self._task: Any = None
    self._lock = threading.Lock()  # warnings come from other threads

  def say(self, text: str) -> None:
    """Write lines above the spinner or bar."""
    # The terminal wraps long lines itself: an inserted line break would be copied along with a path.
    # The terminal wraps a long line itself: a line break in the middle of a path would be copied with it.
    self._console.print(text, highlight=False, markup=False, soft_wrap=True)

  def wait(self, what: str, seconds: float) -> None:
    """Show a spinner, or text after the bar if there is one. The terminal counts the seconds itself."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with self._lock:
      # With a bar, only its text changes.
      if self._task is not None:
        self._live.update(self._task, numbers=what)
      elif self._live is None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        self._live = Progress(*columns, console=self._console, transient=True, redirect_stderr=sys.stderr.isatty())
        self._live.start()
        self._live.add_task(what, total=None)
      elif (task := self._live.tasks[0]).description != what:
        self._live.reset(task.id, description=what)
        task.start_time = self._live.get_time() - seconds

  def bar(self, step: int, last_step: int, numbers: str) -> None:
    """Show the bar instead of a spinner."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    with self._lock:
      if self._task is None:
        self._stop()
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[numbers]}")
        self._live = Progress(*columns, console=self._console, redirect_stderr=sys.stderr.isatty())
        self._live.start()
        self._task = self._live.add_task("", total=last_step, numbers="")
      self._live.update(self._task, completed=step, total=last_step, description=f"step {step}/{last_step}", numbers=numbers)

  def rest(self) -> None:
    """Remove the spinner."""
    with self._lock:
      if self._task is None:
        self._stop()

  def close(self) -> None:
    """Remove the spinner. A bar stays visible."""
    with self._lock:
      self._stop()

  def _stop(self) -> None:
    if self._live is not None:
      self._live.stop()
    self._live = self._task = None


class Notebook:
  """The output of a cell: one line at its end, which a carriage return overwrites, and lines above it."""

  live = True

  def __init__(self, stream: TextIO):
    self._stream = stream
    self._shown = 0  # length of the line that is overwritten
    self._updated = 0.0
    self._lock = threading.Lock()

  def say(self, text: str) -> None:
    """Write lines over the temporary one, which the next update writes again."""
    with self._lock:
      # Pad the first line, so that it covers the temporary one.
      first, *others = text.split("\n")
      self._write("\r" * bool(self._shown) + "\n".join([f"{first:<{self._shown}}", *others]) + "\n")
      self._shown, self._updated = 0, 0.0

  def wait(self, what: str, seconds: float) -> None:
    """Show a temporary line."""
    self._overwrite(f"{what}, {duration(seconds)}", always=False)

  def bar(self, step: int, last_step: int, numbers: str) -> None:
    """Show a temporary line with a bar of 20 characters."""
    done = round(20 * step / max(last_step, 1))
    self._overwrite(f"step {step}/{last_step} [{'#' * done}{'.' * (20 - done)}] {numbers}", always=step == last_step)

  def rest(self) -> None:
    """Do nothing: the next line overwrites the temporary one."""

  def close(self) -> None:
    """End the temporary line."""
    with self._lock:
      if self._shown:
        self._write("\n")
        self._shown = 0

  def _overwrite(self, line: str, *, always: bool) -> None:
    with self._lock:
      if not always and time.monotonic() - self._updated < _NOTEBOOK_SECONDS:
        return
      self._write("\r" * bool(self._shown) + f"{line:<{self._shown}}")
      self._shown, self._updated = len(line), time.monotonic()

  def _write(self, text: str) -> None:
    self._stream.write(text)
    self._stream.flush()


def screen_of(shown: TextIO | Callable[[str], None] | None) -> Screen | None:
  """Return the screen for a stream or a function that takes a line; None to show nothing."""
  if shown is None:
    return None
  # A function takes single lines.
  if callable(shown):
    return Lines(lambda text: _each(shown, text))
  if _is_notebook(shown):
    return Notebook(shown)
  if shown.isatty() and not _console(shown).is_dumb_terminal:
    return Terminal(shown)

  # A pipe or a file.
  def write(text: str) -> None:
    shown.write(f"{text}\n")  # a single write, because other threads write lines too
    shown.flush()

  return Lines(write)


def _each(take: Callable[[str], None], text: str) -> None:
  for line in text.split("\n"):
    take(line)


def _console(stream: TextIO) -> Any:
  from rich.console import Console

  class Plain(Console):
    """Never hides the cursor, because a killed process would leave the terminal without one."""

    def show_cursor(self, show: bool = True) -> bool:
      return False

  # The stream is a terminal here; rich would guess from the environment and could take it for a notebook.
  return Plain(file=stream, force_jupyter=False)


def _is_notebook(stream: TextIO) -> bool:
  """Return True if a notebook shows the stream under a cell. IPython in a terminal has no kernel."""
  ipython = sys.modules.get("IPython")
  shell = ipython.get_ipython() if ipython is not None else None
  return getattr(shell, "kernel", None) is not None and stream in (sys.stdout, sys.stderr)
