"""Shows a run in a pipe, a terminal or a notebook.

``Progress`` decides which lines appear: steps, waits and log records. ``Lines``, ``Terminal`` and ``Notebook`` draw them, and
``screen_of`` chooses one of the three. To change how lines look, edit one of these three classes.
"""

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol, TextIO

from maxtext_like.training.sinks.output import Output

Shown = TextIO | Callable[[str], None] | None
"""Where the lines of a run go: a stream, a function that takes a line, or nowhere."""

NOTICE_SECONDS = 30.0  # interval of the "still waiting" lines in a pipe
_FIRST_SECONDS = 0.2  # a live screen does not show shorter waits, which would flicker
_UPDATE_SECONDS = 1.0  # interval between updates of a wait on a live screen
_LINE_SECONDS = 60.0  # on a live screen a step gets a line at least this often
_LINES = 25  # approximate number of step lines of a run on a live screen


def step_line(row: dict[str, float], last_step: int, eta: float | None) -> str:
  """Format one step as a line."""
  # Always loss, gradient norm and speed; utilization, evaluation and remaining time if known.
  parts = [f"step {row['step']:>{len(str(last_step))}} of {last_step}", f"loss {row['loss']:.4f}"]
  parts += [f"grad norm {row['grad_norm']:.3g}", f"{row['tokens_per_second']:,.0f} tokens/s", f"{row['step_seconds']:.3g} s"]
  if "mfu" in row:
    parts.append(f"mfu {row['mfu']:.1%}")
  if "eval_loss" in row:
    parts.append(f"eval loss {row['eval_loss']:.4f}")
  if eta is not None:
    parts.append(f"{duration(eta)} left")
  return "  ".join(parts)


class Progress:
  """Shows a run. Use it as a context manager; inside it, log records appear among the lines of the run.

  Args:
    last_step: number of the run's last step.
    interval: steps between two lines. None: every step gets a line in a pipe, and about 25 steps of a run on a terminal or in
      a notebook, where a bar shows the others.
    shown: where the lines go. None shows nothing and leaves log records to the caller's logging.

  Attributes:
    last_step: as passed; a run configured by epochs sets it after counting its steps.
  """

  def __init__(self, last_step: int, interval: int | None, shown: Shown = None):
    self._shown, self._screen = shown, screen_of(shown)
    self.last_step, self._interval = last_step, interval
    self._waits: list[object] = []  # only the innermost one is shown
    self._times: list[float] = []
    self._lines_at: float | None = None
    self._handler = _Handler(self)
    self._propagate = True

  def __enter__(self) -> "Progress":
    if self._screen is None:
      return self
    logger = logging.getLogger("maxtext_like")
    logger.addHandler(self._handler)
    # Some libraries give the root logger a handler; without this, every line would appear twice.
    self._propagate, logger.propagate = logger.propagate, False
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
    logger = logging.getLogger("maxtext_like")
    if self._handler in logger.handlers:
      logger.removeHandler(self._handler)
      logger.propagate = self._propagate
    if self._screen is not None:
      self._screen.close()

  @property
  def unwritten(self) -> str | None:
    """A line about output that could not be written, or None."""
    return self._shown.unwritten if isinstance(self._shown, Output) else None

  def say(self, text: str) -> None:
    """Print lines that stay."""
    if self._screen is not None:
      self._screen.say(text)

  def begin(self, step: int) -> None:
    """Show the bar before the first step of this process. ``step``: number of finished steps."""
    if self._screen is not None:
      self._screen.bar(step, self.last_step, "first step")

  def step(self, row: dict[str, float]) -> None:
    """Show a finished step."""
    if self._screen is None:
      return
    eta, step = self._eta(row), int(row["step"])
    # A line that stays, and always the bar.
    if self._has_line(row):
      self._lines_at = time.monotonic()
      self.say(step_line(row, self.last_step, eta))
    # The bar shows fewer numbers than the line.
    numbers = f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s"
    if "mfu" in row:
      numbers += f"  mfu {row['mfu']:.1%}"
    if eta is not None:
      numbers += f"  {duration(eta)} left"
    self._screen.bar(step, self.last_step, numbers)

  @contextlib.contextmanager
  def waiting(self, what: str, said: str | None = None) -> Iterator[None]:
    """Show inside the context that the run waits: a spinner or a changing line; in a pipe a line every 30 s.

    Args:
      what: the work, for example "compiling the train step".
      said: a line that is printed at once and stays; None for no line.
    """
    if said is not None:
      self.say(said)
    if self._screen is None:
      yield
      return
    # A thread updates the display until the context ends.
    screen, begin, done, own = self._screen, time.monotonic(), threading.Event(), object()

    def tell() -> None:
      pause = _FIRST_SECONDS if screen.live else NOTICE_SECONDS
      while not done.wait(pause):
        pause = max(pause, _UPDATE_SECONDS)
        # Another wait started inside this one.
        if self._waits[-1] is not own:
          continue
        if screen.live:
          screen.wait(what, time.monotonic() - begin)
        else:
          screen.say(f"still {what}, {duration(time.monotonic() - begin)}")

    # A thread reports the wait, because the caller is blocked.
    self._waits.append(own)
    thread = threading.Thread(target=tell, name="waiting", daemon=True)
    thread.start()
    try:
      yield
    finally:
      done.set()
      thread.join()
      self._waits.remove(own)
      if not self._waits:
        screen.rest()

  def _has_line(self, row: dict[str, float]) -> bool:
    """Return True if a step gets a line that stays. On a live screen these lines show the course of the run."""
    step, live = int(row["step"]), self._screen is not None and self._screen.live
    # The last step and evaluations always get a line on a live screen.
    if step == self.last_step or (live and "eval_loss" in row):
      return True
    if self._interval is not None or not live:
      return step % (self._interval or 1) == 0
    # Otherwise about _LINES steps, at least one per minute, and the first powers of the stride.
    stride = _round_up(self.last_step / _LINES)
    due = self._lines_at is None or time.monotonic() - self._lines_at >= _LINE_SECONDS
    return due or step % stride == 0 or (step < stride and step == _round_up(step))

  def _eta(self, row: dict[str, float]) -> float | None:
    """Seconds to the end, from the pace of the last steps; None if fewer than three are known."""
    self._times = [*self._times[-19:], time.monotonic()]
    left = self.last_step - row["step"]
    if len(self._times) < 3 or not left:
      return None
    return left * (self._times[-1] - self._times[0]) / (len(self._times) - 1)


def _round_up(number: float) -> int:
  """Round up to the next of 1, 2, 5, 10, 20, 50, ..."""
  found, factors = 1, itertools.cycle((2, 2.5, 2))
  while found < number:
    found = int(found * next(factors))
  return found


class _Handler(logging.Handler):
  """Prints log records of this project as lines."""

  def __init__(self, progress: Progress):
    super().__init__(logging.WARNING)
    self._progress = progress

  def emit(self, record: logging.LogRecord) -> None:
    self._progress.say(f"{record.levelname.lower()}: {record.getMessage()}")


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
        # The spinner and the bar cannot be shown at the same time, so the first call replaces the spinner.
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
