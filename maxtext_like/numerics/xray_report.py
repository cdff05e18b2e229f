"""X-ray's report: the first cause and one record per measured tensor, as a table, JSON or one HTML file."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_like.numerics import cause as cause_search
from maxtext_like.numerics.explain import Cause, explain, number
from maxtext_like.numerics.plan import Frame, Plan, Site
from maxtext_like.numerics.tensor_statistics import FORMATS, Stats, decode


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One measured tensor of the program.

  Attributes:
    path: argument path of an input; otherwise the name stack with the calls and loops around the equation.
    op, source, direction, dtype, shape: as in Cause; shape is that of one iteration (and of one shard in a shard_map).
    loops: kinds of the surrounding loops, outermost first; they are the axes of every array in stats.
    stats: Stats.
    level: "full", "light" (maximum and non-finite counts only), or "flag" (maximum; a count of 1 means "some").
    frames: as in Cause.
    label: a readable name set by the caller; see name.
    minor: True if it is left out of the table and the heat maps.
    reads: the inputs of the program that the equation reads.
  """

  path: str
  op: str
  source: str
  direction: str
  dtype: str
  shape: tuple[int, ...]
  loops: tuple[str, ...]
  stats: Stats
  level: str
  order: int
  frames: tuple[str, ...] = ()
  label: str = ""
  minor: bool = False
  reads: tuple[str, ...] = ()

  @property
  def name(self) -> str:
    """The label if there is one; otherwise the last named scope, the file and line, and the operation."""
    if self.label:
      return self.label
    if self.op in ("input", "tag"):
      return self.path
    scopes = [p for p in self.path.split("/") if p and p not in ("scan", "while", "shard_map") and "(" not in p]
    place = self.source.rsplit("/", 1)[-1]
    return " ".join(filter(None, ["/".join(scopes[-2:]), place, self.op]))

  @property
  def nonfinite(self) -> int:
    return int(self.stats.nonfinite.sum())


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
          sizeless(t, "inf") or number(_best(np.nanmax, s.max)),
          number(_best(np.nanmax, s.rms)),
          number(_best(np.nanmin, s.min_nonzero)),
          str(t.nonfinite),
          "?" if np.isnan(s.zero).all() else f"{100 * float(np.nanmean(s.zero)):.0f}%",
          sizeless(t, "none") or _bits(_best(np.nanmin, s.headroom[fmt])),
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
    from maxtext_like.numerics.html import page

    return page(self, title)


def severity(t: Tensor, fmt: str) -> tuple[bool, float]:
  """Sort key: tensors with non-finite numbers first, then by headroom."""
  bits = _best(np.nanmin, t.stats.headroom[fmt])
  return (t.nonfinite == 0, math.inf if math.isnan(bits) else bits)


def sizeless(t: Tensor, infinite: str) -> str:
  """Return "NaN" or ``infinite`` for a tensor whose only finite numbers are zeros; "" for all others."""
  if t.nonfinite == 0 or not np.isnan(t.stats.max).all():
    return ""
  return "NaN" if t.stats.nan.any() else infinite


def worst_index(t: Tensor) -> tuple[int, ...]:
  """Return the iteration with the first non-finite number, or else with the largest maximum; () outside loops."""
  if not t.loops:
    return ()
  bad = t.stats.nonfinite > 0
  score = bad if bad.any() else np.nan_to_num(t.stats.max, nan=-1.0)
  return tuple(int(i) for i in np.unravel_index(int(np.argmax(score)), score.shape))


def build(plan: Plan, data, findings: cause_search.Findings, outputs: Any, output_names: Sequence[str]) -> Report:
  """Build a report from a program's data (host arrays) and the findings of the cause search."""
  reached: dict[int, list[str]] = {}
  for index, orders in findings.reached:
    for order in orders:
      reached.setdefault(order, []).append(output_names[index])
  faults = tuple(explain(f, masked=f.order not in reached, outputs=tuple(reached.get(f.order, ()))) for f in findings.faults)
  unmasked = [f for f in faults if not f.masked]
  first = (unmasked or [*faults, None])[0]
  tensors = sorted(_tensors(plan.frame, data, ()), key=lambda t: t.order)
  return Report(outputs, first, faults, not unmasked, tuple(tensors), dict(plan.opaque))


def _tensors(frame: Frame, data, loops: tuple[str, ...]) -> list[Tensor]:
  found = []
  for site in dict.fromkeys(frame.sites):
    rows = data["rows"][..., site.row : site.row + site.rows, :] if site.rows else data["rows"][..., site.row, :]
    found.append(_tensor(site, rows, (*loops, "rows") if site.rows else loops))
  for node, child in zip(frame.children, data["children"], strict=True):
    if node.kind == "scan":
      found += _tensors(node.frames[0], child, (*loops, "scan"))
    elif node.kind == "while":
      steps = max(1, int(np.max(child["steps"], initial=0)))
      found += _tensors(node.frames[0], _first(child["history"], steps, len(loops)), (*loops, "while"))
    elif node.kind == "cond":
      for branch, branch_data in zip(node.frames, child["branches"], strict=True):
        found += _tensors(branch, branch_data, loops)
    else:
      found += _tensors(node.frames[0], cause_search.over_shards(child, len(loops)), loops)
  return found


def _tensor(site: Site, rows: np.ndarray, loops: tuple[str, ...]) -> Tensor:
  stats = decode(rows, full=site.full, dtype=site.dtype)
  level = "flag" if site.flag else "full" if site.full else "light"
  dtype = str(np.dtype(site.dtype))
  place = (site.path, site.op, site.source, site.direction)
  return Tensor(*place, dtype, site.shape, loops, stats, level, site.order, site.frames, reads=site.reads)


def _first(data, n: int, axis: int):
  """Return the first n entries along an axis of every array: the iterations of a while loop that ran."""
  if isinstance(data, dict):
    return {k: _first(v, n, axis) for k, v in data.items()}
  if isinstance(data, list | tuple):
    return [_first(v, n, axis) for v in data]
  return data[(slice(None),) * axis + (slice(n),)]


def _best(reduce, values: np.ndarray) -> float:
  return math.nan if np.isnan(values).all() else float(reduce(values))


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


__all__ = ["FORMATS", "Report", "Tensor", "build", "severity", "worst_index"]
