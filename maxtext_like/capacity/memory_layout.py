"""The memory layout of a compiled TPU program at its peak: bytes by class, and the largest arrays.

libtpu writes its buffer assignment to a folder (``xla_dump_to``) as soon as memory is laid out, long before machine code, which
is nine tenths of a compilation.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from maxtext_like.capacity.compiled_program import HOST, CompiledProgram, arrays, read_program

CLASSES = ("parameters", "optimizer", "batch", "gradients", "activations", "temporaries", "gaps")
"""Classes of a chip's memory. "activations" are kept from the forward pass for the backward pass. "gaps" cannot be used at the
peak because of fragmentation."""

_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @(\d+)> \(size=(\d+),offset=(\d+)\): (.*)$")
# The page of an allocation was added by the libtpu of JAX 0.12.
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (?:color (\d+), )?(?:page \d+, )?(.*)$")
_RANGE = re.compile(r"^    (\S+)\{([\d,]*)\}:(\d+)-(\d+)$")
_BACKWARD = re.compile(r"^(?:jit\([^)]*\)/)?transpose\(")


@dataclass(frozen=True, kw_only=True)
class Held:
  """Identical arrays in use at the peak: their number, bytes of one, dtype and shape, class, the code that requested them, and
  its location."""

  count: int = 1
  bytes: int
  type: str
  kind: str
  path: str
  place: str


@dataclass(frozen=True, kw_only=True)
class MemoryLayout:
  """A chip's memory at the peak.

  Attributes:
    bytes: the complete layout, gaps included.
    classes: bytes by class (``CLASSES``).
    largest: the largest arrays, largest first.
    at: what is computed at the peak.
    host: bytes of host memory used by the chip.
  """

  bytes: int
  classes: dict[str, int]
  largest: tuple[Held, ...]
  at: str
  host: int = 0


@dataclass(frozen=True)
class _Value:
  name: str
  index: str
  bytes: int
  offset: int
  type: str


def written(folder: Path) -> bool:
  """Return True if libtpu has written all the files that are read here."""
  return any(folder.glob("*.after_optimizations_after_buffer_assignment.txt")) and _file(folder, "live-range") is not None


def _file(folder: Path, part: str) -> Path | None:
  return next(iter(folder.glob(f"*.after_optimizations-{part}.txt")), None)


def read_dump(folder: Path, count: int = 5) -> tuple[str, CompiledProgram, MemoryLayout]:
  """Return the program's text, the program and its memory layout, from the folder that libtpu wrote.

  Args:
    folder: the folder of ``xla_dump_to``, for one compilation.
    count: number of largest arrays to return.
  """
  text = next(folder.glob("*.after_optimizations.txt")).read_text("utf-8")
  program = read_program(text)
  assignment, ranges = (_file(folder, part) for part in ("buffer-assignment", "live-range"))
  assert assignment is not None
  assert ranges is not None
  return text, program, lay_out(program, assignment.read_text("utf-8"), ranges.read_text("utf-8"), count)


def lay_out(program: CompiledProgram, assignment: str, ranges: str, count: int = 5) -> MemoryLayout:
  """Return the layout from the texts of the buffer assignment and of the live ranges; see ``read_dump``."""
  inputs = {int(op.text.split(")")[0]): op for op in program.computations[program.entry] if op.kind == "parameter"}
  classes: dict[str, int] = dict.fromkeys(CLASSES, 0)
  held: list[Held] = []
  values: dict[tuple[str, str], _Value] = {}
  heap = host = 0
  temporary = False
  # Read the allocations: arguments by class, and the values in the heap.
  for line in assignment.splitlines():
    if found := _ALLOCATION.match(line):
      size, kind = int(found[2]), found[4]
      temporary = found[3] is None and "preallocated-temp" in kind
      heap += size if temporary else 0
      there, given = found[3] == str(HOST), re.match(r"parameter (\d+), shape \|(.*?)\|", kind)
      if there:
        host += size if given or "preallocated-temp" in kind else 0
      elif given:
        op = inputs[int(given[1])]
        name = op.path.replace("\\'", "'")
        what = "parameters" if "['params']" in name else "optimizer" if name.startswith("state") else "batch"
        classes[what] += size
        held.append(Held(bytes=size, type=given[2], kind=what, path=name, place=""))
    elif temporary and (found := _VALUE.match(line)) and found[3] == "0":
      values[found[1], found[2] or ""] = _Value(found[1], found[2] or "", int(found[4]), int(found[5]), found[6])
  alive = {(f[1], f[2]): (int(f[3]), int(f[4])) for line in ranges.splitlines() if (f := _RANGE.match(line))}
  order = dict(re.findall(r"^    (\d+):(\S+)$", ranges, flags=re.MULTILINE))
  names = {int(at): name for at, name in order.items()}
  # Find the peak, and classify the values that are alive then.
  peak = _peak(values, alive)
  path = lambda name: program.requested_by(name)[0]
  shapes = {a.shape for op in inputs.values() if "['params']" in op.path.replace("\\'", "'") for a in op.results}
  taken: set[tuple[int, int]] = set()
  for key, value in sorted(values.items(), key=lambda item: -item[1].bytes):
    begin, end = alive.get(key, (0, -1))
    if not begin <= peak <= end or any(a <= value.offset < b for a, b in taken):
      continue
    taken.add((value.offset, value.offset + value.bytes))
    asked, place = program.requested_by(value.name)
    kept = not _BACKWARD.match(asked) and _BACKWARD.match(path(names.get(end, ""))) is not None
    what = _kind(asked, value, shapes, kept)
    classes[what] += value.bytes
    held.append(Held(bytes=value.bytes, type=value.type.partition("{")[0], kind=what, path=asked, place=place))
  classes["gaps"] = heap - sum(b - a for a, b in taken)
  return MemoryLayout(
    bytes=sum(classes.values()),
    classes=classes,
    largest=tuple(replace(h, count=n) for h, n in sorted(Counter(held).items(), key=lambda item: -item[0].bytes)[:count]),
    at=path(names.get(peak, "")),
    host=host,
  )


def _kind(asked: str, value: _Value, shapes: set[tuple[int, ...]], kept: bool) -> str:
  copy = not asked or asked.startswith("state[")  # a parameter in another layout or dtype
  found = arrays(value.type)
  if not copy and found and found[0].shape in shapes:
    return "gradients"
  return "activations" if kept and not copy else "temporaries"


def _peak(values: dict[tuple[str, str], _Value], alive: dict[tuple[str, str], tuple[int, int]]) -> int:
  """Return the time at which most bytes of the heap are in use. Values that share memory, such as the input and output of a
  loop, count once."""
  spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
  for key, value in values.items():
    if key in alive:
      spans.setdefault((value.offset, value.bytes), []).append(alive[key])
  change: dict[int, int] = {}
  for (_, size), times in spans.items():
    until = -1
    for begin, end in sorted(times):
      begin = max(begin, until + 1)
      if end >= begin:
        change[begin] = change.get(begin, 0) + size
        change[end + 1] = change.get(end + 1, 0) - size
        until = end
  most, at, now = -1, 0, 0
  for instant in sorted(change):
    now += change[instant]
    if now > most:
      most, at = now, instant
  return at
