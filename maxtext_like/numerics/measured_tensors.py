"""Thin plans: measure only a few tensors without missing a non-finite number.

An equation such as a sum or a product propagates every NaN and infinity of its operand to its result, so checking the result
covers the operand. A thin plan measures

- key tensors in full: operands and results of matrix products, exponentials and tagged tensors;
- of all others, by one flag each, those that no equation propagates: they are read only by selects, quotients, maxima etc., or
  leave a loop.

If something is found, its *region*, the unmeasured equations that it was computed from, is measured by a second program
(`detail`), and the cause is exact. This reduces compile time: about 400 reductions instead of 1500 for three layers with their
gradients.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from maxtext_like.numerics import jaxprs
from maxtext_like.numerics.plan import Body, Frame, Node, Plan, Site

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
    detail: orders of sites that are always measured in full. If there are any, key tensors are not measured.
    key: regular expression for more key tensors, searched in "path file:line op".
  """

  def __init__(self, plan: Plan, detail: frozenset[int], key: str | None = None):
    self.plan, self._wanted = plan, re.compile(key) if key else None
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
    for i, sites in enumerate(operands):
      # Rematerialized copies are not measured themselves.
      if node.direction != "recomputed" and propagates(eqn, i):
        self._propagated |= sites
    parents = _NONE.union(*operands)
    for site in node.sites:
      if site is not None:
        self._parents[site.order] = parents
        if self._wanted and self._wanted.search(f"{site.path} {site.source} {site.op}"):
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
        elif site.op == "tag" or (not detail and site in self._key and site.direction != "recomputed"):
          kept = dataclasses.replace(site, row=len(rows), full=site.full or site.op == "tag")
        elif site.order in inputs or scalar or not seen:
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
        node.tag = None if node.tag is None else new[node.tag.order]
      if frame is self.plan.frame:
        for sites in (self.plan.inputs, self.plan.consts):
          sites[:] = [None if s is None else new[s.order] for s in sites]


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
