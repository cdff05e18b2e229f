"""Limits restarts without progress: a scheduler would restart a run forever that can never succeed."""

import contextlib
import json
import logging

from maxtext_like import strict_json
from maxtext_like.errors import ExitError, NoProgressError, RetryableError
from maxtext_like.training.run.run_directory import RunDirectory

_log = logging.getLogger(__name__)
FILE_NAME = "restarts.json"
_LARGEST = 1_000_000  # a larger number means that the file is damaged


class Restarts(contextlib.AbstractContextManager["Restarts"]):
  """Counts the starts of a run since its newest checkpoint. Entered once per start.

  It is entered before anything that can fail or hang, so that a process that dies early has been counted. A start that ends
  with an exit code on which schedulers do not restart (finished, invalid configuration, Ctrl-C) is not counted.

  Args:
    directory: run directory, locked by this process.
    newest: newest saved step; None if there is none yet.
    limit: number of restarts allowed without a new checkpoint; 0 for no limit.

  Raises:
    NoProgressError: on entering, if the limit is exceeded.
  """

  def __init__(self, directory: RunDirectory, newest: int | None, limit: int):
    self._directory, self._newest, self._limit = directory, newest, limit
    self._before = 0

  def __enter__(self) -> "Restarts":
    self._before = self._stored()
    # Too many starts without progress.
    if 0 < self._limit < self._before:
      saved = "no checkpoint was ever saved" if self._newest is None else f"the newest is still step {self._newest}"
      raise NoProgressError(
        f"run directory {self._directory.path}: started {self._before} times in a row without a new checkpoint, {saved}; "
        f"another start would probably fail as well (max_restarts_without_progress={self._limit})\n"
        "  fix: find out what ended these starts; if they were stopped before a checkpoint was due, lower checkpoint_interval. "
        f"Then remove {self._directory.path / FILE_NAME} or raise max_restarts_without_progress"
      )
    # Count this start.
    self._write(self._before + 1)
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    # This start does not count: it ended as intended or for a reason that a restart does not change.
    if kind is None or (issubclass(kind, ExitError) and not issubclass(kind, RetryableError)):
      if self._before:
        self._write(self._before)
      else:
        with contextlib.suppress(OSError):  # the directory may have been created for this start and removed again
          (self._directory.path / FILE_NAME).unlink(missing_ok=True)

  def _stored(self) -> int:
    try:
      # A new checkpoint resets the count.
      stored = strict_json.loads((self._directory.path / FILE_NAME).read_bytes())
      starts = stored["starts"]
      if not isinstance(starts, int) or not 0 <= starts < _LARGEST:
        raise ValueError(f"{starts!r:.40} is not a number of starts")
      return starts if stored["newest_step"] == self._newest else 0
    except FileNotFoundError:
      return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
      _log.warning("%s cannot be read, so counting starts again at 0: %s", self._directory.path / FILE_NAME, error)
      return 0

  def _write(self, starts: int) -> None:
    try:
      self._directory.write_text(FILE_NAME, json.dumps({"newest_step": self._newest, "starts": starts}) + "\n")
    except OSError as error:  # a full disk should not prevent training
      _log.warning("%s cannot be written, so this start is not counted: %s", self._directory.path / FILE_NAME, error.strerror)
