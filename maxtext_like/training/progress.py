"""What a person sees while a run goes on: plain lines in a pipe; on a terminal a bar, and a line now and then; warnings."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TextIO

from maxtext_like.training.sinks.output import Output

Shown = TextIO | Callable[[str], None] | None
"""Where a run's lines go: to a stream, to a function of a line, or nowhere."""

COMPILE_NOTICE_SECONDS = 30.0
_LINE_SECONDS = 60.0  # between two plain lines above the bar


def duration(seconds: float) -> str:
  """Seconds for people: 3.2 s, 4:05 or 1:02:03."""
  if seconds < 60:
    return f"{seconds:.1f} s"
  minutes, s = divmod(round(seconds), 60)
  hours, m = divmod(minutes, 60)
  return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def step_line(row: dict[str, float], last_step: int, eta: float | None) -> str:
  """One step as a line."""
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
  """Shows a run. A context manager, within which log records appear among its lines, where there are any.

  Args:
    last_step: steps at the end of the run.
    interval: steps between two plain lines in a pipe; above a bar there is one a minute, and one at every evaluation.
    shown: where the lines go; None shows nothing, and log records stay where the caller's logging has them.

  Attributes:
    last_step: as given, or as whoever has counted it sets it before the first step.
  """

  def __init__(self, last_step: int, interval: int, shown: Shown = None):
    self._stream = None if shown is None or callable(shown) else shown
    self._line = shown if callable(shown) else None
    self.last_step, self._interval = last_step, interval
    self._live: Any = None
    self._task: Any = None
    self._times: list[float] = []
    self._lines_at: float | None = None
    self._handler = _Handler(self)
    self._propagate = True

  def __enter__(self) -> "Progress":
    if self._stream is None and self._line is None:
      return self
    if self._stream is not None and self._stream.isatty():
      from rich.console import Console
      from rich.progress import BarColumn, TaskProgressColumn, TextColumn
      from rich.progress import Progress as Bar

      columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[numbers]}")
      self._live = Bar(*columns, console=Console(file=self._stream))
    logger = logging.getLogger("maxtext_like")
    logger.addHandler(self._handler)
    # Some library logs through the root logger, which gives that a handler of its own: every line would come twice.
    self._propagate, logger.propagate = logger.propagate, False
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
    logger = logging.getLogger("maxtext_like")
    if self._handler in logger.handlers:
      logger.removeHandler(self._handler)
      logger.propagate = self._propagate
    if self._task is not None:
      self._live.stop()

  @property
  def unwritten(self) -> str | None:
    """What was shown and nobody took, as a line; None: nothing that is known."""
    return self._stream.unwritten if isinstance(self._stream, Output) else None

  def say(self, text: str) -> None:
    """Shows lines that stay."""
    if self._task is not None:
      self._live.console.print(text, highlight=False, markup=False)
    elif self._line is not None:
      for line in text.split("\n"):
        self._line(line)
    elif self._stream is not None:
      self._stream.write(f"{text}\n")  # one write, as other threads say something too
      self._stream.flush()

  def step(self, row: dict[str, float]) -> None:
    """Shows a finished step."""
    eta = self._eta(row)
    step = int(row["step"])
    if self._live is None:
      if step % self._interval == 0 or step == self.last_step:
        self.say(step_line(row, self.last_step, eta))
      return
    # The bar shows the present only; these lines stay, and scroll back to how it went.
    due = self._lines_at is None or time.monotonic() - self._lines_at >= _LINE_SECONDS
    if due or "eval_loss" in row or step == self.last_step:
      self._lines_at = time.monotonic()
      self.say(step_line(row, self.last_step, eta))
    numbers = f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s"
    if "mfu" in row:
      numbers += f"  mfu {row['mfu']:.1%}"
    if eta is not None:
      numbers += f"  {duration(eta)} left"
    if self._task is None:
      self._live.start()
      self._task = self._live.add_task("", total=self.last_step, numbers="")
    self._live.update(self._task, completed=step, description=f"step {step}/{self.last_step}", numbers=numbers)

  def _eta(self, row: dict[str, float]) -> float | None:
    """Seconds to the end by the pace of the last steps; None before there is a pace."""
    self._times = [*self._times[-19:], time.monotonic()]
    left = self.last_step - row["step"]
    if len(self._times) < 3 or not left:
      return None
    return left * (self._times[-1] - self._times[0]) / (len(self._times) - 1)


class _Handler(logging.Handler):
  """Log records of this project, as lines of their own."""

  def __init__(self, progress: Progress):
    super().__init__(logging.WARNING)
    self._progress = progress

  def emit(self, record: logging.LogRecord) -> None:
    self._progress.say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextlib.contextmanager
def compile_notice(progress: Progress) -> Iterator[None]:
  """A line every 30 s, so that a long compilation does not look like a hang."""
  done = threading.Event()

  def tell():
    begin = time.monotonic()
    while not done.wait(COMPILE_NOTICE_SECONDS):
      progress.say(f"still compiling the train step, {duration(time.monotonic() - begin)}")

  thread = threading.Thread(target=tell, name="compile-notice", daemon=True)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()
