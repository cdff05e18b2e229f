"""Reads a compiled TPU program (HLO text): how often each instruction runs in a step, FLOPs of products, and transfers between
devices. The numbers are those of one device, because the text is one device's program.

The compiler's own count (``cost_analysis``) counts the body of a loop once. Here it counts once per iteration.
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from maxtext_like.errors import UserError
from maxtext_like.layers.moe.expert_parallel import MORE
from maxtext_like.numerics.hlo import hlo_lines

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
HOST_COPIES = ("to host", "from host")
"""Kinds of transfers between a device's memory and its host's."""
COPIES = ("copy-start", "dynamic-update-slice-start", "dynamic-slice-start")
"""Kinds of instructions that start to copy an array, or a slice into or out of one. Without machine code an "async-start"
calls them."""
HOST = 5
"""Memory space of the host in a layout."""
ITEM_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4,
              "u32": 4, "f64": 8, "s64": 8, "u64": 8}  # fmt: skip

_LINE = re.compile(r"^\s*(ROOT )?%([\w.\-#]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Array:
  """An array of the program. ``in_memory``: it is in the device's main memory, not on the chip. ``on_host``: it is in host
  memory."""

  dtype: str
  shape: tuple[int, ...]
  in_memory: bool = True
  on_host: bool = False

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def bytes(self) -> int:
    return int(self.size * ITEM_BYTES.get(self.dtype, 1 if self.dtype.startswith("f8") else 0))


@dataclass(frozen=True, eq=False)
class Operation:
  """An instruction.

  Attributes:
    name, kind: as in HLO.
    results: its output arrays.
    operands: names of the instructions whose results it reads.
    text: the text after the operands.
    path: path of the code that requested it.
    frame: number of its source location in the program's table; 0 if there is none.
    root: True if it produces the result of its computation.
  """

  name: str
  kind: str
  results: tuple[Array, ...]
  operands: tuple[str, ...]
  text: str
  path: str
  frame: int
  root: bool

  @property
  def called(self) -> list[str]:
    """The computations that it calls, or that are fused into it."""
    branches = [name.strip().lstrip("%") for found in _BRANCHES.findall(self.text) for name in found.split(",")]
    return [*_CALLED.findall(self.text), *branches]

  @property
  def body(self) -> str:
    """The computation that a loop runs in each iteration."""
    return _one(r"body=%([\w.\-]+)", self.text)


@dataclass(frozen=True)
class Transfer:
  """A collective, or a copy between a device and its host.

  Attributes:
    kind: one of ``COLLECTIVES`` or ``HOST_COPIES``.
    bytes: bytes through one device in a step.
    times: number of runs in a step.
    asynchronous: True if it is asynchronous.
    between_slices: True if it leaves a slice.
  """

  kind: str
  bytes: int
  times: int
  asynchronous: bool
  between_slices: bool = False


@dataclass(eq=False)
class CompiledProgram:
  """The program of one device.

  Attributes:
    computations: by name, including those of fusions.
    entry: name of the main computation.
    places: "file.py:12" by the number of a frame: the innermost frame outside libraries.
  """

  computations: dict[str, list[Operation]]
  entry: str
  places: dict[int, str] = field(default_factory=dict)

  @functools.cached_property
  def operations(self) -> dict[str, Operation]:
    """Every operation by its name."""
    return {op.name: op for ops in self.computations.values() for op in ops}

  def requested_by(self, name: str) -> tuple[str, str]:
    """Return (path of the code that requested an operation, "file.py:12"). For an operation that the compiler inserted, use
    those of an operation that it computes or reads; empty if there is none."""
    for _ in range(8):
      op = self.operations.get(name)
      if op is None:
        break
      if op.path:
        return op.path.replace("\\'", "'"), self.places.get(op.frame, "")
      if op.kind == "fusion":
        named = [inner for inner in self.computations[op.called[0]] if inner.path]
        if named:
          return named[-1].path.replace("\\'", "'"), self.places.get(named[-1].frame, "")
      if not op.operands:
        break
      name = op.operands[0]
    return "", ""

  def running(self) -> Iterator[tuple[Operation, int]]:
    """Yield (operation, times it runs in a step), without the contents of fusions and asynchronous starts."""
    pending = [(self.entry, 1)]
    while pending:
      name, times = pending.pop()
      for op in self.computations[name]:
        yield op, times
        if op.kind == "while":
          pending.append((op.body, times * self.turns(op)))
        elif op.kind in ("conditional", "call"):
          # At most one branch runs. All branches are counted, because a step's branches are checks that rarely run.
          pending += [(called, times) for called in op.called]

  def turns(self, loop: Operation) -> int:
    """Return the number of iterations of a while loop: the compiler's annotation, or the constant that its condition compares
    the counter with, minus the counter's initial value (the compiler may have peeled the first iteration). It is 0 for the
    rounds that only an uneven load of experts needs.

    Raises:
      UserError: the condition is not such a comparison. In JAX's loops over layers it always is.
    """
    if MORE in loop.path:
      return 0
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):  # a body may contain two iterations
      return int(known[1])
    for op in self.computations[_one(r"condition=%([\w.\-]+)", loop.text)]:
      inside = self.computations[op.called[0]] if op.kind == "fusion" else [op]
      for compare in inside:
        if compare.kind != "compare" or "direction=LT" not in compare.text:
          continue
        for name in (*op.operands, *compare.operands):
          bound = self.operations.get(name)
          if bound is not None and (last := _number(bound)) is not None:
            return last - self._first(loop, [*op.operands, *compare.operands])
    raise UserError(f"compiled program: the number of iterations of loop {loop.name} is unknown")

  def _first(self, loop: Operation, compared: list[str]) -> int:
    """Return the initial value of a loop's counter, which is one of the names that its condition compares; 0 if it is not a
    constant."""
    for name in compared:
      counter, (_, numbered, index) = self.operations.get(name), name.partition("#")
      if counter is not None and counter.kind == "get-tuple-element":
        index = _one(r"index=(\d+)", counter.text)
      elif not numbered:
        continue
      begin = self.operations.get(loop.operands[0])
      at = None if begin is None or begin.kind != "tuple" else self.operations.get(begin.operands[int(index)])
      while at is not None and at.kind in ("copy", "copy-done", "copy-start", "bitcast"):
        at = self.operations.get(at.operands[0])
      return (at is not None and _number(at)) or 0
    return 0

  def flops(self, kernel: Callable[[Operation, list[Array]], float]) -> float:
    """Return the floating point operations of matrix products in a step.

    Args:
      kernel: (a call of a kernel, its operands) -> FLOPs of the kernel.
    """
    inside = functools.cache(lambda name: sum(self._product(op) for op in self._all_inside(name)))
    total = 0.0
    for op, times in self.running():
      if op.kind == "custom-call":
        total += times * kernel(op, self._operands(op))
      elif op.kind in ("fusion", "async-start"):
        total += times * sum(inside(name) for name in op.called)
      else:
        total += times * self._product(op)
    return total

  def _all_inside(self, name: str) -> Iterator[Operation]:
    for op in self.computations[name]:
      yield op
      if op.kind in ("fusion", "call"):  # a call is one for the SparseCores
        for called in op.called:
          yield from self._all_inside(called)

  def _operands(self, op: Operation) -> list[Array]:
    return [a for name in op.operands if name in self.operations for a in self.operations[name].results]

  def _product(self, op: Operation) -> float:
    if op.kind == "convolution":
      return _convolution(op, *self._operands(op)[:2])
    if op.kind == "dot":
      lhs = self._operands(op)[0]
      dims = [int(d) for d in _one(r"lhs_contracting_dims=\{([\d,]*)\}", op.text).split(",") if d]
      return 2.0 * op.results[0].size * math.prod(lhs.shape[d] for d in dims)
    return 0.0

  def transfers(self, chips_per_slice: int) -> list[Transfer]:
    """Return the collectives of a step and the copies to and from the host, summed by kind, asynchrony and reach."""
    found: collections.Counter[tuple[str, bool, bool]] = collections.Counter()
    times_of: collections.Counter[tuple[str, bool, bool]] = collections.Counter()
    for op, times in self.running():
      if op.kind == "send" and (between := _MEGASCALE.search(op.text)):
        # Between slices, the hosts reduce the data of their chips.
        kind, slices = between[2].lower().replace("_", "-"), between[1].count(",") + 1
        key = (kind, True, True)
        found[key] += int(times * op.results[0].bytes * (slices - 1) / slices * (2 if kind == "all-reduce" else 1))
        times_of[key] += times
      if (copied := self._host_copy(op)) is not None:
        kind, size = copied
        found[kind, op.name in self._hidden, False] += times * size
        times_of[kind, op.name in self._hidden, False] += times
      for inner, asynchronous in self._collectives(op):
        kind = next(c for c in COLLECTIVES if inner.kind.startswith(c))
        scatter = kind == "all-reduce" and op.kind == "fusion" and "all-reduce-scatter" in op.text
        kind = "reduce-scatter" if scatter else kind
        groups = _groups(inner.text)
        size = groups.shape[1] if groups is not None else 1
        arrays = self._operands(inner) if kind in ("reduce-scatter", "all-reduce", "all-to-all") else list(inner.results)
        if inner.kind.endswith("-start") and kind == "all-gather":
          arrays = list(inner.results[len(inner.results) // 2 :])
        moved = sum(a.bytes for a in arrays)
        share = 1.0 if kind == "collective-permute" else (size - 1) / size * (2 if kind == "all-reduce" else 1)
        far = groups is not None and bool(np.any(groups // chips_per_slice != groups[:, :1] // chips_per_slice))
        key = (kind, asynchronous, far)
        found[key] += int(times * moved * share)
        times_of[key] += times
    order = lambda key: (key[2], COLLECTIVES.index(key[0]) if key[0] in COLLECTIVES else len(COLLECTIVES), key[0], key[1])
    return [Transfer(k[0], found[k], times_of[k], *k[1:]) for k in sorted(found, key=order)]

  def _host_copy(self, op: Operation) -> tuple[str, int] | None:
    """Return the kind and bytes of a copy between device memory and host memory; None for any other operation."""
    large, kind = [a for a in op.results if a.size > 1], op.kind
    if kind == "async-start":
      kind = next(inner.kind for inner in self.computations[op.called[0]] if inner.root) + "-start"
    if kind not in COPIES or not any(a.on_host for a in large):
      return None
    # Results of a copy: destination, source. Results of a slice: its input, its output.
    to_host = large[0].on_host if kind == "copy-start" else kind == "dynamic-update-slice-start"
    return HOST_COPIES[0 if to_host else 1], min(a.bytes for a in large)

  @functools.cached_property
  def _hidden(self) -> set[str]:
    """Names of the copies that overlap with computation between their start and their end."""
    hidden, works = set(), ("fusion", "convolution", "dot", "custom-call", "while")
    for ops in self.computations.values():
      waiting: set[str] = set()
      for op in ops:
        if op.kind in (*COPIES, "async-start"):
          waiting.add(op.name)
        elif op.kind in works:
          hidden |= waiting
        elif op.kind.endswith("-done"):
          waiting -= {*op.operands}
    return hidden

  def _collectives(self, op: Operation) -> Iterator[tuple[Operation, bool]]:
    if op.kind.endswith("-done"):
      return
    if op.kind.startswith(COLLECTIVES):
      yield op, op.kind.endswith("-start")
    elif op.kind in ("fusion", "async-start"):
      # With the flags of a real run, a transfer starts in one fusion, continues in others next to products, and ends in
      # another. All of them contain the instruction; only the first counts.
      if op.name.startswith("async-collective-done") or "calls=%async_collective_fusion" in op.text:
        return
      asynchronous = op.kind == "async-start" or op.name.startswith("async-collective-start")
      for name in op.called:
        yield from ((inner, asynchronous) for inner in self._all_inside(name) if inner.kind.startswith(COLLECTIVES))


_MEGASCALE = re.compile(r'_xla_megascale_target="\{([^}]*)\}x.*?_xla_megascale_transfer_type="(\w+)"')


def _convolution(op: Operation, lhs: Array, rhs: Array) -> float:
  """Return the FLOPs of a convolution, which is how a TPU's program represents matrix products. Padding and holes are not
  counted."""
  names = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.text)
  assert names is not None, op.name
  lhs_labels, rhs_labels, out_labels = names[1], names[2], names[3]
  window = _window(op.text)
  total = 2.0 * rhs.shape[rhs_labels.index("i")] * op.results[0].shape[out_labels.index("f")]
  total *= op.results[0].shape[out_labels.index("b")]
  for d in range(len(lhs_labels) - 2):
    size, kernel, out = (a.shape[labels.index(str(d))] for a, labels in
                         ((lhs, lhs_labels), (rhs, rhs_labels), (op.results[0], out_labels)))  # fmt: skip
    at = np.arange(out)[:, None] * window["stride"][d] - window["pad"][d] + np.arange(kernel)[None] * window["rhs_dilate"][d]
    dilate = window["lhs_dilate"][d]
    total *= int(np.sum((at >= 0) & (at % dilate == 0) & (at // dilate < size)))
  batches = re.search(r"batch_group_count=(\d+)", op.text)
  return total / (int(batches[1]) if batches else 1)


def _window(text: str) -> dict[str, dict[int, int] | collections.defaultdict[int, int]]:
  found = re.search(r"window=\{([^}]*)\}", text)
  words = dict(word.split("=") for word in found[1].split()) if found else {}
  defaults = {"stride": 1, "pad": 0, "rhs_dilate": 1, "lhs_dilate": 1}
  return {
    name: collections.defaultdict(
      lambda default=default: default, {i: int(v.split("_")[0]) for i, v in enumerate(words.get(name, "").split("x")) if v}
    )
    for name, default in defaults.items()
  }


_IOTA = r"\[[\d,]+\](?:T\([\d,]+\))?"


def _iota(text: str) -> np.ndarray:
  """Parse "[2,4]T(1,0)": numbers from 0 in two rows of four, read by columns."""
  shape, *order = ([int(n) for n in numbers.split(",")] for numbers in re.findall(r"[\d,]+", text))
  numbers = np.arange(math.prod(shape)).reshape(shape)
  return (numbers.transpose(order[0]) if order else numbers).reshape(-1)


def _groups(text: str) -> np.ndarray | None:
  """Return the devices of each group of a collective, [groups, size]; None if the text has none."""
  if found := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", text):
    return np.array([[int(d) for d in group.split(",")] for group in re.findall(r"\{([\d, ]+)\}", found[1])])
  if found := re.search(rf"replica_groups=\[(\d+),(\d+)\]<=({_IOTA})", text):
    return _iota(found[3]).reshape(int(found[1]), int(found[2]))
  if found := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(({_IOTA}|[\d, ]+)\))? ?\{{([^}}]*)\}}", text):
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
    count = math.prod(sizes.values())
    listed = found[2] or f"[{count}]"
    devices = _iota(listed) if listed.startswith("[") else np.array([int(d) for d in listed.split(",")])
    # The groups run along some axes, or parts of axes: 'x':(2)4 are the 4 in the middle of 16 = 2 * 4 * 2.
    parts = [(name, int(before or 1), int(size or sizes[name]))
             for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", found[3])]  # fmt: skip
    shape: list[int] = []
    for name, size in sizes.items():
      done = 1
      for _, before, taken in sorted(part for part in parts if part[0] == name):
        shape += [before // done, taken]
        done = before * taken
      shape += [size // done, 1]
    inside = list(range(1, len(shape), 2))
    order = [*range(0, len(shape), 2), *inside]
    return devices.reshape(shape).transpose(order).reshape(-1, math.prod(shape[axis] for axis in inside))
  if found := re.search(r"source_target_pairs=\{([\d,{} ]*)\}", text):
    return np.array([[int(d) for d in pair.split(",")] for pair in re.findall(r"\{([\d, ]+)\}", found[1])])
  return None


def _number(op: Operation) -> int | None:
  found = re.match(r"(\d+)\)", op.text) if op.kind == "constant" else None
  return int(found[1]) if found else None


def _one(pattern: str, text: str) -> str:
  found = re.search(pattern, text)
  assert found is not None, f"{pattern} in {text[:200]}"
  return found[1]


def arrays(text: str) -> tuple[Array, ...]:
  """Parse the arrays of a type, such as "(bf16[8,128]{1,0:T(8,128)S(1)}, u32[])"."""
  found = []
  for dtype, dims, layout in _ARRAY.findall(text):
    elsewhere = re.search(r"S\((\d+)\)", layout)
    on_host = elsewhere is not None and int(elsewhere[1]) == HOST
    found.append(Array(dtype, tuple(int(d) for d in dims.split(",") if d), elsewhere is None, on_host))
  return tuple(found)


def read_program(text: str) -> CompiledProgram:
  """Read HLO text as returned by ``compiled.as_text()``."""
  computations: dict[str, list[Operation]] = {}
  entry, current = "", ""
  for line in hlo_lines(text):
    if line and not line[0].isspace() and line.endswith("{") and "->" in line:
      current = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
      computations[current] = []
      if line.startswith("ENTRY"):
        entry = current
    elif (found := _LINE.match(line)) and current:
      computations[current].append(_operation(found))
  return CompiledProgram(computations, entry, _places(text))


def _operation(found: re.Match[str]) -> Operation:
  root, name, kind, rest = found[1], found[2], found[4], found[5]
  inside = rest[: _closing(rest)]
  path = re.search(r'op_name="((?:[^"\\]|\\.)*)"', rest)
  frame = re.search(r"stack_frame_id=(\d+)", rest)
  text = rest if kind in ("parameter", "constant") else rest[len(inside) :]
  return Operation(
    name=name,
    kind=kind,
    results=arrays(found[3]),
    operands=() if kind in ("parameter", "constant") else tuple(re.findall(r"%([\w.\-#]+)", inside)),
    text=text[:4000],
    path=path[1] if path else "",
    frame=int(frame[1]) if frame else 0,
    root=bool(root),
  )


def _closing(rest: str) -> int:
  depth = 1
  for i, c in enumerate(rest):
    depth += (c == "(") - (c == ")")
    if depth == 0:
      return i
  return len(rest)


def _places(text: str) -> dict[int, str]:
  """Return "decoder.py:12" for each frame of the tables above the program: the innermost line of this project, or else the
  innermost line."""
  section = lambda name: re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, flags=re.MULTILINE)
  rows = lambda name: re.findall(r"^(\d+) (.*)$", found[1], flags=re.MULTILINE) if (found := section(name)) else []
  files = {int(n): value.strip('"') for n, value in rows("FileNames")}
  numbers = lambda value: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", value)}
  locations = {int(n): numbers(value) for n, value in rows("FileLocations")}
  lines = {n: (files.get(v.get("file_name_id", 0), ""), v.get("line", 0)) for n, v in locations.items()}
  frames = {int(n): numbers(value) for n, value in rows("StackFrames")}
  found = {}
  for number in frames:
    at, chain = number, []
    while at in frames and len(chain) < 100:
      chain.append(lines.get(frames[at].get("file_location_id", 0), ("", 0)))
      parent = frames[at].get("parent_frame_id", at)
      if parent == at:
        break
      at = parent
    ours = next((place for place in chain if "maxtext_like/" in place[0]), chain[0] if chain else ("", 0))
    found[number] = f"{ours[0].rpartition('maxtext_like/')[2]}:{ours[1]}"
  return found
