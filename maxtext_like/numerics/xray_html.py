"""X-ray's report as one HTML file with heat maps of headroom (tensors x layers), without scripts or network access.

The colors follow cividis, which has monotone lightness and suits color-blind readers. Every cell also shows its number of
bits, and faults have a symbol, so nothing depends on color alone.
"""

import html
import math
from collections.abc import Sequence

import numpy as np

from maxtext_like.numerics.explain import Cause
from maxtext_like.numerics.tensor_record import Tensor, severity, worst_index
from maxtext_like.numerics.tensor_statistics import FORMATS

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
