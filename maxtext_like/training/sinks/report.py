"""report.html: a run in one file that works offline: curves, finiteness table, configuration, environment."""

import json
import math
from html import escape
from typing import Any

from maxtext_like.training.finiteness import CHECKS, Report
from maxtext_like.training.sinks.metrics import Row

# (title, metrics drawn together, logarithmic)
CURVES = (
  ("Loss", ("loss", "eval_loss"), False),
  ("Gradient norm", ("grad_norm",), True),
  ("Parameter norm", ("param_norm",), False),
  ("Learning rate", ("learning_rate",), False),
  ("Tokens a second", ("tokens_per_second",), False),
  ("Step seconds", ("step_seconds",), True),
  ("Loss scale", ("loss_scale",), True),
  ("Expert load, 1 is balanced", ("moe_load_max", "moe_load_min"), False),
  ("Indexer loss", ("indexer_loss",), False),
)
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 220, 62, 28, 10
POINTS = 1000  # of a curve; longer runs are thinned
SAMPLES = 100  # newest ones that are shown
COLOURS = ("#0072b2", "#d55e00")  # told apart without colour vision (Okabe and Ito)
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:980px;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.5rem;margin-bottom:0}h2{font-size:1.15rem;margin-top:2rem}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:1rem}figure{margin:0}
figcaption{font-weight:600;font-size:.9rem}svg{width:100%;height:auto}svg text{font-size:11px;fill:#444}
table{border-collapse:collapse}
td,th{border-bottom:1px solid #ddd;padding:.25rem .8rem .25rem 0;text-align:left;vertical-align:top}
pre{background:#f5f5f5;padding:.8rem;overflow:auto;font-size:12.5px}.bad{color:#b00020;font-weight:600}.good{color:#00695c}
.facts{color:#444}.text{white-space:pre-wrap;overflow-wrap:anywhere}
"""


def render(
  *,
  name: str,
  outcome: str,
  rows: list[Row],
  finiteness: Report,
  config_yaml: str,
  environment: dict[str, Any],
  samples: list[Row] | None = None,
  unwritten: list[str] | None = None,
  goodput: dict[str, Any] | None = None,
) -> str:
  """The page.

  Args:
    name: of the run.
    outcome: how it ended, one line.
    rows: of metrics.jsonl.
    finiteness: of finiteness.json; empty when the check is off.
    config_yaml: the resolved configuration.
    environment: of env.json.
    samples: of samples.jsonl.
    unwritten: lines about what could not be written.
    goodput: of goodput.json.
  """
  figures = "".join(_figure(title, keys, log, rows) for title, keys, log in CURVES)
  parts = [
    f"<h1>{escape(name)}</h1><p>{escape(outcome)}</p>",
    f"<p class=facts>{escape(_facts(rows))}</p>",
    *(f"<p class=bad>{escape(line)}</p>" for line in unwritten or []),
    f"<h2>Curves</h2><div class=grid>{figures or '<p>No step was finished.</p>'}</div>",
    _samples(samples or []),
    f"<h2>Finiteness</h2>{_finiteness(finiteness)}",
    f"<h2>Configuration</h2><pre>{escape(config_yaml)}</pre>",
    f"<h2>Environment</h2><pre>{escape(json.dumps(environment, indent=2))}</pre>",
  ]
  meta = "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
  head = f"{meta}<title>{escape(name)}</title><style>{STYLE}</style>"
  return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _facts(rows: list[Row]) -> str:
  """One line about the whole run."""
  if not rows:
    return "0 steps"
  rates = sorted(r["tokens_per_second"] for r in rows if r.get("tokens_per_second") is not None)
  facts = [f"{len(rows)} steps", f"{sum(r.get('tokens') or 0 for r in rows):,.0f} tokens"]
  losses = [r["loss"] for r in rows if r.get("loss") is not None]
  if losses:
    facts.append(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
  if rates:
    facts.append(f"median {rates[len(rates) // 2]:,.0f} tokens/s")
  words = {"skipped": "updates skipped", "clipped": "gradients clipped", "rescued": "values rescued"}
  totals = {word: sum(r.get(key) or 0 for r in rows) for key, word in words.items()}
  facts += [f"{total:,.0f} {word}" for word, total in totals.items() if total]
  return ", ".join(facts)


def _samples(samples: list[Row]) -> str:
  """What the model wrote, the newest first; nothing where the run has no samples."""
  if not samples:
    return ""
  rows = []
  for sample in samples[: -SAMPLES - 1 : -1]:
    text = f"<span class=bad>{escape(sample['error'])}</span>" if "error" in sample else _text(sample["text"])
    rows.append(f"<tr><td>{sample['step']}<td class=text><b>{_text(sample['prompt'])}</b>{text}")
  older = f"<p>{len(samples) - SAMPLES} older ones are in samples.jsonl.</p>" if len(samples) > SAMPLES else ""
  return f"<h2>Samples</h2><table><tr><th>step<th>prompt and what follows{''.join(rows)}</table>{older}"


def _text(text: str) -> str:
  """Text for the page; control characters, which HTML does not have, are written as escapes."""
  return escape("".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text))


def _finiteness(report: Report) -> str:
  if not report:
    return "<p>The check was off (finite_check_steps: 0).</p>"
  rows = []
  for check in CHECKS:
    entry = report[check]
    kind = {"finite": "good", "not finite": "bad"}.get(entry["result"], "")
    details = ", ".join(
      f"{key.replace('_', ' ')} {', '.join(value) if isinstance(value, list) else _short(value)}"
      for key, value in entry.items()
      if key not in ("result", "finite")
    )
    rows.append(f"<tr><td>{check}<td class='{kind}'>{escape(entry['result'])}<td>{escape(details)}")
  return f"<table><tr><th>check<th>result<th>details{''.join(rows)}</table>"


def _short(value: Any) -> str:
  return f"{value:.6g}" if isinstance(value, float) else str(value)


def _figure(title: str, keys: tuple[str, ...], log: bool, rows: list[Row]) -> str:
  """One curve with its axes; nothing where the run has no such numbers."""
  series = []
  for key in keys:
    points = [(r["step"], float(r[key])) for r in rows if r.get(key) is not None and (not log or r[key] > 0)]
    if points:
      series.append((key, points[:: -(-len(points) // POINTS)] + points[-1:]))
  if not series:
    return ""
  xs = [x for _, points in series for x, _ in points]
  ys = [y for _, points in series for _, y in points]
  low, high = min(ys), max(ys)
  if low == high:
    low, high = low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05
    log = False
  ticks = _ticks(low, high, log)
  low, high = min(low, ticks[0]), max(high, ticks[-1])
  first, last = min(xs), max(max(xs), min(xs) + 1)

  def x_at(x: float) -> float:
    return LEFT + (x - first) / (last - first) * (WIDTH - LEFT - 10)

  def y_at(y: float) -> float:
    f = (math.log(y / low) / math.log(high / low)) if log else (y - low) / (high - low)
    return HEIGHT - BOTTOM - f * (HEIGHT - BOTTOM - TOP)

  marks = [
    f"<line x1={LEFT} x2={WIDTH - 10} y1={y_at(t):.1f} y2={y_at(t):.1f} stroke=#e0e0e0 />"
    f"<text x={LEFT - 6} y={y_at(t) + 4:.1f} text-anchor=end>{t:.4g}</text>"
    for t in ticks
  ]
  marks += [
    f"<text x={x_at(x):.1f} y={HEIGHT - 8} text-anchor={anchor}>{x}</text>" for x, anchor in ((first, "start"), (last, "end"))
  ]
  marks.append(f"<text x={(LEFT + WIDTH) / 2} y={HEIGHT - 8} text-anchor=middle>step</text>")
  for i, (key, points) in enumerate(series):
    line = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in points)
    dash = " stroke-dasharray=5,3" if i else ""
    marks.append(f"<polyline points='{line}' fill=none stroke={COLOURS[i]} stroke-width=1.8{dash} />")
    if len(points) <= 2 or i:
      marks += [f"<circle cx={x_at(x):.1f} cy={y_at(y):.1f} r=2.5 fill={COLOURS[i]} />" for x, y in points[:200]]
    if len(series) > 1:
      marks.append(f"<text x={WIDTH - 14} y={TOP + 14 + 14 * i} text-anchor=end style='fill:{COLOURS[i]}'>{escape(key)}</text>")
  label = escape(f"{title}, steps {first} to {last}, {min(ys):.4g} to {max(ys):.4g}", quote=True)
  svg = f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img aria-label=\"{label}\">{''.join(marks)}</svg>"
  return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"


def _ticks(low: float, high: float, log: bool) -> list[float]:
  """Round numbers around and between the ends."""
  if log and high / low > 20:
    return [10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
  step = 10.0 ** math.floor(math.log10((high - low) / 3))
  step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 5)
  first = math.floor(low / step)
  ticks = [i * step for i in range(first, math.ceil(high / step) + 1)]
  return [t for t in ticks if t > 0] if log else ticks
