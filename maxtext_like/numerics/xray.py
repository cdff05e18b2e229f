"""`report = xray(fn)(*args)`: runs any JAX function once with statistics of every tensor, and finds the first cause of a
fault."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxtext_like.numerics import cause, xray_report
from maxtext_like.numerics import plan as planning
from maxtext_like.numerics.interpreter import Interpreter
from maxtext_like.numerics.plan import MeasuredTensors
from maxtext_like.numerics.xray_report import Report

_ROUNDS = 5  # programs that one call may run with a thin plan: the fault's region, sites that may mask it, ...
_FAULTS, _UNSURE = 8, 64  # the first ones, which are measured in detail


def xray(
  fn: Callable,
  *,
  light: bool = False,
  only: str | None = None,
  while_history: int = 256,
  key_tensors_only: bool = False,
  key: str | None = None,
  skipped: str | None = None,
  before_run: Callable[[Any], None] | None = None,
) -> "XRay":
  """Wrap a function so that calling it returns a Report instead of its outputs (they are in report.outputs).

  The function is traced, its jaxpr rebuilt with statistics as extra outputs, and compiled as one program. It uses no host
  callback. Calls with the same shapes reuse the program. To examine gradients, wrap a function that computes them
  (xray(jax.value_and_grad(loss))).

  Args:
    fn: any function of arrays (pytrees), a Flax NNX module, or a method of one. The module is not changed. Arguments that are
      not arrays are passed on unchanged, including Python bools and integers. Python floats are passed on unchanged if the
      function branches on one. Each value of such an argument needs a separate program.
    light: measure only the maximum and the non-finite counts.
    only: regular expression, searched in "path file:line op". Tensors that do not match are measured lightly. The first cause
      is found regardless of `only`.
    while_history: number of iterations of each while loop (within 4 MiB) that are kept separate; later ones are merged.
    key_tensors_only: measure only key tensors, which compiles in a fraction of the time. If there is a fault, a second program
      finds its origin (see ``MeasuredTensors``). The first cause is the same.
    key: with key_tensors_only, a regular expression like `only`: matching tensors are also measured in full.
    skipped: with key_tensors_only, a regular expression like `only`: matching tensors are not measured by the first program. A
      fault that starts in them is found if it reaches another tensor.
    before_run: called with each program (jax.stages.Compiled) before it runs, for instance to check its memory.

  Raises:
    ValueError: while_history is below 2.
  """
  if while_history < 2:
    raise ValueError(f"xray: while_history={while_history} must be at least 2 (one iteration and the rest)")
  return XRay(fn, light, only, while_history, key_tensors_only, key, skipped, before_run)


class XRay:
  """The callable that xray() returns."""

  def __init__(
    self, fn: Callable, light: bool, only: str | None, while_history: int, key_tensors_only: bool, key, skipped, before_run
  ):
    self.fn, self.light, self.only, self.while_history = fn, light, only, while_history
    self._bound: tuple[Any, ...] = ()  # arguments that precede those of a call
    if (module := _nnx_module(fn)) is not None:
      # State that a call changes, such as BatchNorm's averages, may only change if the module is an argument.
      self.fn, self._bound = _call if module is fn else fn.__func__, (module,)
    self.key_tensors_only, self.key, self.skipped, self.before_run = key_tensors_only, key, skipped, before_run
    self._programs: dict[Any, tuple] = {}
    self._constants: tuple[type, ...] = (bool, int)

  def __call__(self, *args, **kwargs) -> Report:
    detail: frozenset[int] = frozenset()
    seen = None
    for _ in range(_ROUNDS if self.key_tensors_only else 1):
      arrays, (plan, run, out_tree, output_names, measured) = self._prepare(args, kwargs, detail)
      if self.before_run is not None:
        run = run.lower(arrays).compile()
        self.before_run(run)
      outs, data = run(arrays)
      data = on_host(data)
      findings = cause.search(plan, data, len(output_names))
      seen = seen or (plan, data)  # later programs measure the origin of the fault and little else
      wanted = _wanted(measured, findings, first=not detail) - detail if measured is not None else frozenset()
      if not wanted:
        break
      detail |= wanted
    assert seen is not None
    return xray_report.build(*seen, findings, jax.tree.unflatten(out_tree, outs), output_names)

  def lower(self, *args, **kwargs):
    """Return the instrumented program, lowered for these arguments (jax.stages.Lowered)."""
    arrays, (_, run, *_) = self._prepare(args, kwargs)
    return run.lower(arrays)

  def run(self, *args, **kwargs):
    """Return the instrumented program's raw results (outputs, data on the device), for timing. No report is built."""
    arrays, (_, run, *_) = self._prepare(args, kwargs)
    return run(arrays)

  def _prepare(self, args, kwargs, detail: frozenset[int] = frozenset()):
    with_paths, tree = jax.tree_util.tree_flatten_with_path(((*self._bound, *args), kwargs))
    leaves = [leaf for _, leaf in with_paths]
    dynamic = [_is_array(leaf) and type(leaf) not in self._constants for leaf in leaves]
    arrays = [leaf for leaf, d in zip(leaves, dynamic, strict=True) if d]
    fixed = [None if d else leaf for leaf, d in zip(leaves, dynamic, strict=True)]
    key = (tree, tuple(map(_signature, arrays)), tuple(map(_identity, fixed)), detail)
    if key not in self._programs:
      names = [n for n, d in zip(_names(self.fn, with_paths), dynamic, strict=True) if d]
      # `fixed` is stored with the program: an id only identifies an object while the object exists.
      try:
        self._programs[key] = (self._build(tree, fixed, dynamic, arrays, names, detail), fixed)
      except jax.errors.ConcretizationTypeError:
        if float in self._constants or not any(type(x) in (float, complex) for x in arrays):
          raise
        self._constants = (bool, int, float, complex)
        return self._prepare(args, kwargs, detail)
    return arrays, self._programs[key][0]

  def _build(self, tree, fixed, dynamic, arrays, names, detail):
    def flat(arrays):
      rest = iter(arrays)
      args, kwargs = jax.tree.unflatten(tree, [next(rest) if d else f for d, f in zip(dynamic, fixed, strict=True)])
      return self.fn(*args, **kwargs)

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(arrays)
    with_paths, out_tree = jax.tree_util.tree_flatten_with_path(shapes)
    output_names = ["output" + jax.tree_util.keystr(path) for path, _ in with_paths]
    plan = planning.build(closed, names, light=self.light, only=self.only)
    measured = MeasuredTensors(plan, detail, self.key, self.skipped) if self.key_tensors_only else None
    run = jax.jit(Interpreter(plan, self.while_history).program)
    return plan, run, out_tree, output_names, measured


def on_host(tree: Any) -> Any:
  """Return arrays as numpy arrays. With several processes each has a part of them: all must call this, and all get the complete
  arrays."""

  def read(x):
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
      return x
    return multihost_utils.process_allgather(x, tiled=True)

  return jax.device_get(jax.tree.map(read, tree))


def _wanted(measured: MeasuredTensors, findings: cause.Findings, *, first: bool) -> frozenset[int]:
  """Return the orders of the sites to measure in detail next: the origins of the first faults, what they read, and what may
  mask them."""
  reached = {order for _, orders in findings.reached for order in orders}
  unmasked = [f for f in findings.faults if f.order in reached][:1]
  sites = dict.fromkeys(f.site.order for f in [*unmasked, *findings.faults[: _FAULTS if first else 1]])
  wanted = set().union(*(measured.region(order) for order in sites))
  wanted |= set().union(*(measured.operands(order) for order in wanted))
  if unmasked and unmasked[0].order not in findings.sure:
    wanted |= set(findings.unsure[:_UNSURE])
  return frozenset(wanted)


def _is_array(leaf) -> bool:
  return isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex)


def _identity(fixed):
  """Return what distinguishes constants: numbers by value, anything else by identity."""
  return (type(fixed), repr(fixed)) if isinstance(fixed, bool | int | float | complex | str) else id(fixed)


def _nnx_module(fn: Callable) -> Any:
  """Return the Flax NNX module that a function is, or is a method of; None otherwise."""
  nnx = sys.modules.get("flax.nnx")
  owner = fn if not inspect.ismethod(fn) else fn.__self__
  return owner if nnx is not None and isinstance(owner, nnx.Module) else None


def _call(module, *args, **kwargs):
  return module(*args, **kwargs)


def _signature(x):
  """Return what distinguishes traces. A sharding also changes the compiled program, which jit handles itself."""
  if isinstance(x, jax.Array | np.ndarray | np.generic):
    return (x.shape, x.dtype, getattr(x, "weak_type", False))
  return type(x)


def _names(fn: Callable, with_paths) -> list[str]:
  """Return argument paths as a reader of the function would write them: params['mlp']['up'], not args[0]['mlp']['up']."""
  try:
    parameters = list(inspect.signature(fn).parameters.values())
  except (TypeError, ValueError):  # builtins and some callables have no signature, so positions are used
    parameters = []
  positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
  names = []
  for path, _ in with_paths:
    which, first, *rest = path
    if which.idx == 0:
      head = positional[first.idx] if first.idx < len(positional) else f"argument {first.idx}"
    else:
      head = str(first.key)
    names.append(head + jax.tree_util.keystr(tuple(rest)))
  return names
