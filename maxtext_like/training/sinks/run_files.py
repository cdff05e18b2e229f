"""The files of a run beside its checkpoints, each behind a thread of its own."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from maxtext_like.checkpoint import atomic
from maxtext_like.errors import UserError
from maxtext_like.training.sinks.appended import AppendedFile
from maxtext_like.training.sinks.events import Events
from maxtext_like.training.sinks.guarded import Guarded
from maxtext_like.training.sinks.metrics import METRICS, SAMPLES, Row, finite, keep_until, line

_FLUSH_SECONDS = 1.0
_CLOSE_SECONDS = 10.0


class RunFiles(contextlib.AbstractContextManager["RunFiles"]):
  """Takes what a run writes, at once and whatever the disk does.

  Args:
    directory: of the run.
    tensorboard: write events too.
    step: finished steps when the run starts or goes on; the rows of later ones are dropped.
    require_held: called before every write; does not return when the directory has become another process's.

  Attributes:
    again: the dropped rows: steps that are trained again.

  Raises:
    UserError: the files of an earlier life of the run cannot be read or changed.
  """

  def __init__(self, directory: Path, *, tensorboard: bool, step: int, require_held: Callable[[], None] = lambda: None):
    self._directory, self._require_held = directory, require_held
    try:
      require_held()
      self.again = keep_until(directory / METRICS, step)
      keep_until(directory / SAMPLES, step)  # with or without new ones: the report shows what is there
    except OSError as error:
      raise UserError(f"{error.filename or directory}: {error.strerror}; mend it, or choose another run_name") from error
    metrics, samples = AppendedFile(directory / METRICS), AppendedFile(directory / SAMPLES)
    self._metrics = self._guarded(METRICS, lambda row: metrics.append(line(row)), "row")
    self._samples = self._guarded(SAMPLES, lambda row: samples.append(line(row)), "sample")
    self._events = self._guarded("tensorboard", Events(directory, step).write, "row") if tensorboard else None
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

  def sample(self, row: Row) -> None:
    """One sample."""
    self._samples.put(row)

  def text(self, name: str, make: str | Callable[[], str]) -> None:
    """A file that is replaced as a whole; ``make`` is called when it is written."""
    if name not in self._texts:
      write = lambda make: atomic.write_text(self._directory / name, make if isinstance(make, str) else make())
      self._texts[name] = self._guarded(name, write, "version")
    self._texts[name].put(make, key=name)

  def flush(self) -> None:
    """Waits a moment, so that a run that is killed after a checkpoint has its rows. What fails or hangs is not waited for."""
    for place in self._places:
      place.flush(_FLUSH_SECONDS)

  def _unwritten(self) -> list[str]:
    return [line for place in self._places if (line := place.unwritten) is not None]

  def _guarded(self, name: str, write: Callable[[Any], None], unit: str) -> Guarded:
    def write_held(item: Any) -> None:
      self._require_held()
      write(item)

    return Guarded(name, write_held, unit)

  @property
  def _places(self) -> list[Guarded]:
    return [place for place in (self._metrics, self._samples, self._events, *self._texts.values()) if place is not None]

  def _close(self, *places: Guarded) -> None:
    until = time.monotonic() + _CLOSE_SECONDS
    for place in places:
      place.close(max(0.1, until - time.monotonic()))
