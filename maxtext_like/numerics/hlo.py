"""Reads a lowered or compiled program as a flat list of instructions, with dtypes and the scope names of layers.

Two formats are supported: StableHLO, the input of the compiler, and HLO, its output. In both, every instruction has the path of
the code that requested it, ``jit(step)/transpose(jvp(attention))/qk_product/dot_general``: transformations, loops and the scope
names of the layers (``jax.named_scope``).
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Pass = Literal["forward", "recomputed", "backward"]

FLOATS = ("f64", "f32", "bf16", "f16")
"""Dtypes that this project computes in, as programs spell them. float8 dtypes begin with f8."""

_WRAPPED = re.compile(r"^(?:transpose|jvp|vmap|remat|checkpoint)\((.*)\)$")
_NAME = re.compile(r'^loc\("((?:[^"\\]|\\.)*)"')
_ELEMENT = re.compile(r"^(?:tensor|memref)<(?:[\d?]+x)*([a-z]\w*)")
_SHAPE = re.compile(r"^tensor<((?:\d+x)*)")


@dataclass(frozen=True, kw_only=True)
class Instruction:
  """One instruction of a program. The body of a loop counts once; a function counts once for each call.

  Attributes:
    kind: StableHLO's name, such as "exponential" or "multiply". dot_general, ragged_dot and convolution are "dot".
    path: path of the code that requested it.
    operands, results: dtypes, such as "bf16".
    precision: of a dot: "default", "high" or "highest"; otherwise "".
    target: the target of a custom call.
    reducer: the operation of a reduction, such as "add".
    placed: for a sum between devices in a compiled program, one bool per array: True if every device adds its part of the array
      into zeros, so that the sum is a gather and exact in every dtype.
  """

  kind: str
  path: str
  operands: tuple[str, ...]
  results: tuple[str, ...]
  precision: str = ""
  target: str = ""
  reducer: str = ""
  placed: tuple[bool, ...] = ()

  @property
  def stage(self) -> Pass:
    """The pass that it belongs to. Parts of the forward pass that the backward pass recomputes are "recomputed"."""
    if "rematted_computation" in self.path:
      return "recomputed"
    return "backward" if "transpose(" in self.path else "forward"

  @property
  def scopes(self) -> tuple[str, ...]:
    """The names in the path, outermost first, without transformations and without the operation's own name."""
    return _scopes(self.path)


@functools.cache
def _scopes(path: str) -> tuple[str, ...]:
  pieces = []
  for piece in path.split("/")[:-1]:
    while wrapped := _WRAPPED.match(piece):
      piece = wrapped[1]
    if piece:
      pieces.append(piece)
  return tuple(pieces)


@dataclass(frozen=True, kw_only=True)
class Reading:
  """A program.

  Attributes:
    instructions: all instructions, including those of called functions.
    arguments: dtype of every argument by name, such as ``state['params']['embedding']['table']``.
    gradients: dtypes of the gradients that are scaled for clipping; empty if the text does not show them.
  """

  instructions: list[Instruction]
  arguments: dict[str, str]
  gradients: set[str] = field(default_factory=set)


def read_stablehlo(module: Any) -> Reading:
  """Read an MLIR module, as ``lowered.compiler_ir("stablehlo")`` returns it."""
  functions = {}
  for op in module.body.operations:
    if op.operation.name == "func.func":
      functions[_text(op.attributes["sym_name"])] = op
  main = functions["main"]
  body = main.regions[0].blocks[0]
  arguments = {name: _element(a.type) for a in body.arguments if (name := _name(a.location))}
  shapes = {_shape(a.type) for a in body.arguments if _name(a.location).startswith("state['params']")}
  return Reading(
    instructions=list(_walk(main, "", functions)),
    arguments=arguments,
    gradients=_gradient_dtypes(body, shapes),
  )


def _walk(op: Any, prefix: str, functions: dict[str, Any]) -> Iterator[Instruction]:
  for region in op.regions:
    for body in region.blocks:
      for inner in body.operations:
        o = inner.operation
        path = _joined(prefix, _name(o.location))
        if o.name in ("func.call", "call"):
          yield from _walk(functions[_text(o.attributes["callee"])], path, functions)
          continue
        dialect, _, name = o.name.partition(".")
        if dialect in ("stablehlo", "chlo") and o.results:
          yield _instruction(o, name, path)
        # The body of a reduction is one scalar operation, which is recorded with the reduction.
        if name not in ("reduce", "reduce_window", "scatter", "sort", "all_reduce", "reduce_scatter", "select_and_scatter"):
          # Names inside a shard_map start from scratch; names inside a loop continue the outer path.
          yield from _walk(o, path if o.name == "sdy.manual_computation" else prefix, functions)


def _instruction(o: Any, name: str, path: str) -> Instruction:
  precision = target = reducer = ""
  if name in ("dot_general", "ragged_dot", "dot", "convolution"):
    name = "dot"
    words = (
      re.findall(r"DEFAULT|HIGHEST|HIGH", str(o.attributes["precision_config"])) if "precision_config" in o.attributes else []
    )
    precision = (words[0] if words else "DEFAULT").lower()
  elif name == "custom_call":
    target = _text(o.attributes["call_target_name"])
  elif name in ("reduce", "all_reduce", "reduce_scatter") and len(o.regions):
    reducer = o.regions[0].blocks[0].operations[0].operation.name.partition(".")[2]
  operands, results = (tuple(_element(v.type) for v in values) for values in (o.operands, o.results))
  return Instruction(
    kind=name, path=path, operands=operands, results=results, precision=precision, target=target, reducer=reducer
  )


def _joined(prefix: str, name: str) -> str:
  # JAX lowers a function once, with names relative to the call.
  return f"{prefix}/{name}" if prefix and name else prefix or name


def _name(location: Any) -> str:
  found = _NAME.match(str(location))
  return found[1] if found else ""


def _text(attribute: Any) -> str:
  return str(attribute).strip('@"')


def _element(kind: Any) -> str:
  found = _ELEMENT.match(str(kind))
  return found[1] if found else str(kind)


def _shape(kind: Any) -> str:
  found = _SHAPE.match(str(kind))
  return found[1] if found else ""


def _gradient_dtypes(body: Any, shapes: set[str]) -> set[str]:
  """Return the dtypes of the arrays that are multiplied by the clipping factor: arrays of a parameter's shape, outside every
  named scope.

  The step converts a gradient to float32 there. A conversion with no other reader is that conversion, and its input has the
  gradient's dtype. Without a conversion, or if the finiteness check reads the same array, the array is the gradient. The
  clipping factor is the scalar that most of these arrays are multiplied by. With several factors in a row (a norm beyond
  float32 is applied in two halves) it is the first.
  """
  found: dict[Any, list[str]] = {}
  scaled = set()
  for op in body.operations:
    o = op.operation
    path = _name(o.location)
    if o.name != "stablehlo.multiply" or len(_scopes(path)) > 1 or not path.endswith("/mul"):
      continue
    value, factor = o.operands[0], _source(o.operands[1])
    shape = _shape(value.type)
    if not shape or shape not in shapes or factor is None or factor.name != "stablehlo.broadcast_in_dim":
      continue
    scaled.add(o.results[0])
    if value in scaled:
      continue
    source, scalar = _source(value), factor.operands[0]
    if source is not None and source.name == "stablehlo.convert" and len(list(value.uses)) == 1:
      value = source.operands[0]
    made = _source(scalar)
    if made is not None and made.name == "stablehlo.convert":
      scalar = made.operands[0]
    found.setdefault(scalar, []).append(_element(value.type))
  return set(max(found.values(), key=len, default=[]))


def _source(value: Any) -> Any:
  """Return the operation that produces a value; None for an argument of the body."""
  owner = getattr(value.owner, "operation", value.owner)
  return owner if hasattr(owner, "name") and hasattr(owner, "operands") else None


_HLO_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-#]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_BY_NUMBER = re.compile(r"%([\w.\-]+)#(\d+)")
_HLO_TYPE = re.compile(r"\b(pred|bf16|f\d+\w*|[suc]\d+|token)\[")
_HLO_KINDS = {
  "convolution": "dot",
  "exponential-minus-one": "exponential_minus_one",
  "log-plus-one": "log_plus_one",
  "custom-call": "custom_call",
  "all-reduce": "all_reduce",
  "all-reduce-start": "all_reduce",
  "reduce-scatter": "reduce_scatter",
}


def hlo_lines(text: str) -> list[str]:
  """Return the lines of HLO text, one instruction per line.

  Newer compilers write an element of a tuple, at the place where it is read, as ``%while.3#14``. This function adds an
  instruction with that name: ``%while.3#14 = f32[8]{0} get-tuple-element(%while.3), index=14``.
  """
  # The description of a kernel, JSON inside an instruction, spans several lines.
  lines = re.sub(r'\n(?="|\}\})', " ", text).splitlines()
  if not any(map(_BY_NUMBER.search, lines)):
    return lines
  types = {found[1]: found[2] for found in map(_HLO_LINE.match, lines) if found and found[2].startswith("(")}
  whole, known = [], set()
  for line in lines:
    for name, index in _BY_NUMBER.findall(line):
      if (name, index) not in known and name in types:
        known.add((name, index))
        whole.append(f"  %{name}#{index} = {_element_type(types[name], int(index))} get-tuple-element(%{name}), index={index}")
    whole.append(line)
  return whole


def _element_type(tuple_type: str, index: int) -> str:
  """Return an element of a tuple type: for "(f32[8,2]{1,0:T(8,128)}, (s32[], u32[]))" and 1 it is "(s32[], u32[])"."""
  depth, begin, elements = 0, 1, []
  for i, c in enumerate(tuple_type):
    depth += (c in "([{") - (c in ")]}")
    if (c == "," and depth == 1) or (c == ")" and depth == 0):
      elements.append(tuple_type[begin:i].strip())
      begin = i + 1
  return re.sub(r"/\*index=\d+\*/", "", elements[index]).strip()


def read_hlo(text: str) -> Reading:
  """Read the HLO text of a compiled program, including the instructions inside fusions."""
  # First pass: type, opcode and operands of every instruction.
  types: dict[str, tuple[str, ...]] = {}
  made: dict[str, tuple[str, str]] = {}  # opcode and the text after it, by the name of an instruction
  roots: dict[str, str] = {}  # the last instruction of each computation
  parameters: dict[str, dict[int, str]] = {}  # parameters of each computation, by number
  instructions, arguments = [], {}
  lines = hlo_lines(text)
  computation = ""
  for line in lines:
    if line and not line[0].isspace():
      computation = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
    if found := _HLO_LINE.match(line):
      types[found[1]] = tuple(_HLO_TYPE.findall(found[2]))
      made[found[1]] = found[3], found[4]
      if line.lstrip().startswith("ROOT"):
        roots[computation] = found[1]
      if found[3] == "parameter":
        parameters.setdefault(computation, {})[int(_operands(found[4]))] = found[1]
  # Second pass: the instructions, with the dtypes of their operands.
  sources = _Sources.of(made, roots, parameters)
  entry = False
  for line in lines:
    if line and not line[0].isspace():
      entry = line.startswith("ENTRY")
    found = _HLO_LINE.match(line)
    if not found:
      continue
    name, _, opcode, rest = found.groups()
    path = found_path[1] if (found_path := re.search(r'op_name="((?:[^"\\]|\\.)*)"', rest)) else ""
    path = path.replace("\\'", "'")
    if opcode == "parameter":
      if entry and path:
        arguments[path] = types[name][0] if types[name] else ""
      continue
    names = _names(rest)
    target = re.search(r'custom_call_target="([^"]*)"', rest)
    precision = re.search(r"operand_precision=\{(\w+)", rest)
    kind = _HLO_KINDS.get(opcode, opcode.replace("-", "_"))
    instructions.append(
      Instruction(
        kind=kind,
        path=path,
        operands=tuple(t for n in names for t in types.get(n, ())),
        results=types[name],
        precision=(precision[1] if precision else "default") if kind == "dot" else "",
        target=target[1] if target else "",
        reducer=_hlo_reducer(rest, roots, made) if kind in ("reduce", "all_reduce", "reduce_scatter") else "",
        placed=tuple(map(sources.placed, names)) if kind == "all_reduce" else (),
      )
    )
  return Reading(instructions=instructions, arguments=arguments)


def _operands(rest: str) -> str:
  """Return the text up to the bracket that closes the operands."""
  depth = 1
  for i, c in enumerate(rest):
    depth += (c == "(") - (c == ")")
    if depth == 0:
      return rest[:i]
  return rest


def _names(rest: str) -> list[str]:
  return re.findall(r"%([\w.\-#]+)", _operands(rest))


_Made = dict[str, tuple[str, str]]
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_SAME_ARRAY = ("copy", "copy-start", "copy-done", "bitcast", "fusion", "parameter")


def _hlo_reducer(rest: str, roots: dict[str, str], made: _Made) -> str:
  found = re.search(r"to_apply=%?([\w.\-]+)", rest)
  return made[roots[found[1]]][0] if found and found[1] in roots else ""


@dataclass(frozen=True)
class _Sources:
  """Finds where arrays come from in HLO text.

  Attributes:
    made: opcode and the text after it, by the name of an instruction.
    roots: the last instruction of each computation.
    given: the operand of a fusion, by the name of the matching parameter inside.
  """

  made: _Made
  roots: dict[str, str]
  given: dict[str, str]

  @classmethod
  def of(cls, made: _Made, roots: dict[str, str], parameters: dict[str, dict[int, str]]) -> "_Sources":
    """Build it from the instructions. ``parameters`` are those of each computation, by number."""
    given = {}
    for opcode, rest in made.values():
      if opcode == "fusion" and (called := _CALLED.search(rest)):
        own = parameters.get(called[1], {})
        given |= {own[n]: name for n, name in enumerate(_names(rest)) if n in own}
    return cls(made, roots, given)

  def before(self, name: str) -> list[str]:
    """Return what an instruction reads. For a fusion it is the fusion's result inside; for a parameter inside it is the
    fusion's operand."""
    opcode, rest = self.made.get(name, ("", ""))
    if opcode == "fusion" and (called := _CALLED.search(rest)):
      return [self.roots[called[1]]] if called[1] in self.roots else []
    if opcode == "parameter":
      return [self.given[name]] if name in self.given else []
    return _names(rest)

  def maker(self, name: str) -> str:
    """Return the instruction that produced an array, ignoring copies."""
    while self.made.get(name, ("", ""))[0] in _SAME_ARRAY and (before := self.before(name)):
      name = before[0]
    return name

  def opcode(self, name: str) -> str:
    return self.made.get(name, ("", ""))[0]

  def by_device(self, name: str) -> bool:
    """Return True if a number depends on the device's own number."""
    seen, todo = set(), [name]
    while todo:
      if (name := todo.pop()) not in seen:
        seen.add(name)
        if self.opcode(name) in ("partition-id", "replica-id"):
          return True
        todo += self.before(name)
    return False

  def placed(self, name: str) -> bool:
    """Return True if an array is zero except for a part at an offset that depends on the device's number. Compilers gather
    parts of uneven sizes this way. The gradient of a slice is also zero except for a part, but at the same offset on all
    devices."""
    update = self.maker(name)
    if self.opcode(update) != "dynamic-update-slice":
      return False
    base, _, *offsets = self.before(update)
    zeros = self.maker(base)
    if self.opcode(zeros) == "broadcast":
      zeros = self.maker(self.before(zeros)[0])
    none = self.opcode(zeros) == "constant" and _operands(self.made[zeros][1]) == "0"
    return none and any(map(self.by_device, offsets))
