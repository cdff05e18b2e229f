"""Counts the files of this project on three journeys, from a real trace: ``python benchmarks/journeys.py [--list]``.

1. A token, from its file to the loss: files that are entered while a batch is read, placed and trained.
2. A key (``float32_logits``), from the command line to the program: files on the call stack where the key is resolved, and
   where code that names it reads its value.
3. A NaN, from the failed check to the message: files that are entered while it is found and explained. The train step, which
   x-ray traces again, belongs to the first journey and is not counted here.

Needs Python 3.12 or newer. ``--list`` prints the files in the order in which they are entered.
docs/explanation/architecture.md quotes the output. Open this file when a function that bounds a journey gets another name.
"""

import argparse
import contextlib
import inspect
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
_monitoring: Any = getattr(sys, "monitoring", None)  # new in Python 3.12
KEY = "float32_logits"
DATA = ("DataSource._produce", "DataSource.__next__")
STEP = ("TrainStep.__call__",)
TRAINED = (*DATA, *STEP, "Loop._next_batch", "Loop._launch")
EXPLAINED = ("FinitenessGuard.observe", "FailedStep.explained", "step_remedies", "say_error")
SMALL = ("max_target_length=32", "per_device_batch_size=2", "enable_checkpointing=false", "enable_tensorboard=false",
         "dtype=bfloat16", "dataset=text", f"dataset_path={ROOT / 'README.md'}")  # fmt: skip
FIRST = ("gemma4-tiny", *SMALL, "steps=1", f"{KEY}=false")
# Weights of 1e4 after the first update; the MLP of the second step overflows float16.
BROKEN = ("gemma3-tiny", *SMALL, "steps=3", "dtype=float16", "float32_gate_product=false", "float16_clamp=false",
          "num_decoder_layers=1", "inhomogeneous_layer_cycle_interval=1", "emb_dim=32", "mlp_dim=48", "head_dim=16",
          "learning_rate=10000", "warmup_steps_fraction=0", "finite_check_steps=-1")  # fmt: skip


@dataclass
class Journey:
  """Files in the order in which they are entered, each with the first function.

  Attributes:
    within: qualified names of functions; files that are entered inside one of them count.
    without: qualified names of functions; files that are entered inside one of them do not count.
  """

  name: str
  within: tuple[str, ...] = ()
  without: tuple[str, ...] = ()
  files: dict[str, str] = field(default_factory=dict)
  seen: set[str] = field(default_factory=set)

  def add(self, file: str, function: str) -> None:
    self.files.setdefault(file, function)

  def check(self) -> None:
    """Raises SystemExit if a function that bounds the journey was not entered, since it has another name now."""
    if missing := sorted({*self.within, *self.without} - self.seen):
      sys.exit(f"{self.name}: never entered: {', '.join(missing)}; give benchmarks/journeys.py their present names")


class Tracer:
  """Watches calls of this project's functions in all threads, by ``sys.monitoring``; other code runs at full speed."""

  def __init__(self, *journeys: Journey):
    self._journeys = journeys
    self._depth: dict[tuple[int, str, str], int] = {}
    self._codes: dict[CodeType, str | None] = {}

  def file(self, code: CodeType) -> str | None:
    """Returns the path of a file of this project, like 'layers/mlp.py'; None for other code and for the body of a module."""
    if code not in self._codes:
      path, self._codes[code] = Path(code.co_filename), None
      for folder in (ROOT / "maxtext_like", ROOT / "src"):
        if code.co_name != "<module>" and path.is_relative_to(folder):
          self._codes[code] = path.relative_to(folder).as_posix()
    return self._codes[code]

  def start(self, code: CodeType, _: int) -> Any:
    """Handles the start of a function or the continuation of a generator."""
    if self.file(code) is None:
      return _monitoring.DISABLE
    if code.co_flags & inspect.CO_NEWLOCALS:  # not the body of a class, which an import runs
      self._change(code, 1)
    return None

  def end(self, code: CodeType, *_: Any) -> Any:
    """Handles the return or exception of a function, or the yield of a generator."""
    if self.file(code) is not None:
      self._change(code, -1)

  def _change(self, code: CodeType, change: int) -> None:
    thread, name = threading.get_ident(), code.co_qualname
    for journey in self._journeys:
      for bound in ("within", "without"):
        if name in getattr(journey, bound):
          journey.seen.add(name)
          self._depth[thread, journey.name, bound] = self._depth.get((thread, journey.name, bound), 0) + change
      inside, outside = (self._depth.get((thread, journey.name, bound)) for bound in ("within", "without"))
      if change == 1 and inside and not outside:
        journey.add(self._codes[code] or "", name)

  def stack(self, frame: FrameType | None) -> list[tuple[str, str]]:
    """Returns (file, function) for every frame of this project, starting with the outermost."""
    found = []
    while frame is not None:
      if (file := self.file(frame.f_code)) is not None:
        found.append((file, frame.f_code.co_qualname))
      frame = frame.f_back
    return found[::-1]

  @contextlib.contextmanager
  def watching(self) -> Iterator[None]:
    monitoring, tool = _monitoring, _monitoring.PROFILER_ID
    monitoring.use_tool_id(tool, "journeys")
    started, ended = (monitoring.events.PY_START, monitoring.events.PY_RESUME), (
      monitoring.events.PY_RETURN, monitoring.events.PY_YIELD, monitoring.events.PY_UNWIND)  # fmt: skip
    for event in started:
      monitoring.register_callback(tool, event, self.start)
    for event in ended:
      monitoring.register_callback(tool, event, self.end)
    monitoring.set_events(tool, sum(started) + sum(ended))
    try:
      yield
    finally:
      monitoring.set_events(tool, 0)
      monitoring.free_tool_id(tool)


class KeyTracer(Tracer):
  """Also follows ``KEY``.

  It records the call stack of each function that gets the key's name during ``load_config``, and of each read of its value.
  """

  def __init__(self, key: Journey, *journeys: Journey):
    super().__init__(*journeys)
    self._key = key
    self._words = {KEY, f"precision.{KEY}", f"{KEY}=false"}

  def start(self, code: CodeType, offset: int) -> Any:
    if (result := super().start(code, offset)) is None:
      frame = sys._getframe(1)
      values = (frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount])
      if any(isinstance(value, str) and value in self._words for value in values):
        files = self.stack(frame)
        if any(function == "load_config" for _, function in files):
          self._add(files)
    return result

  def _add(self, files: list[tuple[str, str]]) -> None:
    for file, function in files:
      self._key.add(file, function)

  @contextlib.contextmanager
  def watching(self) -> Iterator[None]:
    """Also makes ``KEY`` a property of the two classes that have it. A read counts only if the reading code names the key."""
    from maxtext_like.config.precision_keys import PrecisionConfig
    from maxtext_like.layers.precision import Precision

    def read(owner: Any) -> Any:
      frame = sys._getframe(1)
      if self.file(frame.f_code) is not None and KEY in frame.f_code.co_names:
        self._add(self.stack(frame))
      return owner.__dict__[KEY]

    def write(owner: Any, value: Any) -> None:
      owner.__dict__[KEY] = value

    owners = (PrecisionConfig, Precision)
    defaults = [owner.__dict__.get(KEY) for owner in owners]  # None: the class has no default
    for owner in owners:
      type.__setattr__(owner, KEY, property(read, write))
    try:
      with super().watching():
        yield
    finally:
      for owner, default in zip(owners, defaults, strict=True):
        type.__delattr__(owner, KEY) if default is None else type.__setattr__(owner, KEY, default)


def trace() -> list[Journey]:
  """Trains one step, and then a run that fails with a NaN, both on a CPU. Returns the three journeys."""
  from maxtext_like.cli.main import main

  token = Journey("a token from its file to the loss", TRAINED)
  key = Journey(f"the key {KEY} from the command line to the program")
  nan = Journey("a NaN from the failed check to its message", EXPLAINED, STEP)
  first = KeyTracer(key, token)
  with tempfile.TemporaryDirectory() as folder:
    for tracer, words, expected in ((first, FIRST, 0), (Tracer(nan), BROKEN, 3)):
      out = io.StringIO()
      with tracer.watching(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(["train", *words, f"output_dir={folder}", f"run_name=exit{expected}"])
      if code != expected:
        sys.exit(f"train {' '.join(words)} ended with {code} instead of {expected}:\n{out.getvalue()}")
  for journey in (token, key, nan):
    journey.check()
  return [token, key, nan]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--list", action="store_true", help="print the files too")
  words = parser.parse_args()
  if _monitoring is None:
    sys.exit("benchmarks/journeys.py needs Python 3.12 or newer, which has sys.monitoring")
  os.environ["JAX_PLATFORMS"] = "cpu"
  sys.path.insert(0, str(ROOT))
  for journey in trace():
    print(f"{len(journey.files):3} files: {journey.name}")
    if words.list:
      for number, (file, function) in enumerate(journey.files.items(), 1):
        print(f"  {number:3} {file}: {function}")


if __name__ == "__main__":
  main()
