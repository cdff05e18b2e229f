"""The files of a run beside its checkpoints, each behind a thread of its own."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from maxtext_like import atomic
from maxtext_like.errors import UserError
from maxtext_like.training.sinks.appended import AppendedFile
from maxtext_like.training.sinks.events import Events
from maxtext_like.training.sinks.guarded import Guarded
from maxtext_like.training.sinks.metrics import METRICS, SAMPLES, Row, finite, keep_until, line
from maxtext_like.training.sinks.trackers import Tracker

_FLUSH_SECONDS = 1.0
_CLOSE_SECONDS = 10.0
_TRACKER_CLOSE_SECONDS = 30.0  # the first row of MLflow makes a database


@dataclass(frozen=True)
class _Rewind:
  """Takes the place of a row: those of steps after this one go."""

  step: int


class RunFiles(contextlib.AbstractContextManager["RunFiles"]):
  """Takes what a run writes, at once and whatever the disk does.

  Args:
    directory: of the run.
    tensorboard: write events too.
    trackers: other places for the rows, by name.
    step: finished steps when the run starts or goes on; the rows of later ones are dropped.
    require_held: called before every write; does not return when the directory has become another process's.
    fence: entered around every rename, in which nobody else can take the directory.

  Attributes:
    again: the dropped rows: steps that are trained again.

  Raises:
    UserError: the files of an earlier life of the run cannot be read or changed.
  """

  def __init__(
    self,
    directory: Path,
    *,
    tensorboard: bool,
    step: int,
    require_held: Callable[[], None] = lambda: None,
    fence: atomic.Fence = contextlib.nullcontext,
    trackers: Mapping[str, Tracker] | None = None,
  ):
    self._directory, self._require_held, self._fence = directory, require_held, fence
    try:
      require_held()
      self.again = keep_until(directory / METRICS, step, fence, every_step=True)
      keep_until(directory / SAMPLES, step, fence)  # with or without new ones: the report shows what is there
    except OSError as error:
      raise UserError(f"{error.filename or directory}: {error.strerror}; mend it, or choose another run_name") from error
    self._metrics = self._guarded(METRICS, self._rows_of(METRICS), "row")
    self._samples = self._guarded(SAMPLES, self._rows_of(SAMPLES), "sample")
    self._events = None
    if tensorboard:
      events = Events(directory, step)
      write = lambda item: events.forget(item.step) if isinstance(item, _Rewind) else events.write(item)
      self._events = self._guarded("tensorboard", write, "row")
    self._trackers = [self._guarded(name, tracker.write, "row", tracker.end) for name, tracker in (trackers or {}).items()]
    self._texts: dict[str, Guarded] = {}

  def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
    self._close(*self._places)

  def end(self, name: str, make: Callable[[list[str]], str]) -> list[str]:
    """Writes what waits, and a last file about the whole run. Takes a bounded time on the worst disk.

    Args:
      name: of the file.
      make: makes it from what was not written; runs when all else is on the disk.

    Returns:
      What was not written, a line for each place.
    """
    self._close(*self._places)
    unwritten = self._unwritten()
    self.text(name, lambda: make(unwritten))
    self._close(self._texts[name])
    return self._unwritten()

  def row(self, row: Row) -> None:
    """The metrics of a step; a list has a number for each layer."""
    row = finite(row)
    self._metrics.put(row)
    if self._events is not None:
      self._events.put(row)
    for place in self._trackers:
      place.put(row)

  def rewind(self, step: int) -> None:
    """The run goes back: rows of steps after ``step`` are dropped, as at a start."""
    for place in (self._metrics, self._samples, self._events):
      if place is not None:
        place.put(_Rewind(step))

  def _rows_of(self, name: str) -> Callable[[Row | _Rewind], None]:
    path = self._directory / name
    file = AppendedFile(path)

    def write(item: Row | _Rewind) -> None:
      nonlocal file
      if isinstance(item, _Rewind):
        file.close()  # NFS keeps a replaced file that is open, with its link, so nobody would see that it is another now
        file = AppendedFile(path)
        keep_until(path, item.step, self._fence)
      else:
        file.append(line(item))

    return write

  def sample(self, row: Row) -> None:
    """One sample."""
    self._samples.put(row)

  def text(self, name: str, make: str | Callable[[], str]) -> None:
    """A file that is replaced as a whole; ``make`` is called when it is written."""
    if name not in self._texts:
      write = lambda make: atomic.write_text(self._directory / name, make if isinstance(make, str) else make(), self._fence)
      self._texts[name] = self._guarded(name, write, "version")
    self._texts[name].put(make, key=name)

  def flush(self) -> None:
    """Waits a moment, so that a run that is killed after a checkpoint has its rows. What fails or hangs is not waited for."""
    for place in self._places:
      place.flush(_FLUSH_SECONDS)

  def _unwritten(self) -> list[str]:
    return [line for place in self._places if (line := place.unwritten) is not None]

  def _guarded(self, name: str, write: Callable[[Any], None], unit: str, end: Callable[[], None] = lambda: None) -> Guarded:
    def write_held(item: Any) -> None:
      self._require_held()
      write(item)

    # Without its rewind a file would have steps twice.
    return Guarded(name, write_held, unit, may_drop=lambda item: not isinstance(item, _Rewind), end=end)

  @property
  def _places(self) -> list[Guarded]:
    places = (self._metrics, self._samples, self._events, *self._texts.values(), *self._trackers)
    return [place for place in places if place is not None]

  def _close(self, *places: Guarded) -> None:
    begin = time.monotonic()
    for place in places:
      until = begin + (_TRACKER_CLOSE_SECONDS if place in self._trackers else _CLOSE_SECONDS)
      place.close(max(0.1, until - time.monotonic()))


class NoFiles(RunFiles):
  """Of a process that is not the first of its run: it writes nothing."""

  def __init__(self) -> None:
    self.again = []

  def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
    return

  def end(self, name: str, make: Callable[[list[str]], str]) -> list[str]:
    return []

  def row(self, row: Row) -> None:
    return

  def rewind(self, step: int) -> None:
    return

  def sample(self, row: Row) -> None:
    return

  def text(self, name: str, make: str | Callable[[], str]) -> None:
    return

  def flush(self) -> None:
    return
