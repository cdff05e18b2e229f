"""metrics.jsonl and samples.jsonl: one line of JSON per step or sample, written completely and read despite damaged lines."""

import contextlib
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from maxtext_like import strict_json
from maxtext_like.atomic import Fence, write_text
from maxtext_like.storage import Place

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
Row = dict[str, Any]
_log = logging.getLogger(__name__)


def finite(row: Row) -> Row:
  """Prepare a row for JSON, which has no NaN and no infinity: numbers that are not finite become null, also in lists."""
  return {k: [_finite(x) for x in v] if isinstance(v, list) else _finite(v) for k, v in row.items()}


def _finite(value: Any) -> Any:
  return None if isinstance(value, float) and not math.isfinite(value) else value


def line(row: Row) -> bytes:
  """Return a row as a line of the file."""
  return (json.dumps(row) + "\n").encode()


def read(path: Path | Place) -> list[Row]:
  """Return the rows of a file, [] if it is missing. Damaged lines are left out and reported in one warning.

  Raises:
    OSError: the file cannot be read.
  """
  rows, damaged = _scan(path)
  if damaged:
    _log.warning("%s: %s left out", path, _lines(len(damaged)))
  return rows


def by_step(rows: list[Row]) -> list[Row]:
  """Merge the lines of metrics.jsonl into one row per step. A step can have several lines: an evaluation that was interrupted
  by a stop is written later on a separate line."""
  merged: dict[int, Row] = {}
  for row in rows:
    merged[row["step"]] = merged.get(row["step"], {}) | row
  return list(merged.values())


def warn_of_missing(path: Path | Place, rows: list[Row], step: int) -> None:
  """Warn if a file with one row per step lacks rows of the finished steps 1 to ``step``."""
  missing = sorted(set(range(1, step + 1)) - {row["step"] for row in rows})
  if not missing:
    return
  first, last = missing[0], missing[-1]
  which = f"step {first}" if len(missing) == 1 else f"{len(missing)} of the {step} finished steps (from {first} to {last})"
  _log.warning("%s: the rows of %s are missing, so report.html and its curves do not show them", path, which)


def warn_of_finished(directory: Path | Place, step: int) -> None:
  """Warn if metrics.jsonl of a finished run is damaged or lacks rows of its steps 1 to ``step``. The file is not changed.

  Args:
    directory: the run directory, local or in a store.
    step: the last step.
  """
  path = directory / METRICS
  try:
    rows = read(path)
  except OSError as error:
    _log.warning("%s cannot be read: %s", path, error.strerror)
    return
  warn_of_missing(path, rows, step)


def keep_until(path: Path, step: int, fence: Fence = contextlib.nullcontext, *, every_step: bool = False) -> list[Row]:
  """Remove damaged lines and the rows of steps after ``step``, which a run that resumes there writes again.

  The removed lines are appended to ``aside(path)``: they are the only record of those steps.

  Args:
    path: the metrics file.
    step: the last finished step.
    fence: context manager entered around the rename.
    every_step: warn if a finished step has no row.

  Returns:
    The removed rows.

  Raises:
    OSError: the file cannot be read or written; it is then unchanged.
  """
  rows, damaged = _scan(path)
  if every_step:
    warn_of_missing(path, rows, step)
  dropped = [row for row in rows if row["step"] > step]
  if not dropped and not damaged:
    return []
  # The removed lines must be on disk before the file is replaced.
  with aside(path).open("ab") as file:
    file.writelines([*(line(row) for row in dropped), *(text + b"\n" for text in damaged)])
    file.flush()
    os.fsync(file.fileno())
  # Replace the file atomically, so that an interruption leaves it unchanged.
  write_text(path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step), fence)
  if dropped:
    first, last = dropped[0]["step"], dropped[-1]["step"]
    told = f"steps {first} to {last}" if last > first else f"step {first}"
    _log.warning("%s: %s will be trained again; their earlier rows are in %s", path, told, aside(path).name)
  if damaged:
    _log.warning("%s: %s moved to %s", path, _lines(len(damaged)), aside(path).name)
  return dropped


def aside(path: Path) -> Path:
  """Return the path for removed rows of a file: metrics.dropped.jsonl."""
  return path.with_suffix(f".dropped{path.suffix}")


def _lines(count: int) -> str:
  return "1 damaged line" if count == 1 else f"{count} damaged lines"


def _scan(path: Path | Place) -> tuple[list[Row], list[bytes]]:
  """Return the rows of a file, and the lines that are not valid rows: truncated by a kill, or damaged by a bad disk."""
  rows, damaged = [], []
  try:
    content = path.read_bytes()
  except FileNotFoundError:
    return [], []
  for text in content.splitlines():
    try:
      row = strict_json.loads(text)
    except strict_json.NotJsonError:
      row = None
    # A valid row is an object with a step and values of the expected types.
    if isinstance(row, dict) and isinstance(row.get("step"), int) and _is_written_here(row, path.name):
      rows.append(row)
    else:
      damaged.append(text)
  return rows, damaged


def _is_written_here(row: Row, name: str) -> bool:
  """Return True if the values of a row have the types that this project writes; readers calculate with them."""
  if name != METRICS:
    return all(isinstance(row.get(key, ""), str) for key in ("prompt", "text"))
  return all(x is None or isinstance(x, int | float) for v in row.values() for x in (v if isinstance(v, list) else [v]))
