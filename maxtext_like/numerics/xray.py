"""`report = xray(fn)(*args)`: one run of any JAX function with statistics of every tensor and the first cause of a fault."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from maxtext_like.numerics import plan as planning
from maxtext_like.numerics import report as reporting
from maxtext_like.numerics.interpreter import Interpreter
from maxtext_like.numerics.report import Report


def xray(fn: Callable, *, light: bool = False, only: str | None = None, while_history: int = 256) -> "XRay":
  """Wrap a function so that calling it returns a Report instead of its outputs (they are in report.outputs).

  The function is traced, its jaxpr rebuilt with statistics as extra outputs, and compiled as one program; no host callback
  is used. Calls with the same shapes reuse the program. To look through gradients, xray a function that takes them
  (xray(jax.value_and_grad(loss))).

  Args:
    fn: any function of arrays (pytrees). Leaves that are neither arrays nor numbers are passed on untouched, as constants.
    light: measure the maximum and the non-finite counts only.
    only: regular expression, searched in "path file:line op": tensors that it misses are measured lightly. The first cause
      is found whatever `only` says.
    while_history: iterations of each while loop (and within 4 MiB) that are told apart; later ones are merged.

  Raises:
    ValueError: while_history is below 2.
  """
  if while_history < 2:
    raise ValueError(f"xray: while_history={while_history} must be at least 2 (one iteration and the rest)")
  return XRay(fn, light, only, while_history)


class XRay:
  """The callable that xray() returns."""

  def __init__(self, fn: Callable, light: bool, only: str | None, while_history: int):
    self.fn, self.light, self.only, self.while_history = fn, light, only, while_history
    self._programs: dict[Any, tuple] = {}

  def __call__(self, *args, **kwargs) -> Report:
    arrays, program = self._prepare(args, kwargs)
    plan, run, out_tree, output_names = program
    outs, data = run(arrays)
    return reporting.build(plan, jax.device_get(data), jax.tree.unflatten(out_tree, outs), output_names)

  def lower(self, *args, **kwargs):
    """The instrumented program, lowered for these arguments (jax.stages.Lowered)."""
    arrays, (_, run, _, _) = self._prepare(args, kwargs)
    return run.lower(arrays)

  def run(self, *args, **kwargs):
    """The instrumented program's raw results (outputs, data on the device): for timing; no report is built."""
    arrays, (_, run, _, _) = self._prepare(args, kwargs)
    return run(arrays)

  def _prepare(self, args, kwargs):
    with_paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    leaves = [leaf for _, leaf in with_paths]
    dynamic = [_is_array(leaf) for leaf in leaves]
    arrays = [leaf for leaf, d in zip(leaves, dynamic, strict=True) if d]
    fixed = [None if d else leaf for leaf, d in zip(leaves, dynamic, strict=True)]
    key = (tree, tuple(map(_signature, arrays)), tuple(id(f) for f in fixed))
    if key not in self._programs:
      names = [n for n, d in zip(_names(self.fn, with_paths), dynamic, strict=True) if d]
      # `fixed` is kept beside the program: an id is only a name while its object lives.
      self._programs[key] = (self._build(tree, fixed, dynamic, arrays, names), fixed)
    return arrays, self._programs[key][0]

  def _build(self, tree, fixed, dynamic, arrays, names):
    def flat(arrays):
      rest = iter(arrays)
      args, kwargs = jax.tree.unflatten(tree, [next(rest) if d else f for d, f in zip(dynamic, fixed, strict=True)])
      return self.fn(*args, **kwargs)

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(arrays)
    with_paths, out_tree = jax.tree_util.tree_flatten_with_path(shapes)
    output_names = ["output" + jax.tree_util.keystr(path) for path, _ in with_paths]
    plan = planning.build(closed, names, light=self.light, only=self.only)
    run = jax.jit(Interpreter(plan, self.while_history).program)
    return plan, run, out_tree, output_names


def _is_array(leaf) -> bool:
  return isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex)


def _signature(x):
  """What distinguishes traces; a sharding changes the compiled program, which jit itself looks after."""
  if isinstance(x, jax.Array | np.ndarray | np.generic):
    return (x.shape, x.dtype, getattr(x, "weak_type", False))
  return type(x)


def _names(fn: Callable, with_paths) -> list[str]:
  """Argument paths as a reader of the function would write them: params['mlp']['up'], not args[0]['mlp']['up']."""
  try:
    parameters = list(inspect.signature(fn).parameters.values())
  except (TypeError, ValueError):  # builtins and some callables have no signature: positions must do
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
