"""X-ray's cause search: replays a program on the host, equation by equation, to find where non-finite numbers first appeared.

For each output of each equation, in each iteration, the device has recorded whether it contains NaN, +inf or -inf. Following
the dataflow in execution order distinguishes causes from consequences:

- an output without non-finite numbers is clean, regardless of its operands (the operation masked them);
- an output whose operands carry a fault carries the earliest of their faults;
- infinities from literals and constants are intentional (masks, initial values of maxima) and remain so through operations that
  pass them on. An infinity with a sign that the intentional ones cannot have produced is a fault;
- NaN is a fault once an operation that computes or selects produces it; moving a NaN constant is not a fault;
- any other non-finite output is a fault that originates in that equation.

A stacked result of a scan carries a separate fault for each iteration into the next scan, so one layer is not blamed for
another.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_like.numerics import jaxprs, tensor_statistics
from maxtext_like.numerics.plan import SUBSET, Body, Frame, Node, Site, XrayPlan, propagates

Signs = frozenset  # of "+", "-", "nan"
_NONE: Signs = frozenset()
_BOTH: Signs = frozenset("+-")
_CARRIED = 128  # faults recorded for each value; of more, the earliest are kept
_FLIP = {"+": "-", "-": "+", "nan": "nan"}


@dataclasses.dataclass(frozen=True)
class Loop:
  """One loop around an equation. `index` is the row of xs in a scan, or the iteration (from 0) in a while loop."""

  kind: str
  index: int
  length: int
  reverse: bool = False
  # a while loop beyond its recorded history: the first iteration at which this equation was non-finite
  approximate: bool = False

  def __str__(self) -> str:
    name = "layer" if self.kind == "scan" else "iteration"
    return f"{name} {'>= ' if self.approximate else ''}{self.index}"


@dataclasses.dataclass(frozen=True)
class Fault:
  """A non-finite number that originates in one equation (or in an input of the program), in one iteration."""

  order: int
  site: Site
  loops: tuple[Loop, ...]
  row: np.ndarray
  operands: tuple["Operand", ...]
  params: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Operand:
  """An operand of an equation: the value of a literal, or the row of a measured tensor, or neither (not a float)."""

  dtype: str
  shape: tuple[int, ...]
  value: Any = None
  row: np.ndarray | None = None
  full: bool = False
  float: bool = True


@dataclasses.dataclass
class Value:
  """The state of a value in the replay: its earliest fault, the order of all faults that it carries, its intentional
  infinities, its statistics, and its slices along axis 0."""

  fault: Fault | None = None
  signs: Signs = _NONE
  row: np.ndarray | None = None
  full: bool = False
  slices: list["Value"] | None = None
  carried: frozenset[int] = frozenset()
  # those of `carried` that were measured on the complete way here; in a full plan all of them
  sure: frozenset[int] = frozenset()

  @property
  def tainted(self) -> bool:
    return self.fault is not None or bool(self.signs)


_CLEAN = Value()


@dataclasses.dataclass
class Findings:
  """All faults in execution order, and which of them reached the outputs."""

  faults: list[Fault]
  reached: list[tuple[int, frozenset[int]]]  # (output index, orders of the faults it carries)
  unsure: tuple[int, ...] = ()  # thin plans: orders of sites that may have masked a fault, in the order they were met
  sure: frozenset[int] = frozenset()  # orders of the faults that certainly reached an output


def search(plan: XrayPlan, data, n_outputs: int) -> Findings:
  """Replay a program's data (host arrays); the rules are described at the top of the module. Returns at once if every number is
  finite."""
  if not _any_bad(data):
    return Findings([], [])
  replay = _Replay()
  assert plan.frame.body is not None
  args = [replay.input(site, data["rows"], constant=False) for site in plan.inputs]
  consts = [replay.input(site, data["rows"], constant=True) for site in plan.consts]
  outs = replay.frame(plan.frame, data, args, (), consts)
  assert len(outs) == n_outputs
  reached = [(i, v.carried) for i, v in enumerate(outs) if v.carried]
  return Findings(replay.faults, reached, tuple(replay.unsure), frozenset().union(*(v.sure for v in outs)))


def _any_bad(data) -> bool:
  if isinstance(data, dict):
    return any(bool(tensor_statistics.bad(v).any()) if k == "rows" else _any_bad(v) for k, v in data.items())
  return isinstance(data, list | tuple) and any(_any_bad(v) for v in data)


class _Replay:
  def __init__(self):
    self.faults: list[Fault] = []
    self.unsure: dict[int, None] = {}

  def new_fault(self, site: Site, loops, row, operands=(), params=None) -> Fault:
    fault = Fault(len(self.faults), site, loops, np.array(row), tuple(operands), params or {})
    self.faults.append(fault)
    return fault

  def input(self, site: Site | None, rows, *, constant: bool) -> Value:
    """Return the value of an input of the program. NaN or infinities in an argument are a fault; infinities in a constant are
    intentional."""
    if site is None:
      return _CLEAN
    row = rows[site.row]
    signs = _signs(row)
    if not signs:
      return Value(row=row, full=site.full)
    if constant and "nan" not in signs:
      return Value(signs=signs, row=row, full=site.full)
    fault = self.new_fault(site, (), row)
    itself = frozenset((fault.order,))
    return Value(fault=fault, row=row, full=site.full, carried=itself, sure=itself)

  def frame(self, frame: Frame, data, args, loops, consts: Sequence[Value] | None = None) -> list[Value]:
    assert frame.body is not None
    return self.run_body(frame.body, data, args, loops, consts)

  def run_body(self, body: Body, data, args, loops, consts: Sequence[Value] | None = None) -> list[Value]:
    env: dict[Any, Value] = {}
    consts = [_constant(c) for c in body.consts] if consts is None else consts
    env.update(zip(body.jaxpr.constvars, consts, strict=True))
    env.update(zip(body.jaxpr.invars, args, strict=True))
    read = lambda atom: _constant(atom.val) if jaxprs.is_literal(atom) else env[atom]
    for node in body.nodes:
      operands = [read(v) for v in node.eqn.invars]
      outs = getattr(self, "replay_" + node.kind)(node, data, operands, loops)
      env.update(zip(node.eqn.outvars, outs, strict=True))
    return [read(v) for v in body.jaxpr.outvars]

  def replay_leaf(self, node: Node, data, operands, loops) -> list[Value]:
    if not node.sites:  # exact: the outputs contain the values of the operands
      floats = [v for v, a in zip(operands, node.eqn.invars, strict=True) if jaxprs.is_float(a.aval)]
      if len(node.eqn.outvars) == len(operands) and len(operands) > 1:
        return operands  # optimization_barrier and collectives of several values map one to one
      if len(floats) == 1:
        v = floats[0]
        signs = _signs_out(node.eqn.primitive.name, operands) if node.eqn.primitive.name in ("neg", "abs") else v.signs
        return [dataclasses.replace(v, signs=signs, slices=None)] * len(node.eqn.outvars)
      return [_side_by_side(floats)] * len(node.eqn.outvars)
    outs = []
    for site in node.sites:
      if site is None:
        outs.append(_CLEAN)
      elif not site.measured:
        outs.append(self.guess(node, site, operands))
      else:
        outs.append(self.judge(node, site, data["rows"][site.row], operands, loops))
    return outs

  def judge(self, node: Node, site: Site, row, operands: Sequence[Value], loops) -> Value:
    """Apply the rules of the module to one output."""
    value = Value(row=row, full=site.full)
    signs = _signs(row)
    if not signs:
      return value
    if any(v.fault is not None for v in operands):
      derived = _union(operands)
      value.fault, value.carried, value.sure = derived.fault, derived.carried, derived.sure
    elif not site.flag and signs <= _signs_out(node.eqn.primitive.name, operands):
      value.signs = signs
    else:
      ranges = [_operand(a, v) for a, v in zip(node.eqn.invars, operands, strict=True)]
      value.fault = self.new_fault(site, loops, row, ranges, dict(node.eqn.params))
      value.carried = value.sure = frozenset((value.fault.order,))
    return value

  def guess(self, node: Node, site: Site, operands: Sequence[Value]) -> Value:
    """Return the value of an output that a thin plan did not measure: it carries the faults of its operands, with certainty
    only if the equation propagates them."""
    derived = _union([v for v in operands if v.fault is not None])
    handed = [v.sure for i, v in enumerate(operands) if propagates(node.eqn, i)]
    sure = frozenset().union(*handed)
    if derived.fault is not None and derived.fault.order not in sure:
      self.unsure.setdefault(site.order)
    return Value(derived.fault, carried=derived.carried, sure=sure)

  def replay_call(self, node: Node, data, operands, loops) -> list[Value]:
    assert node.body is not None
    return self.run_body(node.body, data, operands, loops)

  def replay_scan(self, node: Node, data, operands, loops) -> list[Value]:
    data = data["children"][node.child]
    length, reverse = node.eqn.params["length"], node.eqn.params["reverse"]
    n_consts, n_carry = jaxprs.scan_counts(node.eqn)
    consts, carry, xs = operands[:n_consts], operands[n_consts : n_consts + n_carry], operands[n_consts + n_carry :]
    ys = [[_CLEAN] * length for _ in node.eqn.outvars[n_carry:]]
    flagged = _bad_iterations(data, length)
    steps = range(length - 1, -1, -1) if reverse else range(length)
    for step, i in enumerate(steps):
      here = [v.slices[i] if v.slices is not None else v for v in xs]
      soon = any(flagged[j] for j in steps[step : step + 2])  # the previous iteration has the operands' ranges
      # Iterations without any non-finite number are skipped.
      if not soon and not any(v.tainted for v in (*consts, *carry, *here)):
        continue
      loop = Loop("scan", i, length, reverse)
      outs = self.frame(node.frames[0], _take(data, i), [*consts, *carry, *here], (*loops, loop))
      carry = outs[:n_carry]
      for stacked, v in zip(ys, outs[n_carry:], strict=True):
        stacked[i] = v
    return [*carry, *(_stacked(values) for values in ys)]

  def replay_while(self, node: Node, data, operands, loops) -> list[Value]:
    data = data["children"][node.child]
    steps, history = int(data["steps"]), data["history"]
    n_consts = node.eqn.params["cond_nconsts"]
    n_body = node.eqn.params["body_nconsts"]
    consts, carry = operands[n_consts : n_consts + n_body], operands[n_consts + n_body :]
    slots = history["rows"].shape[0]
    flagged = _bad_iterations(history, slots)
    for i in range(min(steps, slots)):
      if not flagged[i : i + 2].any() and not any(v.tainted for v in (*consts, *carry)):
        continue
      first, approximate = i, i == slots - 1 and steps > slots
      if approximate:
        later = data["first_bad"][0]
        first = int(later[later >= i].min(initial=steps))
      loop = Loop("while", first, steps, approximate=approximate)
      carry = self.frame(node.frames[0], _take(history, i), [*consts, *carry], (*loops, loop))
    return list(carry)

  def replay_cond(self, node: Node, data, operands, loops) -> list[Value]:
    data = data["children"][node.child]
    taken = np.unique(data["branch"])  # several only if shards of a shard_map took different branches
    results = [self.frame(node.frames[b], data["branches"][b], operands[1:], loops) for b in taken]
    return results[0] if len(results) == 1 else [_union(values) for values in zip(*results, strict=True)]

  def replay_shard_map(self, node: Node, data, operands, loops) -> list[Value]:
    shards = data["children"][node.child]
    drop = lambda v: dataclasses.replace(v, slices=None)  # slices of the array are not slices of the shards
    return self.frame(node.frames[0], over_shards(shards), [drop(v) for v in operands], loops)


def over_shards(data, axis: int = 0):
  """Return the data of a shard_map's body without its shard axis: rows are merged, the largest counter is kept, branches stay
  separate."""

  def walk(tree, key):
    if isinstance(tree, dict):
      return {k: walk(v, k) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
      return [walk(v, key) for v in tree]
    if key == "rows":
      return tensor_statistics.merge_axis(tree, axis)
    if key == "branch":
      return np.moveaxis(tree, axis, -1)
    return tree.min(axis) if key == "first_bad" else tree.max(axis)

  return walk(data, "")


def _take(data, i: int):
  if isinstance(data, dict):
    return {k: _take(v, i) for k, v in data.items()}
  return [_take(v, i) for v in data] if isinstance(data, list | tuple) else data[i]


def _bad_iterations(data, length: int) -> np.ndarray:
  """Return which iterations contain a non-finite number anywhere inside, including inner loops."""
  found = np.zeros(length, bool)

  def walk(tree):
    if isinstance(tree, dict):
      if "rows" in tree:
        bad = tensor_statistics.bad(tree["rows"])
        found[:] |= bad.reshape(length, -1).any(1)
      for v in tree.values():
        walk(v)
    elif isinstance(tree, list | tuple):
      for v in tree:
        walk(v)

  walk(data)
  return found


def _signs(row) -> Signs:
  positive, infinite = int(row[tensor_statistics.POS_INF]), int(row[tensor_statistics.INF])
  found = {"+"} if positive else set()
  found |= {"-"} if infinite != positive else set()
  return frozenset(found | ({"nan"} if row[tensor_statistics.NAN] else set()))


def _signs_out(op: str, operands: Sequence[Value]) -> Signs:
  """Return the signs of infinity (and NaN) that an operation can pass on from intentional ones in its operands."""
  signs = [v.signs for v in operands]
  every = frozenset().union(*signs) if signs else _NONE
  if not every:
    return _NONE
  moves = op in SUBSET or op in ("gather", "scatter", "dynamic_slice", "concatenate", "broadcast_in_dim", "copy")
  moves = moves or op in ("reshape", "transpose", "squeeze", "expand_dims", "rev", "convert_element_type", "scan")
  if moves:
    return every
  infinities = every - {"nan"}
  if op == "neg":
    return frozenset(_FLIP[s] for s in every)
  if op == "sub":
    return (signs[0] | frozenset(_FLIP[s] for s in signs[1])) - {"nan"}
  if op in ("exp", "exp2", "expm1", "abs", "square", "log", "log1p", "sqrt", "cosh"):
    return frozenset("+") if infinities and (op in ("abs", "square", "cosh") or "+" in infinities) else _NONE
  passes = op.startswith(("reduce", "cum", "add", "select", "max", "min", "clamp", "sort", "psum", "pmax", "pmin", "scatter"))
  if passes or op in ("stop_gradient", "optimization_barrier", "sharding_constraint", "top_k", "pvary"):
    return infinities
  return _BOTH if infinities else _NONE


def _constant(value) -> Value:
  """Return the value of a literal or of a constant of an inner jaxpr."""
  if not hasattr(value, "dtype") and not isinstance(value, float | complex):
    return _CLEAN
  if hasattr(value, "dtype") and not jaxprs.is_float(value):
    return _CLEAN
  numbers = np.asarray(value).astype(np.complex64 if np.iscomplexobj(value) else np.float32)
  if np.isfinite(numbers).all():
    return _CLEAN
  real = numbers.real
  signs = {"+"} if np.isposinf(real).any() else set()
  signs |= {"-"} if np.isneginf(real).any() else set()
  signs |= {"nan"} if np.isnan(numbers).any() else set()
  return Value(signs=frozenset(signs))


def _operand(atom, value: Value) -> Operand:
  aval = atom.aval
  floats = jaxprs.is_float(aval)
  literal = np.asarray(atom.val) if jaxprs.is_literal(atom) else None
  shape = tuple(getattr(aval, "shape", ()))
  return Operand(str(getattr(aval, "dtype", "")), shape, literal, value.row, value.full, floats)


def _union(values: Sequence[Value]) -> Value:
  faults = [v.fault for v in values if v.fault is not None]
  signs = frozenset().union(*(v.signs for v in values))
  row = next((v.row for v in values if v.row is not None), None)
  earliest = min(faults, key=lambda f: f.order) if faults else None
  carried = frozenset().union(*(v.carried for v in values))
  if len(carried) > _CARRIED:
    carried = frozenset(sorted(carried)[:_CARRIED])
  sure = frozenset().union(*(v.sure for v in values)) & carried
  return Value(earliest, signs, row, any(v.full for v in values), carried=carried, sure=sure)


def _side_by_side(values: Sequence[Value]) -> Value:
  """Return a value that represents several arrays together; its range covers those of all arrays with a known range."""
  whole, known = _union(values), [(v.row, v.full) for v in values if v.row is not None]
  if len(known) < 2:
    return whole
  row = tensor_statistics.merge_axis(np.stack([row for row, _ in known]))
  return dataclasses.replace(whole, row=row, full=all(full for _, full in known))


def _stacked(values: list[Value]) -> Value:
  whole = _union(values) if values else _CLEAN
  rows = [v.row for v in values if v.row is not None]
  row = tensor_statistics.merge_axis(np.stack(rows)) if rows else None
  return Value(whole.fault, whole.signs, row, whole.full, values, whole.carried, whole.sure)
