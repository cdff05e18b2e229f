"""X-ray's report: the first cause and one record per measured tensor, as a table, JSON or one HTML file."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_like.numerics import cause as cause_search
from maxtext_like.numerics.explain import Cause, explain, number
from maxtext_like.numerics.plan import Plan
from maxtext_like.numerics.tensor_record import Tensor, best, records, severity, sizeless, worst_index
from maxtext_like.numerics.xray_html import page


@dataclasses.dataclass(frozen=True)
class Report:
  """The result of x-ray.

  Attributes:
    outputs: the function's outputs.
    first_cause: why outputs are non-finite; if they are finite, the earliest masked fault or None. See Cause.
    faults: every fault in execution order, each marked as masked or not.
    finite: True if no fault reached an output (infinities that come from constants are not faults).
    tensors: every measured tensor, in program order.
    opaque: primitives with inner programs that were not entered, with their number.
  """

  outputs: Any
  first_cause: Cause | None
  faults: tuple[Cause, ...]
  finite: bool
  tensors: tuple[Tensor, ...]
  opaque: dict[str, int]

  def table(self, n: int = 20, fmt: str = "float16") -> str:
    """Return the summary and the n tensors closest to (or beyond) the limit of `fmt`, worst first."""
    rows = [["tensor", "dtype", "shape", "direction", "max|x|", "rms", "min>0", "bad", "zero", f"bits to {fmt}", "at"]]
    for t in sorted((t for t in self.tensors if not t.minor), key=lambda t: severity(t, fmt))[:n]:
      s = t.stats
      at = worst_index(t)
      rows.append(
        [
          t.name,
          t.dtype,
          "x".join(map(str, t.shape)) or "scalar",
          t.direction,
          sizeless(t, "inf") or number(best(np.nanmax, s.max)),
          number(best(np.nanmax, s.rms)),
          number(best(np.nanmin, s.min_nonzero)),
          str(t.nonfinite),
          "?" if np.isnan(s.zero).all() else f"{100 * float(np.nanmean(s.zero)):.0f}%",
          sizeless(t, "none") or _bits(best(np.nanmin, s.headroom[fmt])),
          ",".join(map(str, at)),
        ]
      )
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return "\n".join([self.summary(), "", *lines])

  def summary(self) -> str:
    """Return one to three lines: the cause, further faults, and the primitives that were not entered."""
    if self.first_cause is None:
      lines = [f"all numbers in {len(self.tensors)} tensors are finite or intentionally infinite"]
    else:
      lines = [f"first cause: {self.first_cause}"]
      if len(self.faults) > 1:
        masked = sum(f.masked for f in self.faults)
        lines.append(f"{len(self.faults)} faults in total, {masked} of them masked")
    if self.opaque:
      inside = ", ".join(f"{name} ({count})" for name, count in sorted(self.opaque.items()))
      lines.append(f"not examined inside: {inside}")
    return "\n".join(lines)

  def to_json(self) -> str:
    """Return everything except the outputs. Numbers that were not measured, or do not exist, are null."""
    document = {
      "finite": self.finite,
      "first_cause": _plain(self.first_cause),
      "text": str(self.first_cause) if self.first_cause else None,
      "faults": [_plain(f) for f in self.faults],
      "opaque": self.opaque,
      "tensors": [_plain(t) for t in self.tensors],
    }
    return json.dumps(document, allow_nan=False)

  def html(self, title: str = "x-ray") -> str:
    """Return one self-contained page: cause, heat maps of headroom (tensors x layers), and a table. No script, no network
    access."""
    return page(title, self.summary(), self.faults, self.tensors)


def build(plan: Plan, data, findings: cause_search.Findings, outputs: Any, output_names: Sequence[str]) -> Report:
  """Build a report from a program's data (host arrays) and the findings of the cause search."""
  reached: dict[int, list[str]] = {}
  for index, orders in findings.reached:
    for order in orders:
      reached.setdefault(order, []).append(output_names[index])
  faults = tuple(explain(f, masked=f.order not in reached, outputs=tuple(reached.get(f.order, ()))) for f in findings.faults)
  unmasked = [f for f in faults if not f.masked]
  first = (unmasked or [*faults, None])[0]
  tensors = sorted(records(plan.frame, data), key=lambda t: t.order)
  return Report(outputs, first, faults, not unmasked, tuple(tensors), dict(plan.opaque))


def _bits(x: float) -> str:
  return "?" if math.isnan(x) else "inf" if x == math.inf else f"{x:.1f}"


def _plain(value: Any) -> Any:
  """Convert to JSON types; NaN and infinities become null."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
  if isinstance(value, np.ndarray | np.generic):
    return _plain(value.tolist())
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
