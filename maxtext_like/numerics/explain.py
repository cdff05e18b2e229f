"""Describes a fault in words: `src/layers/mlp.py:41 mul, layer 0, forward: 1.8e3 x 1.3e3 -> 9.8e5 > 65504`."""

import dataclasses
import math
from typing import Any

import numpy as np

from maxtext_like.numerics import tensor_statistics
from maxtext_like.numerics.cause import Fault, Loop, Operand
from maxtext_like.numerics.tensor_statistics import Stats, decode

_INFIX = {"mul": "x", "add": "+", "add_any": "+", "sub": "-", "div": "/", "dot_general": "@", "ragged_dot_general": "@"}
# Operations whose smallest operand explains the fault.
_NEAR_ZERO = ("div", "log", "rsqrt", "integer_pow", "pow", "log2", "sqrt", "atan2", "rem")


@dataclasses.dataclass(frozen=True)
class Range:
  """The values of an operand. `low` is the smallest |x| (0 if there are zeros), NaN if it was not measured."""

  dtype: str
  shape: tuple[int, ...]
  high: float
  low: float
  negative: int
  nan: int
  inf: int
  literal: float | None = None


@dataclasses.dataclass(frozen=True)
class Cause:
  """The first cause of non-finite numbers.

  Attributes:
    op, source, frames: the primitive; `file:line` of the innermost frame outside jax; up to eight frames, innermost first.
    path: name stack with the surrounding calls and loops.
    direction: "forward", "backward", "recomputed", "update" or "input".
    loops: the surrounding loops, outermost first.
    layer: index in the outermost scan, or None.
    dtype, shape: dtype and shape of the result.
    operands: ranges of the values that the equation read.
    result: "nan", "inf" or "-inf".
    nan, inf: number of NaN and of infinities in the result.
    explanation: the fault in words.
    masked: True if the outputs are finite because a later operation removed the fault.
    outputs: names of the outputs that the fault reached (empty if masked).
  """

  op: str
  source: str
  frames: tuple[str, ...]
  path: str
  direction: str
  loops: tuple[Loop, ...]
  layer: int | None
  dtype: str
  shape: tuple[int, ...]
  operands: tuple[Range, ...]
  result: str
  nan: int
  inf: int
  explanation: str
  masked: bool
  outputs: tuple[str, ...]

  def __str__(self) -> str:
    if self.op == "input":
      text = f"{self.path} (an input) contains {self.explanation}"
    else:
      loops = "".join(f", {loop}" for loop in self.loops)
      place = f"{self.source} {self.op}" if self.source else self.op
      text = f"{place}{loops}, {self.direction}: {self.explanation}"
    return f"{text} (masked fault: the outputs are finite)" if self.masked else text


def explain(fault: Fault, *, masked: bool, outputs: tuple[str, ...] = ()) -> Cause:
  """Turn a fault of the replay into a Cause."""
  site, stats = fault.site, decode(fault.row, full=fault.site.full, dtype=fault.site.dtype)
  nan, inf = int(stats.nan), int(stats.inf)
  result = "nan" if nan else "-inf" if stats.neg_inf == inf else "inf"
  operands = tuple(_range(o) for o in fault.operands)
  scans = [loop.index for loop in fault.loops if loop.kind == "scan"]
  if site.op == "input":
    words = " and ".join(f"{n} {what}" for n, what in ((nan, "NaN"), (inf, "infinite")) if n)
    words += f" of {int(stats.count)} numbers"
  else:
    words = _words(site.op, fault.operands, operands, result, stats, site.dtype, fault.params)
  return Cause(
    op=site.op,
    source=site.source,
    frames=site.frames,
    path=site.path,
    direction=site.direction,
    loops=fault.loops,
    layer=scans[0] if scans else None,
    dtype=str(np.dtype(site.dtype)),
    shape=site.shape,
    operands=operands,
    result=result,
    nan=nan,
    inf=inf,
    explanation=words,
    masked=masked,
    outputs=outputs,
  )


def _range(operand: Operand) -> Range:
  dtype, shape = operand.dtype, operand.shape
  if operand.value is not None and operand.float:
    x = np.atleast_1d(np.asarray(operand.value)).astype(np.complex128 if "complex" in dtype else np.float64)
    finite = np.abs(x[np.isfinite(x)])
    high, low = (float(finite.max()), float(finite.min())) if finite.size else (math.nan, math.nan)
    literal = float(x[0].real) if x.size == 1 else None
    return Range(dtype, shape, high, low, int((x.real < 0).sum()), int(np.isnan(x).sum()), int(np.isinf(x).sum()), literal)
  if operand.row is None:
    return Range(dtype, shape, math.nan, math.nan, 0, 0, 0)
  stats = decode(operand.row, full=operand.full)
  low = math.nan
  if operand.full:
    low = 0.0 if stats.zero > 0 else float(stats.min_nonzero)
  return Range(dtype, shape, float(stats.max), low, int(stats.negative), int(stats.nan), int(stats.inf))


def number(x: float) -> str:
  """Format a number with two significant digits: 1.8e3, 0. Limits of formats such as 65504 are kept."""
  if not math.isfinite(x):
    return "?" if math.isnan(x) else str(x)
  if x == 0 or (abs(x) < 1e5 and x == int(x) and (abs(x) < 1e3 or x in tensor_statistics.LIMITS.values())):
    return str(int(x))
  mantissa, exponent = f"{x:.1e}".split("e")
  return f"{mantissa}e{int(exponent)}"


def _term(op: str, position: int, r: Range) -> str:
  if r.literal is not None:
    return number(r.literal) if math.isfinite(r.literal) else str(r.literal)
  if r.inf and op in ("sub", "add", "mul", "add_any"):
    return "inf"
  near_zero = op in _NEAR_ZERO and (op != "div" or position == 1) and not (op in ("integer_pow", "pow") and r.low > 1)
  if op in ("log", "sqrt", "rsqrt", "pow") and r.negative:
    return f"{number(r.high)} ({r.negative} negative)"
  if near_zero and not math.isnan(r.low):
    return number(r.low)
  if op == "div" and r.low == 0 and r.high == 0:
    return "0"
  return number(r.high)


def _words(op, raw, operands: tuple[Range, ...], result: str, stats: Stats, dtype, params) -> str:
  floats = [(i, r) for i, (r, o) in enumerate(zip(operands, raw, strict=True)) if o.float]
  terms = [_term(op, i, r) for i, r in floats]
  limit = tensor_statistics.limit(dtype)
  # The value in float32, if it explains the fault: finite there, and beyond the limit of the dtype.
  wide = float(stats.wide)
  if op == "convert_element_type":
    shown = f"{number(max(wide, _high(floats)))} to {np.dtype(dtype)}" if floats else f"integer to {np.dtype(dtype)}"
    left = shown
  elif op in _INFIX and len(terms) == 2:
    left = f" {_INFIX[op]} ".join(terms)
  elif op == "integer_pow" and terms:
    left = f"{terms[0]}^{params.get('y')}"
  elif op == "div" and len(terms) == 2:
    left = " / ".join(terms)
  else:
    left = f"{op}({', '.join(terms[:4])}{', ...' if len(terms) > 4 else ''})"
  if op == "select_n" and result == "nan":
    return f"{left} -> nan (a NaN constant was selected)"
  if wide > limit and op != "convert_element_type":
    return f"{left} -> {number(wide)} > {number(limit)}"
  if op == "convert_element_type":
    return f"{left} -> {result} ({number(limit)} is the largest)"
  if result != "nan" and op not in _NEAR_ZERO:
    return f"{left} -> {result} > {number(limit)}"
  return f"{left} -> {result}"


def _high(floats: list[tuple[int, Any]]) -> float:
  return max(r.high for _, r in floats)
