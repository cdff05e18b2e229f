"""Access to jaxprs for x-ray. This is the only file that handles the differences between jax 0.10 and 0.12.

Between the two releases closed jaxprs were merged into jaxprs, a scan's operand counts moved from `num_consts`/`num_carry` into
trees (`ft_in`), and the axes that a value varies over moved from `vma` to `manual_axis_type`.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.extend.core import primitives as prims

# Primitives whose jaxpr is only a scalar reducer, not control flow.
_REDUCERS = ("reduce", "scatter", "select_and_scatter", "argm", "sort")
_HERE = os.path.dirname(os.path.abspath(__file__))
_JAX = os.path.dirname(os.path.abspath(jax.__file__))


def open_jaxpr(jaxpr) -> tuple[Any, Sequence[Any]]:
  """Return a jaxpr, closed or not, as (object with .invars .constvars .eqns .outvars, values of its constvars)."""
  inner = getattr(jaxpr, "jaxpr", jaxpr)
  return inner, getattr(jaxpr, "consts", ())


def call_jaxpr(eqn):
  """Return the jaxpr that an equation runs exactly once on exactly its operands, or None if it is not such a call."""
  if eqn.primitive in (prims.jit_p, prims.remat_p):
    return eqn.params["jaxpr"]
  if eqn.primitive in (prims.custom_jvp_call_p, prims.custom_vjp_call_p, prims.closed_call_p, prims.call_p):
    return eqn.params["call_jaxpr"]
  return None


def is_remat(eqn) -> bool:
  return eqn.primitive is prims.remat_p


def remat_barrier(eqn) -> list[bool]:
  """Return, for each operand of a remat equation, whether its lowering hides it from common subexpression elimination."""
  prevent = eqn.params["prevent_cse"] if eqn.params["differentiated"] else False
  return [prevent] * len(eqn.invars) if isinstance(prevent, bool) else list(prevent)


def is_scan(eqn) -> bool:
  return eqn.primitive is prims.scan_p


def scan_counts(eqn) -> tuple[int, int]:
  """(number of constants, number of carried values) of a scan equation."""
  if "ft_in" in eqn.params:
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)
  return eqn.params["num_consts"], eqn.params["num_carry"]


def is_while(eqn) -> bool:
  return eqn.primitive is prims.while_p


def is_cond(eqn) -> bool:
  return eqn.primitive is prims.cond_p


def is_shard_map(eqn) -> bool:
  return eqn.primitive.name == "shard_map"


def touches_ref(eqn) -> bool:
  """Return True if an operand is a mutable reference. Such loops cannot be rebuilt from values."""
  return any("Ref" in type(v.aval).__name__ for v in eqn.invars if not is_literal(v))


def hides_jaxpr(eqn) -> bool:
  """Return True if an equation that x-ray does not enter contains work other than a scalar reducer."""
  return not eqn.primitive.name.startswith(_REDUCERS) and any(True for _ in jex_core.jaxprs_in_params(eqn.params))


def is_literal(atom) -> bool:
  return isinstance(atom, jex_core.Literal)


def bind(eqn, operands):
  """Evaluate one equation with its own name stack, source line and context (mesh, precision). Returns a list."""
  params = eqn.primitive.get_bind_params(eqn.params)
  extra, params = params if isinstance(params, tuple) else ((), params)
  name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
  with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
    out = eqn.primitive.bind(*extra, *operands, **params)
  return list(out) if eqn.primitive.multiple_results else [out]


def frames(eqn, limit: int = 8) -> tuple[str, ...]:
  """Return the equation's source as 'file:line', innermost first, without frames of jax and of x-ray itself.

  A line that appears twice in a row, such as a comprehension up to Python 3.11, is listed once.
  """
  traceback = eqn.source_info.traceback
  found: list[str] = []
  for frame in traceback.frames if traceback is not None else ():
    name = _display_name(frame.file_name, os.getcwd())
    line = f"{name}:{frame.line_num}"
    if not name or found[-1:] == [line]:
      continue
    found.append(line)
    if len(found) == limit:
      break
  return tuple(found)


@functools.cache
def _display_name(file: str, directory: str) -> str:
  """Return the displayed name of a source file, relative to a working directory; "" for files that are not shown."""
  path = os.path.realpath(file)
  if path.startswith((_JAX + os.sep, _HERE + os.sep)) or file.startswith("<"):
    return ""
  if "contextlib.py" in path or "functools.py" in path:
    return ""
  relative = os.path.relpath(path, directory)
  if relative.count(".." + os.sep) > 1:  # outside the project, the part after site-packages is enough
    return path.rsplit("site-packages" + os.sep, 1)[-1]
  return relative


def is_float(aval) -> bool:
  """Return True if an abstract value holds floating-point or complex numbers, and not keys, integers, booleans or
  references."""
  dtype = getattr(aval, "dtype", None)
  if dtype is None or "Ref" in type(aval).__name__ or jnp.issubdtype(dtype, jax.dtypes.extended):
    return False
  return bool(jnp.issubdtype(dtype, jnp.inexact))
