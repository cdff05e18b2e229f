"""X-ray's plan: which tensors of a jaxpr are measured, and where each statistic is in the program's extra output.

The plan is static: it is built once from the jaxpr. The interpreter follows it on the device and the cause search follows it on
the host. A Frame is a unit of execution (the program, the body of a loop, a branch, the body of a shard_map) and has one array
of rows. Calls (jit, remat, custom derivatives) are inlined into the surrounding frame.

``build`` makes a full plan. ``MeasuredTensors`` turns it into a thin plan, which measures only a few tensors without missing a
non-finite number. An equation such as a sum or a product propagates every NaN and infinity of its operand to its result, so
checking the result covers the operand. A thin plan measures

- key tensors in full: operands and results of matrix products, exponentials and tagged tensors;
- of all others, by one flag each, those that no equation propagates: they are read only by selects, quotients, maxima etc., or
  leave a loop.

If something is found, its *region*, the unmeasured equations that it was computed from, is measured by a second program
(`detail`), and the cause is exact. This reduces compile time: about 400 reductions instead of 1500 for three layers with their
gradients.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxtext_like.numerics import jaxprs, tensor_statistics

# The output has exactly the values of the operands: measuring it adds no information, and faults pass through unchanged.
EXACT = frozenset(
  """reshape transpose broadcast_in_dim squeeze expand_dims rev copy copy_p neg abs optimization_barrier sharding_constraint
  pvary pcast reshard mesh_cast concatenate device_put name layout_constraint all_gather all_to_all ppermute pbroadcast
  all_gather_invariant stack stop_gradient real imag complex reduce_precision_identity""".split()
)
# The output has some values of the operands: only non-finite numbers and the maximum are measured.
SUBSET = frozenset("slice dynamic_slice split unstack dynamic_update_slice pad select_and_gather_add".split())
# The statistics of the output follow from those of the operand: measured like SUBSET. The arithmetic ones are included only if
# all operands but one are scalars (x * 0.5, x + eps).
_BOUNDED = frozenset("tanh logistic erf sin cos sign floor ceil round clamp select_n integer_pow square".split())
_SCALED = frozenset("mul add sub div max min add_any".split())
TAG = "xray:"  # a `checkpoint_name` with this prefix requests full statistics, see `tag`


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
  """One measured tensor: an output of an equation, or an input of the program."""

  row: int
  op: str
  path: str
  frames: tuple[str, ...]
  direction: str
  dtype: Any
  shape: tuple[int, ...]
  full: bool
  wide: bool = False
  order: int = 0
  derived: bool = False
  rows: int = 0  # for a tag: the leading axis is kept separate, in this many consecutive rows
  flag: bool = False  # only the maximum and a non-finite flag are measured
  reads: tuple[str, ...] = ()  # inputs of the program that the equation reads, or rows of them; also cast, scaled or shifted

  @property
  def measured(self) -> bool:
    """True if it has a row; most sites of a thin plan do not."""
    return self.row >= 0

  @property
  def source(self) -> str:
    return self.frames[0] if self.frames else ""


@dataclasses.dataclass(eq=False)
class Body:
  """A jaxpr inside a frame, with the values of its constants and one Node for each equation."""

  jaxpr: Any
  consts: Sequence[Any]
  nodes: list["Node"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Node:
  """One equation. `kind` is leaf, call, scan, while, cond or shard_map; `sites` has one entry for each output (leaf)."""

  eqn: Any
  kind: str
  path: str
  direction: str
  sites: list[Site | None] = dataclasses.field(default_factory=list)
  body: Body | None = None  # call
  frames: list["Frame"] = dataclasses.field(default_factory=list)  # scan, while, shard_map: one; cond: one per branch
  child: int = -1  # position in the enclosing frame's children
  tag: Site | None = None  # leaf


@dataclasses.dataclass(eq=False)
class Frame:
  """A unit of execution: its sites own the rows of one array, its children are the data of the inner loops."""

  body: Body | None = None
  sites: list[Site] = dataclasses.field(default_factory=list)
  children: list[Node] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class XrayPlan:
  """The complete program: the top frame, the sites of its inputs and constants, and the primitives that were not entered."""

  frame: Frame
  inputs: list[Site | None]
  consts: list[Site | None]
  opaque: dict[str, int]


def build(closed, input_names: Sequence[str], *, light: bool, only: str | None) -> XrayPlan:
  """Build the plan of a closed jaxpr. `only` is a regular expression for "path source op"; tensors that do not match are
  measured lightly."""
  return _Builder(light, re.compile(only) if only else None).program(closed, input_names)


class _Builder:
  def __init__(self, light: bool, only: re.Pattern[str] | None):
    self.light, self.only = light, only
    self.opaque: dict[str, int] = {}
    self.order = 0
    self.backward_seen = False
    self.held: dict[Any, str] = {}  # variable -> the input whose value it has, see Site.reads

  def program(self, closed, names) -> XrayPlan:
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    frame = Frame()
    self.hold(jaxpr.invars, names)
    inputs = [self.input(frame, v, name) for v, name in zip(jaxpr.invars, names, strict=True)]
    const_sites = [self.input(frame, v, f"constant {v.aval.str_short()}") for v in jaxpr.constvars]
    frame.body = self.make_body(frame, jaxpr, consts, "", "")
    return XrayPlan(frame, inputs, const_sites, self.opaque)

  def input(self, frame: Frame, var, name: str) -> Site | None:
    if not jaxprs.is_float(var.aval):
      return None
    return self.site(frame, "input", name, (), "input", var.aval)

  def site(self, frame: Frame, op: str, path: str, sources, direction: str, aval, derived: bool = False, reads=()) -> Site:
    source = sources[0] if sources else ""
    full = not self.light and not derived and (self.only is None or bool(self.only.search(f"{path} {source} {op}")))
    wide = op in tensor_statistics.WIDENED and tensor_statistics.overflows_early(aval.dtype)
    where = (len(frame.sites), op, path, sources, direction, aval.dtype, tuple(aval.shape))
    site = Site(*where, full, wide, self.order, derived, reads=reads)
    self.order += 1
    frame.sites.append(site)
    return site

  def make_body(self, frame: Frame, jaxpr, consts, path: str, stack: str, caller: tuple[str, ...] = ()) -> Body:
    """Plan the equations of a jaxpr. Those of jax's own functions, such as jnp.where, have the source of their caller."""
    body = Body(jaxpr, consts)
    body.nodes = [self.node(frame, eqn, path, stack, jaxprs.frames(eqn) or caller) for eqn in jaxpr.eqns]
    return body

  def make_frame(self, jaxpr, names: Sequence[str | None], path: str, stack: str, caller: tuple[str, ...]) -> Frame:
    frame = Frame()
    inner, consts = jaxprs.open_jaxpr(jaxpr)
    self.hold(inner.invars, names)
    frame.body = self.make_body(frame, inner, consts, path, stack, caller)
    return frame

  def hold(self, variables, names: Sequence[str | None]) -> None:
    """Record which inputs variables hold. A jaxpr that is called twice has the same variables again."""
    for variable, name in zip(variables, names, strict=True):
      self.held.pop(variable, None)
      if name is not None:
        self.held[variable] = name

  def names_of(self, atoms) -> list[str | None]:
    """Return the inputs that variables hold."""
    return [None if jaxprs.is_literal(v) else self.held.get(v) for v in atoms]

  def direction(self, stack: str) -> str:
    """Return the direction from the transformations in the name stack; 'update' is code that runs after a backward pass and
    belongs to neither pass."""
    if "rematted_computation" in stack:
      return "recomputed"
    if "transpose(" in stack:
      self.backward_seen = True
      return "backward"
    return "update" if self.backward_seen and "jvp(" not in stack else "forward"

  def node(self, frame: Frame, eqn, path: str, stack: str, sources: tuple[str, ...]) -> Node:
    names = str(eqn.source_info.name_stack)
    path, stack = _join(path, _readable(names)), _join(stack, names)
    node = Node(eqn, "leaf", path, self.direction(stack))
    inner, held = jaxprs.call_jaxpr(eqn), self.names_of(eqn.invars)
    # A call is inlined into the frame.
    if inner is not None and not (jaxprs.is_remat(eqn) and jaxprs.touches_ref(eqn)):
      node.kind = "call"
      inner, consts = jaxprs.open_jaxpr(inner)
      self.hold(inner.invars, held)
      node.body = self.make_body(frame, inner, consts, path, stack, sources)
      self.hold(eqn.outvars, self.names_of(inner.outvars))
      return node
    loops: list[tuple[Callable[[Any], bool], str, Callable[[], list[tuple[Any, str]]]]] = [
      (jaxprs.is_scan, "scan", lambda: [(eqn.params["jaxpr"], "scan")]),
      (jaxprs.is_while, "while", lambda: [(eqn.params["body_jaxpr"], "while")]),
      (jaxprs.is_cond, "cond", lambda: [(b, f"branch{i}") for i, b in enumerate(eqn.params["branches"])]),
      (jaxprs.is_shard_map, "shard_map", lambda: [(eqn.params["jaxpr"], "shard_map")]),
    ]
    # Each loop, branch and shard_map has its own frames.
    for matches, kind, bodies in loops:
      if matches(eqn) and not jaxprs.touches_ref(eqn):
        node.kind, node.child = kind, len(frame.children)
        frame.children.append(node)
        inside = held[1:] if kind == "cond" else _not_carried(eqn, held) if kind in ("scan", "while") else held
        node.frames = [self.make_frame(body, inside, _join(path, label), stack, sources) for body, label in bodies()]
        if kind in ("scan", "shard_map"):  # rows that a scan reads and stacks are read again in the backward pass
          _, carried = jaxprs.scan_counts(eqn) if kind == "scan" else (0, 0)
          out = self.names_of(jaxprs.open_jaxpr(bodies()[0][0])[0].outvars)
          self.hold(eqn.outvars, [*[None] * carried, *out[carried:]])
        return node
    if jaxprs.hides_jaxpr(eqn):
      self.opaque[eqn.primitive.name] = self.opaque.get(eqn.primitive.name, 0) + 1
    # A leaf: a tag is measured in full, and every inexact output is measured as the plan asks.
    if (tag := _tag_of(eqn)) is not None:
      aval = eqn.outvars[0].aval
      kind, name, by_row = tag
      node.tag = Site(len(frame.sites), "tag", name, (), kind, aval.dtype, tuple(aval.shape), True, order=self.order)
      if by_row:
        node.tag = dataclasses.replace(node.tag, rows=aval.shape[0], shape=tuple(aval.shape[1:]))
      self.order += 1
      frame.sites += [node.tag] * max(node.tag.rows, 1)
    elif not is_exact(eqn):
      op, derived = eqn.primitive.name, node.direction == "recomputed" or _says_little(eqn)
      reads = tuple(name for name in held if name is not None)
      node.sites = [
        self.site(frame, op, path, sources, node.direction, v.aval, derived, reads) if jaxprs.is_float(v.aval) else None
        for v in eqn.outvars
      ]
    # Record which inputs the outputs still represent, so that a fault can name a parameter.
    shifted = eqn.primitive.name in _SCALED and sum(not jaxprs.is_literal(v) for v in eqn.invars) == 1
    if is_exact(eqn) or shifted or eqn.primitive.name in (*SUBSET, "convert_element_type"):
      if len(eqn.outvars) == len(held):
        self.hold(eqn.outvars, held)
      elif shifted or sum(jaxprs.is_float(v.aval) for v in eqn.invars) == 1:
        self.hold(eqn.outvars, [next((name for name in held if name is not None), None)] * len(eqn.outvars))
    return node


def tag(x, kind: str, name: str, *, by_row: bool = False):
  """Return x unchanged, and request its statistics as the tensor `name` of direction `kind`, by row of the leading axis with
  `by_row`."""
  return checkpoint_name(x, f"{TAG}{kind}:{int(by_row)}:{name}")


def _tag_of(eqn) -> tuple[str, str, bool] | None:
  name = eqn.params["name"] if eqn.primitive.name == "name" else ""
  if not name.startswith(TAG) or not jaxprs.is_float(eqn.outvars[0].aval):
    return None
  kind, by_row, name = name.removeprefix(TAG).split(":", 2)
  return kind, name, by_row == "1"


def _not_carried(eqn, held: list[str | None]) -> list[str | None]:
  """Return the part of ``held`` that a loop's body receives in every iteration. Carried values hold something else from the
  second iteration on."""
  if jaxprs.is_scan(eqn):
    consts, carried = jaxprs.scan_counts(eqn)
    return [*held[:consts], *[None] * carried, *held[consts + carried :]]
  first, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
  return [*held[first : first + consts], *[None] * (len(held) - first - consts)]


def _says_little(eqn) -> bool:
  """Return True if the operands' statistics describe the result well enough."""
  op = eqn.primitive.name
  arrays = sum(bool(v.aval.shape) for v in eqn.invars) if op in _SCALED else 0
  return op in SUBSET or op in _BOUNDED or (op in _SCALED and arrays == 1)


def is_exact(eqn) -> bool:
  """Return True if the outputs have exactly the operands' values (up to sign): layout changes and widening conversions."""
  if eqn.primitive.name == "convert_element_type":
    return _widens(eqn.invars[0].aval, eqn.outvars[0].aval)
  return eqn.primitive.name in EXACT


def _widens(old, new) -> bool:
  if not (jaxprs.is_float(old) and jaxprs.is_float(new)):
    return False
  if jnp.issubdtype(new.dtype, jnp.complexfloating) != jnp.issubdtype(old.dtype, jnp.complexfloating):
    return False
  a, b = jnp.finfo(old.dtype), jnp.finfo(new.dtype)
  return bool(b.max >= a.max) and b.bits >= a.bits


def _join(a: str, b: str) -> str:
  return f"{a}/{b}" if a and b else a or b


def _readable(names: str) -> str:
  """Return a name stack without the transformations around the names: transpose(jvp(mlp)) is mlp."""
  words = [w for part in names.split("/") for w in re.split(r"[()]", part)]
  return "/".join(w for w in words if w not in ("", "jvp", "transpose", "vmap", "rematted_computation", "checkpoint"))


# Thin plans.
# Primitives that propagate every non-finite number of every operand.
_TRANSPARENT = frozenset(
  """add sub mul add_any neg dot_general reduce_sum cumsum sqrt log log1p square abs sin cos sinh cosh
  reduce_precision psum""".split()
)
_KEY = frozenset("dot_general ragged_dot_general conv_general_dilated exp".split())

Sites = frozenset[Site]
_NONE: Sites = frozenset()


def propagates(eqn, operand: int) -> bool:
  """Return True if every NaN and infinity of an operand makes some element of the (only) result non-finite."""
  name = eqn.primitive.name
  if len(eqn.outvars) != 1 or not jaxprs.is_float(eqn.outvars[0].aval):
    return False
  if name == "div":
    return operand == 0
  if name == "integer_pow":
    return eqn.params["y"] > 0
  return name in _TRANSPARENT or name == "convert_element_type"


class MeasuredTensors:
  """Selects which sites of a full plan a thin plan measures.

  Args:
    plan: a full plan. It is changed into the thin plan.
    detail: orders of sites that are always measured in full. If there are any, key and tagged tensors are not.
    key: regular expression for more key tensors, searched in "path file:line op".
    skipped: regular expression like ``key``, for tensors that are measured only in detail. Their operands are measured like
      those of an equation that propagates nothing.
  """

  def __init__(self, plan: XrayPlan, detail: frozenset[int], key: str | None = None, skipped: str | None = None):
    self.plan = plan
    self._wanted, self._unwanted = (re.compile(pattern) if pattern else None for pattern in (key, skipped))
    self._skipped: set[Site] = set()
    self._parents: dict[int, Sites] = {}
    self._propagated: set[Site] = set()
    self._key: set[Site] = set()
    assert plan.frame.body is not None
    self._body(plan.frame.body, [_NONE if s is None else frozenset([s]) for s in plan.inputs])
    self._keep(detail)

  def region(self, order: int) -> set[int]:
    """Return the orders of the unmeasured sites that a site was computed from, without a measured one in between, including the
    site itself."""
    found, todo = {order}, [order]
    while todo:
      for parent in self._parents.get(todo.pop(), _NONE):
        if parent.order in self._left_out and parent.order not in found:
          found.add(parent.order)
          todo.append(parent.order)
    return found

  def operands(self, order: int) -> set[int]:
    """Return the orders of the sites that the equation of a site reads."""
    return {parent.order for parent in self._parents.get(order, _NONE)}

  def _frame(self, frame: Frame) -> None:
    assert frame.body is not None
    self._body(frame.body, [_NONE] * len(frame.body.jaxpr.invars))

  def _body(self, body: Body, args: list[Sites]) -> list[Sites]:
    env: dict[Any, Sites] = dict(zip(body.jaxpr.invars, args, strict=True))
    read = lambda atom: _NONE if jaxprs.is_literal(atom) else env.get(atom, _NONE)
    for node in body.nodes:
      operands = [read(v) for v in node.eqn.invars]
      env.update(zip(node.eqn.outvars, self._node(node, operands), strict=True))
    return [read(v) for v in body.jaxpr.outvars]

  def _node(self, node: Node, operands: list[Sites]) -> list[Sites]:
    """Return the sites where each output's non-finite numbers were last measured."""
    eqn = node.eqn
    if node.kind == "call":
      assert node.body is not None
      return self._body(node.body, operands)
    if node.kind != "leaf":
      for frame in node.frames:
        self._frame(frame)
      return [_NONE] * len(eqn.outvars)
    if not node.sites:
      if eqn.primitive.name in ("real", "imag"):  # they contain only a part of the values
        return [_NONE] * len(eqn.outvars)
      one_to_one = len(eqn.outvars) == len(operands)
      return operands if one_to_one else [_NONE.union(*operands)] * len(eqn.outvars)
    skipped = {s for s in node.sites if s is not None and _found(self._unwanted, s)}
    self._skipped |= skipped
    for i, sites in enumerate(operands):
      # Rematerialized copies are not measured themselves.
      if node.direction != "recomputed" and not skipped and propagates(eqn, i):
        self._propagated |= sites
    parents = _NONE.union(*operands)
    for site in node.sites:
      if site is not None:
        self._parents[site.order] = parents
        if _found(self._wanted, site):
          self._key.add(site)
    if eqn.primitive.name in _KEY:
      self._key |= parents if "exp" not in eqn.primitive.name else _NONE
      self._key |= {s for s in node.sites if s is not None}
    return [frozenset([s]) if s is not None else _NONE for s in node.sites]

  def _keep(self, detail: frozenset[int]) -> None:
    """Assign rows to the measured sites, and row -1 to all others."""
    self._left_out: set[int] = set()
    inputs = {s.order for s in (*self.plan.inputs, *self.plan.consts) if s is not None}
    for frame in _frames(self.plan.frame):
      new: dict[int, Site] = {}
      rows: list[Site] = []
      for site in dict.fromkeys(frame.sites):
        scalar = np.prod(site.shape) == 1 and not site.rows
        # The values of a rematerialized copy were measured in the forward pass.
        seen = site in self._propagated or site.direction == "recomputed"
        if site.order in detail:
          kept = dataclasses.replace(site, row=len(rows), full=True)
        elif not detail and (site.op == "tag" or (site in self._key and site.direction != "recomputed")):
          kept = dataclasses.replace(site, row=len(rows), full=site.full or site.op == "tag")
        elif site.order in inputs or (site.op != "tag" and site not in self._skipped and (scalar or not seen)):
          kept = dataclasses.replace(site, row=len(rows), flag=not scalar, full=scalar, wide=site.wide and scalar)
        else:
          self._left_out.add(site.order)
          new[site.order] = dataclasses.replace(site, row=-1)
          continue
        new[site.order] = kept
        rows += [kept] * max(kept.rows, 1)
      frame.sites[:] = rows
      for node in _leaves(frame.body):
        node.sites = [None if s is None else new[s.order] for s in node.sites]
        node.tag = None if node.tag is None or not new[node.tag.order].measured else new[node.tag.order]
      if frame is self.plan.frame:
        for sites in (self.plan.inputs, self.plan.consts):
          sites[:] = [None if s is None else new[s.order] for s in sites]


def _found(pattern: re.Pattern[str] | None, site: Site) -> bool:
  return pattern is not None and pattern.search(f"{site.path} {site.source} {site.op}") is not None


def _frames(frame: Frame) -> Iterator[Frame]:
  yield frame
  for node in frame.children:
    for inner in node.frames:
      yield from _frames(inner)


def _leaves(body: Body | None) -> Iterator[Node]:
  """Yield the leaf equations of a frame, including those of inlined calls."""
  assert body is not None
  for node in body.nodes:
    if node.kind == "call":
      yield from _leaves(node.body)
    elif node.kind == "leaf":
      yield node
