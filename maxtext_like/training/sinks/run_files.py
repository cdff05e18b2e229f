"""The files that a run writes, except its checkpoints. Each file has a thread (``output.Guarded``)."""

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
from maxtext_like.training.sinks.metrics import METRICS, SAMPLES, Row, finite, keep_until, line
from maxtext_like.training.sinks.output import Guarded
from maxtext_like.training.sinks.trackers import Tracker

_FLUSH_SECONDS = 1.0
_CLOSE_SECONDS = 10.0
_TRACKER_CLOSE_SECONDS = 30.0  # MLflow creates a database with the first row


@dataclass(frozen=True)
class _Rewind:
  """A queue item that removes the rows of steps after this one."""

  step: int


class RunFiles(contextlib.AbstractContextManager["RunFiles"]):
  """Accepts everything that a run writes, without waiting for the disk.

  Args:
    directory: directory of the run.
    tensorboard: also write TensorBoard events.
    trackers: other destinations of the rows, by name.
    step: finished steps when the run starts or resumes; the rows of later steps are removed.
    require_held: called before every write. It does not return if another process has taken over the directory.
    fence: context manager entered around every rename, during which no other process can take over the directory.

  Attributes:
    again: the removed rows, of steps that are trained again.

  Raises:
    UserError: existing files of the run cannot be read or changed.
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
    # Existing files are trimmed to the step at which the run starts.
    try:
      require_held()
      self.again = keep_until(directory / METRICS, step, fence, every_step=True)
      keep_until(directory / SAMPLES, step, fence)  # even if no new samples are written: the report shows the existing ones
    except OSError as error:
      raise UserError(
        f"{error.filename or directory}: {error.strerror}\n  fix: repair the file, or choose another run_name"
      ) from error
    # Each output has its own queue and thread, so that a slow one does not affect the others.
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
    """Write the queued data, and then a last file about the complete run. Takes a bounded time even if the disk hangs.

    Args:
      name: name of the file.
      make: creates its text from the lines about data that was not written; called after everything else is on the disk.

    Returns:
      A line for each output whose data was not completely written.
    """
    self._close(*self._places)
    unwritten = self._unwritten()
    self.text(name, lambda: make(unwritten))
    self._close(self._texts[name])
    return self._unwritten()

  def row(self, row: Row) -> None:
    """Write the metrics of a step. A list has a number for each layer."""
    row = finite(row)
    self._metrics.put(row)
    if self._events is not None:
      self._events.put(row)
    for place in self._trackers:
      place.put(row)

  def rewind(self, step: int) -> None:
    """Remove the rows of steps after ``step``, because the run goes back to it."""
    for place in (self._metrics, self._samples, self._events):
      if place is not None:
        place.put(_Rewind(step))

  def _rows_of(self, name: str) -> Callable[[Row | _Rewind], None]:
    path = self._directory / name
    file = AppendedFile(path)

    def write(item: Row | _Rewind) -> None:
      nonlocal file
      if isinstance(item, _Rewind):
        file.close()  # NFS keeps a replaced file that is open, including its link, so the replacement would not be noticed
        file = AppendedFile(path)
        keep_until(path, item.step, self._fence)
      else:
        file.append(line(item))

    return write

  def sample(self, row: Row) -> None:
    """Write one sample."""
    self._samples.put(row)

  def text(self, name: str, make: str | Callable[[], str]) -> None:
    """Replace a complete file; a callable ``make`` is called when the file is written."""
    # The output of a file is created when it is first written.
    if name not in self._texts:
      write = lambda make: atomic.write_text(self._directory / name, make if isinstance(make, str) else make(), self._fence)
      self._texts[name] = self._guarded(name, write, "version")
    self._texts[name].put(make, key=name)

  def flush(self) -> None:
    """Wait a moment, so that a run that is killed after a checkpoint has its rows on disk. Failing or hanging outputs are
    skipped."""
    for place in self._places:
      place.flush(_FLUSH_SECONDS)

  def _unwritten(self) -> list[str]:
    return [line for place in self._places if (line := place.unwritten) is not None]

  def _guarded(self, name: str, write: Callable[[Any], None], unit: str, end: Callable[[], None] = lambda: None) -> Guarded:
    def write_held(item: Any) -> None:
      self._require_held()
      write(item)

    # A dropped rewind would leave steps in the file twice.
    return Guarded(name, write_held, unit, may_drop=lambda item: not isinstance(item, _Rewind), end=end)

  @property
  def _places(self) -> list[Guarded]:
    places = (self._metrics, self._samples, self._events, *self._texts.values(), *self._trackers)
    return [place for place in places if place is not None]

  def _close(self, *places: Guarded) -> None:
    begin = time.monotonic()
    for place in places:
      # All outputs are closed at the same time; each may use its time from the common start.
      until = begin + (_TRACKER_CLOSE_SECONDS if place in self._trackers else _CLOSE_SECONDS)
      place.close(max(0.1, until - time.monotonic()))


class NoFiles(RunFiles):
  """Writes nothing: for all processes of a run except the first."""

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
