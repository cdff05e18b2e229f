"""A lower bound of the bytes that a compiled program moves through a device's main memory in a step.

Each instruction reads each operand once, however often it is used inside, and only the part that its results need: if a fusion,
possibly nested, slices a layer out of a stack of layers, only the layer counts. It writes its results; for an array that is
updated in place, only the written elements count. Of several slices of one array the largest counts, because they may be the
same.
"""

import functools
import re

from maxtext_like.capacity.compiled_program import COLLECTIVES, COPIES, Array, CompiledProgram, Operation

_NOTHING = frozenset("parameter constant get-tuple-element tuple bitcast after-all iota partition-id replica-id".split())
"""Kinds of instructions that move no data."""
_MARK = re.compile(r'custom_call_target="(?:AllocateBuffer|AssumeGatherIndicesInBound|ConcatBitcast|PrepareAsyncCall\w+)"')
"""Custom calls that are annotations for the compiler and move no data."""
_PUT = {"dynamic-update-slice": 1, "scatter": 2}
"""Kinds of instructions that write elements into their first operand, and the index of the operand with these elements."""

Put = tuple[int, int]
"""For a result in an operand's memory: the number of elements written into it, and the index of that operand."""


class Traffic:
  """The memory traffic of a program, in bytes of one device."""

  def __init__(self, program: CompiledProgram):
    self._program = program
    self._of = functools.cache(self._computation)
    self._needed = functools.cache(self._needed_inside)
    self._chains = functools.cache(self._chains_inside)

  def step(self) -> int:
    """Return the bytes of a step.

    Raises:
      UserError: the number of iterations of a loop is unknown.
    """
    return self._of(self._program.entry)

  def _computation(self, name: str) -> int:
    """Return the bytes of one run of a computation. Of several branches the one with the fewest bytes counts: others may be
    checks that rarely run."""
    total = 0
    for op in self._program.computations[name]:
      if op.kind == "while":
        total += self._program.turns(op) * self._of(op.body)
      elif op.kind == "conditional":
        total += min(map(self._of, op.called))
      elif op.kind == "call":
        total += sum(map(self._of, op.called))
      else:
        total += self.moved(op)
    return total

  def moved(self, op: Operation) -> int:
    """Return the bytes of an instruction that is not a loop, branch or call, including the instructions fused into it."""
    if op.kind in _NOTHING or op.kind.endswith("-done") or _MARK.search(op.text):
      return 0
    if op.kind in (*COPIES, "async-start"):
      # Results of a copy: destination, source and a state. Results of a slice: input, output and a state.
      both = [a for a in op.results[: max(1, len(op.results) - 1)] if a.size > 1]
      return min((a.bytes for a in both), default=0) * min(2, sum(a.in_memory for a in both))
    same = re.findall(r"\{(\d*)\}: \((\d+), \{\}\)", op.text)  # results in an operand's own memory
    given, kept = {int(b) for _, b in same}, {int(a or 0) for a, _ in same}
    reads: dict[str, int] = {}
    for i, (name, numbers) in enumerate(zip(op.operands, self._needs(op, _size(op.results), in_place=True), strict=True)):
      if i not in given:
        reads[name] = max(reads.get(name, 0), numbers)
    total = sum(_bytes(self._results(name), numbers) for name, numbers in reads.items())
    for i, array in enumerate(op.results):
      put = self._put(op, i)
      total += _bytes((array,), min(put[0], array.size) if put is not None else 0 if i in kept else array.size)
    return total

  def _results(self, name: str) -> tuple[Array, ...]:
    op = self._program.operations.get(name)
    return () if op is None else op.results

  def _size_of(self, name: str) -> int:
    return _size(self._results(name))

  def _needs(self, op: Operation, wanted: int, *, in_place: bool) -> list[int]:
    """Return the number of elements of each operand that this many elements of the results need at least.

    Args:
      in_place: elements are written into an operand's own memory; otherwise the rest of the operand is read for the result.
    """
    sizes = [self._size_of(name) for name in op.operands]
    if op.kind in _PUT:
      return [0 if in_place else max(0, wanted - sizes[_PUT[op.kind]]), *sizes[1:]]
    if op.kind in ("dynamic-slice", "slice", "gather"):
      return [min(sizes[0], wanted), *sizes[1:]]
    if op.kind == "fusion":
      needed = self._needed(op.called[0], in_place)
      sizes = [min(size, needed.get(i, 0)) for i, size in enumerate(sizes)]
    part = wanted < _size(op.results) and not op.kind.startswith(COLLECTIVES)
    return [min(size, wanted) for size in sizes] if part or op.kind == "pad" else sizes

  def _needed_inside(self, name: str, in_place: bool) -> dict[int, int]:
    """Return the number of elements of each parameter of a fused computation that its results need at least."""
    ops = self._program.computations[name]
    wanted: dict[str, int] = {}
    chained: set[str] = set()
    for result, (put, chain) in zip(_outputs(ops), self._chains(name), strict=True):
      if in_place and put is not None:
        chained.update(chain)
        if not put[0]:
          continue  # unchanged
      wanted[result] = self._size_of(result)
    needed: dict[int, int] = {}
    for op in reversed(ops):  # operands come before their users
      numbers = wanted.get(op.name, 0)
      if op.kind == "parameter":
        needed[int(op.text.split(")")[0])] = numbers
      elif numbers:
        for operand, need in zip(op.operands, self._needs(op, numbers, in_place=op.name in chained), strict=True):
          wanted[operand] = max(wanted.get(operand, 0), need)
    return needed

  def _chains_inside(self, name: str) -> list[tuple[Put | None, list[str]]]:
    """Return for each result of a fused computation what is written into the parameter in whose memory it is (None if it is in
    none), and the instructions in between."""
    found = []
    for result in _outputs(self._program.computations[name]):
      numbers, index, chain, op = 0, 0, [], self._program.operations[result]
      while op.kind != "parameter":
        chain.append(op.name)
        if op.kind in ("bitcast", "get-tuple-element"):
          index = int(op.text.split("index=")[1].split(",")[0]) if op.kind == "get-tuple-element" else index
          operand = 0
        elif (put := self._put(op, index)) is not None:
          numbers, operand, index = numbers + put[0], put[1], 0
        else:
          break
        op = self._program.operations[op.operands[operand]]
      found.append(((numbers, int(op.text.split(")")[0])) if op.kind == "parameter" else None, chain))
    return found

  def _put(self, op: Operation, index: int) -> Put | None:
    """Return what is written into a result of an instruction."""
    if op.kind in _PUT:
      return min(self._size_of(op.operands[_PUT[op.kind]]), _size(op.results)), 0
    if op.kind == "fusion" and index < len(chains := self._chains(op.called[0])):
      return chains[index][0]
    return None


def _outputs(ops: list[Operation]) -> tuple[str, ...]:
  root = next(op for op in ops if op.root)
  return root.operands if root.kind == "tuple" else (root.name,)


def _size(arrays: tuple[Array, ...]) -> int:
  return sum(a.size for a in arrays)


def _bytes(arrays: tuple[Array, ...], numbers: int) -> int:
  """Return the bytes of this many elements of arrays in main memory."""
  size = _size(arrays)
  return sum(a.bytes * numbers // size for a in arrays if a.in_memory and numbers)
