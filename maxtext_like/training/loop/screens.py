"""Where the lines of a run appear: a pipe, a terminal or a notebook. Open this file to change how one of them looks.

``screen_of`` chooses one of the three classes; ``Progress`` decides what is shown.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

_NOTEBOOK_SECONDS = 0.25  # between two updates of the line: each one is a message to the browser


def duration(seconds: float) -> str:
  """Seconds for people: 3.2 s, 4:05 or 1:02:03."""
  if seconds < 60:
    return f"{seconds:.1f} s"
  minutes, s = divmod(round(seconds), 60)
  hours, m = divmod(minutes, 60)
  return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


class Screen(Protocol):
  """A place for the lines of a run.

  Attributes:
    live: it shows what does not stay, so only some of the steps need a line.
  """

  live: bool

  def say(self, text: str) -> None:
    """Writes lines that stay."""
    ...

  def wait(self, what: str, seconds: float) -> None:
    """Shows what the run has been waiting for, and for how long."""
    ...

  def bar(self, step: int, last_step: int, numbers: str) -> None:
    """Shows the newest step."""
    ...

  def rest(self) -> None:
    """Ends what ``wait`` shows."""
    ...

  def close(self) -> None:
    """Ends what does not stay."""
    ...


class Lines:
  """A pipe, a file or a function: everything stays.

  Args:
    write: takes one or more lines, without the last line break.
  """

  live = False

  def __init__(self, write: Callable[[str], None]):
    self._write = write

  def say(self, text: str) -> None:
    """Writes lines."""
    self._write(text)

  def wait(self, what: str, seconds: float) -> None:
    """Nothing: ``Progress`` writes a line from time to time."""

  def bar(self, step: int, last_step: int, numbers: str) -> None:
    """Nothing."""

  def rest(self) -> None:
    """Nothing."""

  def close(self) -> None:
    """Nothing."""


class Terminal:
  """A spinner while the run waits, a bar while it trains, and lines above them."""

  live = True

  def __init__(self, stream: TextIO):
    self._console = _console(stream)
    self._live: Any = None
    self._task: Any = None
    self._lock = threading.Lock()  # warnings come from other threads

  def say(self, text: str) -> None:
    """Writes lines above what is live."""
    # The terminal wraps a long line itself: a line break in the middle of a path would be copied with it.
    self._console.print(text, highlight=False, markup=False, soft_wrap=True)

  def wait(self, what: str, seconds: float) -> None:
    """A spinner, or a word behind the bar where there is one. The terminal counts the seconds itself."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with self._lock:
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
    """Shows the bar instead of a spinner."""
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
    """Removes a spinner."""
    with self._lock:
      if self._task is None:
        self._stop()

  def close(self) -> None:
    """Removes a spinner; a bar stays as it is."""
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
    self._shown = 0  # characters of the line that is overwritten
    self._updated = 0.0
    self._lock = threading.Lock()

  def say(self, text: str) -> None:
    """Writes lines over the one at the end, which the next update writes again."""
    with self._lock:
      first, *others = text.split("\n")
      self._write("\r" * bool(self._shown) + "\n".join([f"{first:<{self._shown}}", *others]) + "\n")
      self._shown, self._updated = 0, 0.0

  def wait(self, what: str, seconds: float) -> None:
    """A line that is overwritten."""
    self._overwrite(f"{what}, {duration(seconds)}", always=False)

  def bar(self, step: int, last_step: int, numbers: str) -> None:
    """A line that is overwritten, with a bar of 20 characters."""
    done = round(20 * step / max(last_step, 1))
    self._overwrite(f"step {step}/{last_step} [{'#' * done}{'.' * (20 - done)}] {numbers}", always=step == last_step)

  def rest(self) -> None:
    """Nothing: the next line overwrites it."""

  def close(self) -> None:
    """Ends the line that is overwritten."""
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
  """The screen that a stream or a function of a line is; None: nothing is shown."""
  if shown is None:
    return None
  if callable(shown):
    return Lines(lambda text: _each(shown, text))
  if _is_notebook(shown):
    return Notebook(shown)
  if shown.isatty() and not _console(shown).is_dumb_terminal:
    return Terminal(shown)

  def write(text: str) -> None:
    shown.write(f"{text}\n")  # one write, as other threads write lines too
    shown.flush()

  return Lines(write)


def _each(take: Callable[[str], None], text: str) -> None:
  for line in text.split("\n"):
    take(line)


def _console(stream: TextIO) -> Any:
  from rich.console import Console

  class Plain(Console):
    """Leaves the cursor as it is: a process that is killed would leave the terminal without one."""

    def show_cursor(self, show: bool = True) -> bool:
      return False

  # A notebook that is no Jupyter kernel's own stream, and a terminal that is no notebook: rich would guess.
  return Plain(file=stream, force_jupyter=False)


def _is_notebook(stream: TextIO) -> bool:
  """Return True if a notebook shows the stream under a cell. IPython in a terminal has no kernel."""
  ipython = sys.modules.get("IPython")
  shell = ipython.get_ipython() if ipython is not None else None
  return getattr(shell, "kernel", None) is not None and stream in (sys.stdout, sys.stderr)
