"""metrics.jsonl, one flushed line for each step, and the same numbers as TensorBoard events."""

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from maxtext_like.checkpoint.atomic import write_text

FILE_NAME = "metrics.jsonl"


def keep_until(path: Path, step: int) -> None:
  """Drops the lines of steps after ``step`` from a metrics file: a run that goes on from there writes them again."""
  if not path.exists():
    return
  kept = []
  for line in path.read_text(encoding="utf-8").splitlines():
    try:
      row = json.loads(line)
    except ValueError:
      continue  # the line that a killed process was writing
    if isinstance(row, dict) and row.get("step", step + 1) <= step:
      kept.append(line + "\n")
  write_text(path, "".join(kept))


def read(path: Path) -> list[dict[str, Any]]:
  """The rows of a metrics file."""
  if not path.exists():
    return []
  return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class MetricsWriter:
  """Writes the metrics of a run. A context manager.

  Args:
    directory: of the run.
    tensorboard: write events too, into ``directory/tensorboard``.
    step: finished steps when the run starts or goes on.
  """

  def __init__(self, directory: Path, *, tensorboard: bool, step: int):
    path = directory / FILE_NAME
    keep_until(path, step)
    self._file = path.open("a", encoding="utf-8")
    self._directory, self._start = directory / "tensorboard", step
    self._tensorboard = tensorboard
    self._events: Any = None

  def __enter__(self) -> "MetricsWriter":
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
    self._file.close()
    if self._events is not None:
      self._events.close()

  def write(self, row: dict[str, float | int | list[float]]) -> None:
    """One step; a list has a number for each layer. A number that is not finite becomes null: JSON has no NaN."""
    finite = lambda v: v if math.isfinite(v) else None
    clean = {k: [finite(x) for x in v] if isinstance(v, list) else finite(v) for k, v in row.items()}
    self._file.write(json.dumps(clean) + "\n")
    self._file.flush()
    if not self._tensorboard:
      return
    if self._events is None:
      # Here and not at the top: the import takes a third of a second, and the first step is done by now.
      from tensorboardX import SummaryWriter

      self._events = SummaryWriter(str(self._directory), purge_step=self._start + 1 if self._start else None)
    for name, value in clean.items():
      layers = {f"{name}/layer_{i:02d}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
      for label, number in layers.items():
        if label != "step" and number is not None:
          self._events.add_scalar(label, number, row["step"])
