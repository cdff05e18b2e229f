"""How often a run was started without getting on: a scheduler starts again for ever what can never work."""

import contextlib
import json
import logging

from maxtext_like import strict_json
from maxtext_like.errors import ExitError, NoProgressError, RetryableError
from maxtext_like.training.run.run_directory import RunDirectory

_log = logging.getLogger(__name__)
FILE_NAME = "restarts.json"
_LARGEST = 1_000_000  # a run is never started so often; the file is damaged


class Restarts(contextlib.AbstractContextManager["Restarts"]):
  """Counts the starts of a run since its newest checkpoint; entered once a start.

  Entered before what can fail or hang, so that a process that is ended at once has been counted. A start that ends in an exit
  code that no scheduler acts on (finished, refused, Ctrl-C) is a person's and not counted.

  Args:
    directory: of the run, held.
    newest: the newest step that it saved; None: none yet.
    limit: restarts that are allowed without a newer one; 0: no limit.

  Raises:
    NoProgressError: when it is entered after so many restarts.
  """

  def __init__(self, directory: RunDirectory, newest: int | None, limit: int):
    self._directory, self._newest, self._limit = directory, newest, limit
    self._before = 0

  def __enter__(self) -> "Restarts":
    self._before = self._stored()
    if 0 < self._limit < self._before:
      saved = "none was ever saved" if self._newest is None else f"the newest is still step {self._newest}"
      raise NoProgressError(
        f"run directory {self._directory.path}: started {self._before} times in a row without one new checkpoint, {saved}: "
        "another start would end like them\n"
        "  fix: see what ended them; if they were stopped before a checkpoint was due, lower checkpoint_interval. Then remove "
        f"{self._directory.path / FILE_NAME}, or raise max_restarts_without_progress"
      )
    self._write(self._before + 1)
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    if kind is None or (issubclass(kind, ExitError) and not issubclass(kind, RetryableError)):
      if self._before:
        self._write(self._before)
      else:
        with contextlib.suppress(OSError):  # a directory that was made for this start goes with it
          (self._directory.path / FILE_NAME).unlink(missing_ok=True)

  def _stored(self) -> int:
    try:
      stored = strict_json.loads((self._directory.path / FILE_NAME).read_bytes())
      starts = stored["starts"]
      if not isinstance(starts, int) or not 0 <= starts < _LARGEST:
        raise ValueError(f"{starts!r:.40} is no number of starts")
      return starts if stored["newest_step"] == self._newest else 0
    except FileNotFoundError:
      return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
      _log.warning("%s cannot be read, so starts are counted from here: %s", self._directory.path / FILE_NAME, error)
      return 0

  def _write(self, starts: int) -> None:
    try:
      self._directory.write_text(FILE_NAME, json.dumps({"newest_step": self._newest, "starts": starts}) + "\n")
    except OSError as error:  # a full disk is no reason not to train
      _log.warning("%s cannot be written, so this start is not counted: %s", self._directory.path / FILE_NAME, error.strerror)
