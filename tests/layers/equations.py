"""Reads jaxprs: every equation, including those inside loops, calls and custom derivatives."""

from collections.abc import Iterator

import jax
from jax.extend.core import jaxprs_in_params


def equations(function, *args) -> Iterator:
  """Return every equation of the traced function, in the order of the program."""
  return _walk(jax.make_jaxpr(function)(*args).jaxpr)


def _walk(jaxpr):
  for e in jaxpr.eqns:
    yield e
    for inner in jaxprs_in_params(e.params):
      yield from _walk(inner)


def named(function, *args, name: str) -> list:
  """Return the equations of one primitive."""
  return [e for e in equations(function, *args) if e.primitive.name == name]


def dtypes(equation) -> tuple[str, ...]:
  """Return the dtypes of the operands, followed by those of the results."""
  return tuple(str(v.aval.dtype) for v in (*equation.invars, *equation.outvars))
