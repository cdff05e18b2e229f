"""Decides which lines of a run a person sees: steps, waits and log records. ``screens`` draws them."""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TextIO

from maxtext_like.training.loop.screens import duration, screen_of
from maxtext_like.training.sinks.output import Output

Shown = TextIO | Callable[[str], None] | None
"""Where a run's lines go: to a stream, to a function of a line, or nowhere."""

NOTICE_SECONDS = 30.0  # between two lines that say that the run still waits, where lines are all that there is
_FIRST_SECONDS = 0.2  # a live screen does not show a shorter wait, which would only flicker
_UPDATE_SECONDS = 1.0  # between two updates of the wait on a live screen
_LINE_SECONDS = 60.0  # on a live screen a step gets a line at least as often
_LINES = 25  # on a live screen, about as many steps of a run get a line


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
  """Shows a run. A context manager; within it log records appear among the lines of the run.

  Args:
    last_step: steps at the end of the run.
    interval: steps between two lines. None: every step gets a line in a pipe, about 25 steps of a run on a terminal or in a
      notebook, where a bar shows the others.
    shown: where the lines go; None shows nothing, and log records stay where the caller's logging has them.

  Attributes:
    last_step: as passed; a run by epochs sets it when it has counted its steps.
  """

  def __init__(self, last_step: int, interval: int | None, shown: Shown = None):
    self._shown, self._screen = shown, screen_of(shown)
    self.last_step, self._interval = last_step, interval
    self._waits: list[object] = []  # the innermost one is shown
    self._times: list[float] = []
    self._lines_at: float | None = None
    self._handler = _Handler(self)
    self._propagate = True

  def __enter__(self) -> "Progress":
    if self._screen is None:
      return self
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
    if self._screen is not None:
      self._screen.close()

  @property
  def unwritten(self) -> str | None:
    """A line about output that was shown and could not be written; None: none is known."""
    return self._shown.unwritten if isinstance(self._shown, Output) else None

  def say(self, text: str) -> None:
    """Shows lines that stay."""
    if self._screen is not None:
      self._screen.say(text)

  def begin(self, step: int) -> None:
    """Shows the bar before the first step of this start. ``step``: number of finished steps."""
    if self._screen is not None:
      self._screen.bar(step, self.last_step, "first step")

  def step(self, row: dict[str, float]) -> None:
    """Shows a finished step."""
    if self._screen is None:
      return
    eta, step = self._eta(row), int(row["step"])
    if self._has_line(row):
      self._lines_at = time.monotonic()
      self.say(step_line(row, self.last_step, eta))
    numbers = f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s"
    if "mfu" in row:
      numbers += f"  mfu {row['mfu']:.1%}"
    if eta is not None:
      numbers += f"  {duration(eta)} left"
    self._screen.bar(step, self.last_step, numbers)

  @contextlib.contextmanager
  def waiting(self, what: str, said: str | None = None) -> Iterator[None]:
    """Shows within it that the run waits: a spinner or a line that changes; in a pipe a line every 30 s.

    Args:
      what: the work, as "compiling the train step".
      said: a line that is shown at once and stays; None: none.
    """
    if said is not None:
      self.say(said)
    if self._screen is None:
      yield
      return
    screen, begin, done, own = self._screen, time.monotonic(), threading.Event(), object()

    def tell() -> None:
      pause = _FIRST_SECONDS if screen.live else NOTICE_SECONDS
      while not done.wait(pause):
        pause = max(pause, _UPDATE_SECONDS)
        if self._waits[-1] is not own:
          continue
        if screen.live:
          screen.wait(what, time.monotonic() - begin)
        else:
          screen.say(f"still {what}, {duration(time.monotonic() - begin)}")

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
    """Return True if a step gets a line that stays. On a live screen these lines show how the run went."""
    step, live = int(row["step"]), self._screen is not None and self._screen.live
    if step == self.last_step or (live and "eval_loss" in row):
      return True
    if self._interval is not None or not live:
      return step % (self._interval or 1) == 0
    stride = _round_up(self.last_step / _LINES)
    due = self._lines_at is None or time.monotonic() - self._lines_at >= _LINE_SECONDS
    return due or step % stride == 0 or (step < stride and step == _round_up(step))

  def _eta(self, row: dict[str, float]) -> float | None:
    """Seconds to the end by the pace of the last steps; None before there is a pace."""
    self._times = [*self._times[-19:], time.monotonic()]
    left = self.last_step - row["step"]
    if len(self._times) < 3 or not left:
      return None
    return left * (self._times[-1] - self._times[0]) / (len(self._times) - 1)


def _round_up(number: float) -> int:
  """The next of 1, 2, 5, 10, 20, 50, ..."""
  found, factors = 1, itertools.cycle((2, 2.5, 2))
  while found < number:
    found = int(found * next(factors))
  return found


class _Handler(logging.Handler):
  """Log records of this project, as lines."""

  def __init__(self, progress: Progress):
    super().__init__(logging.WARNING)
    self._progress = progress

  def emit(self, record: logging.LogRecord) -> None:
    self._progress.say(f"{record.levelname.lower()}: {record.getMessage()}")
