"""X-ray's report: the first cause and one record per measured tensor, as a table, JSON or one HTML file.

A record (``Tensor``) has the place, the dtype and the statistics of a tensor. The HTML file has heat maps of headroom by
tensor and layer, without scripts or network access. Its colors follow cividis, which has monotone lightness and suits
color-blind readers. Every cell also shows its number of bits, and faults have a symbol, so nothing depends on color alone.
"""

import dataclasses
import html
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_like.numerics import cause as cause_search
from maxtext_like.numerics.cause import over_shards
from maxtext_like.numerics.explain import Cause, explain, number
from maxtext_like.numerics.plan import Frame, Site, XrayPlan
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


def severity(t: Tensor, fmt: str) -> tuple[bool, float]:
  """Sort key: tensors with non-finite numbers first, then by headroom."""
  bits = best(np.nanmin, t.stats.headroom[fmt])
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


def records(frame: Frame, data, loops: tuple[str, ...] = ()) -> list[Tensor]:
  """Return the tensors of a frame and of the frames inside it, from its data (host arrays). ``loops`` are those around it."""
  found = []
  for site in dict.fromkeys(frame.sites):
    rows = data["rows"][..., site.row : site.row + site.rows, :] if site.rows else data["rows"][..., site.row, :]
    found.append(_tensor(site, rows, (*loops, "rows") if site.rows else loops))
  for node, child in zip(frame.children, data["children"], strict=True):
    if node.kind == "scan":
      found += records(node.frames[0], child, (*loops, "scan"))
    elif node.kind == "while":
      steps = max(1, int(np.max(child["steps"], initial=0)))
      found += records(node.frames[0], _first(child["history"], steps, len(loops)), (*loops, "while"))
    elif node.kind == "cond":
      for branch, branch_data in zip(node.frames, child["branches"], strict=True):
        found += records(branch, branch_data, loops)
    else:
      found += records(node.frames[0], over_shards(child, len(loops)), loops)
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


def best(reduce, values: np.ndarray) -> float:
  """Reduce without NaN; NaN if all values are NaN."""
  return math.nan if np.isnan(values).all() else float(reduce(values))


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
      lines = [f"all numbers in {len(self.tensors)} tensors are finite (masks and initial maxima may be infinite)"]
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


def build(plan: XrayPlan, data, findings: cause_search.Findings, outputs: Any, output_names: Sequence[str]) -> Report:
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


# The HTML page.
# Nine points of matplotlib's cividis (Nuñez, Anderton, Renslow 2018), dark to light.
_CIVIDIS = ("00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "fee838")
_MOST_BITS = 16.0  # headroom with the darkest color
_ROWS = 120

_STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1400px; padding: 0 1rem;
  color: #111; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.cause { border-left: 6px solid #111; background: #f3f3f3; padding: .6rem 1rem; font-family: ui-monospace, monospace; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 6px; text-align: right; white-space: nowrap; } th.l, td.l { text-align: left; }
thead th { position: sticky; top: 0; background: #fff; border-bottom: 1px solid #888; }
.heat td.c { min-width: 2.2em; text-align: center; border: 1px solid #fff; font-size: 12px; }
.list tbody tr:nth-child(odd) { background: #f6f6f6; }
td.l { font-family: ui-monospace, monospace; font-size: 12px; }
summary { cursor: pointer; font-weight: 600; margin: .6rem 0; }
"""


def page(title: str, summary: str, faults: Sequence[Cause], tensors: Sequence[Tensor]) -> str:
  """Return the complete page. Heat maps are grouped by loop length: tensors of the same scanned stack share a map."""
  text = [
    f"<!DOCTYPE html><html lang=en><head><meta charset=utf-8><title>{html.escape(title)}</title>",
    f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
    f"<p class=cause>{html.escape(summary).replace(chr(10), '<br>')}</p>",
    _faults(faults),
    _legend(),
  ]
  for index, fmt in enumerate(FORMATS):
    text.append(f"<details{' open' if index == 0 else ''}><summary>Headroom to {fmt}, in bits</summary>")
    for (kind, length), group in _groups(tensors).items():
      text.append(_heat_map(group, kind, length, fmt))
    text.append("</details>")
  text.append(_list(tensors))
  return "\n".join([*text, "</body></html>"])


def color(bits: float) -> tuple[str, str]:
  """Return (background, text color) for a headroom in bits: light means little headroom, dark means much."""
  if math.isnan(bits):
    return "#ffffff", "#555555"
  where = (1 - min(max(bits / _MOST_BITS, 0.0), 1.0)) * (len(_CIVIDIS) - 1)
  low = min(int(where), len(_CIVIDIS) - 2)
  mix = where - low
  pair = [[int(c[i : i + 2], 16) for i in (0, 2, 4)] for c in _CIVIDIS[low : low + 2]]
  rgb = [round(a + (b - a) * mix) for a, b in zip(*pair, strict=True)]
  light = 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]
  return "#" + "".join(f"{v:02x}" for v in rgb), "#000000" if light > 110 else "#ffffff"


def symbol(bits: float, bad: int) -> str:
  """Return a cell's text: a symbol for non-finite or out-of-range numbers, or the integer number of bits of headroom."""
  if bad:
    return "✕"
  if math.isnan(bits):
    return "·"
  if bits < 0:
    return "▲"
  return "∞" if bits == math.inf else str(int(bits))


def _groups(tensors: Sequence[Tensor]) -> dict[tuple[str, int], list[Tensor]]:
  """Group tensors by their outermost loop (kind, length), the longest stack first; ("", 1) holds tensors outside loops."""
  found: dict[tuple[str, int], list[Tensor]] = {}
  for t in tensors:
    if t.minor:
      continue
    key = (t.loops[0], t.stats.max.shape[0]) if t.loops else ("", 1)
    found.setdefault(key, []).append(t)
  return dict(sorted(found.items(), key=lambda item: -item[0][1]))


def _heat_map(tensors: list[Tensor], kind: str, length: int, fmt: str) -> str:
  worst = sorted(tensors, key=lambda t: severity(t, fmt))[:_ROWS]
  chosen = sorted(worst, key=lambda t: t.order)
  label = {"scan": "layer", "layer": "layer", "while": "iteration", "rows": "row"}.get(kind, "")
  heads = "".join(f"<th>{i}</th>" for i in range(length)) if kind else "<th></th>"
  left_out = f", the {_ROWS} of {len(tensors)} tensors with the least headroom" if len(tensors) > _ROWS else ""
  title = f"{label} 0 to {length - 1}{left_out}" if kind else f"outside loops{left_out}"
  rows = [
    f"<h2>{title}</h2><div class=scroll><table class=heat><thead><tr>"
    f"<th class=l>tensor</th><th class=l>direction</th><th class=l>dtype</th>{heads}</tr></thead><tbody>"
  ]
  for t in chosen:
    inner = tuple(range(1 if t.loops else 0, t.stats.max.ndim))
    bad = np.atleast_1d(t.stats.nonfinite.sum(axis=inner))
    known = ~np.isnan(t.stats.headroom[fmt])
    least = np.where(known, t.stats.headroom[fmt], np.inf).min(axis=inner)
    bits = np.atleast_1d(np.where(known.any(axis=inner), least, math.nan))
    cells = [f"<td class=l>{html.escape(t.name)}</td><td class=l>{t.direction}</td><td class=l>{t.dtype}</td>"]
    for i, (b, n) in enumerate(zip(bits.tolist(), bad.tolist(), strict=True)):
      back, ink = color(-1.0 if n else b)
      tip = (f"{label} {i}: " if kind else "") + f"{n} non-finite, " + ("no size" if math.isnan(b) else f"{b:.1f} bits")
      cells.append(f'<td class=c style="background:{back};color:{ink}" title="{tip}">{symbol(b, n)}</td>')
    rows.append("<tr>" + "".join(cells) + "</tr>")
  return "".join([*rows, "</tbody></table></div>"])


def _legend() -> str:
  cells = []
  for bits in (0, 2, 4, 6, 8, 10, 12, 14, 16):
    back, ink = color(bits)
    cells.append(f'<td class=c style="background:{back};color:{ink}">{bits}{"+" if bits == _MOST_BITS else ""}</td>')
  return (
    "<table class=heat><tbody><tr><td class=l>bits between the largest |x| and the format's limit</td>"
    + "".join(cells)
    + "<td class=l>✕ non-finite</td><td class=l>▲ beyond the limit</td><td class=l>∞ all zero</td><td class=l>· not run</td>"
    + "</tr></tbody></table>"
  )


def _faults(faults: Sequence[Cause]) -> str:
  if len(faults) < 2:
    return ""
  items = "".join(f"<li>{html.escape(str(f))}</li>" for f in faults[:50])
  return f"<details><summary>All {len(faults)} faults, in order of execution</summary><ol>{items}</ol></details>"


def _list(tensors: Sequence[Tensor]) -> str:
  heads = ["tensor", "source", "direction", "dtype", "shape", "max|x|", "rms", "min &gt; 0", "NaN", "inf", "zero", "at"]
  heads += [f"flushed in {f}" for f in FORMATS]
  rows = []
  for t in sorted((t for t in tensors if not t.minor), key=lambda t: severity(t, "float16"))[:400]:
    s = t.stats
    at = worst_index(t)
    value = lambda x, at=at: "" if math.isnan(float(x[at])) else f"{float(x[at]):.3g}"
    share = lambda x, at=at: "" if math.isnan(float(x[at])) else f"{100 * float(x[at]):.1f}%"
    texts = [t.name, t.source, t.direction, t.dtype, "x".join(map(str, t.shape))]
    numbers = [
      value(s.max) or ("NaN" if s.nan[at] else "inf" if s.inf[at] else ""),
      value(s.rms),
      value(s.min_nonzero),
      str(int(s.nan[at])),
      str(int(s.inf[at])),
      share(s.zero),
    ]
    numbers += [",".join(map(str, at)), *(share(s.flushed[f]) for f in FORMATS)]
    rows.append(
      "<tr>"
      + "".join(f"<td class=l>{html.escape(x)}</td>" for x in texts)
      + "".join(f"<td>{x}</td>" for x in numbers)
      + "</tr>"
    )
  head = "".join(f"<th class=l>{h}</th>" if i < 5 else f"<th>{h}</th>" for i, h in enumerate(heads))
  return (
    "<h2>Tensors, least headroom to float16 first (numbers at the worst iteration)</h2><div class=scroll><table class=list>"
    f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
  )
