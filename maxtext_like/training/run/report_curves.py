"""Draws curves of metrics as SVG, with round axis labels and a mark at every step whose value is not finite."""

import math
from html import escape

from maxtext_like.training.sinks.metrics import Row

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 460, 220, 62, 12, 28, 10
POINTS = 1000  # most points of a curve; longer curves are thinned
MARKED = 50  # most steps that are marked as not finite
COLORS = ("#0072b2", "#d55e00")  # distinguishable with color blindness (Okabe and Ito)
BAD = "#b00020"


def figure(title: str, keys: tuple[str, ...], log: bool, rows: list[Row]) -> str:
  """Draw some metrics as one figure. Return "" if the run has none of them.

  Args:
    title: above the figure.
    keys: metrics that are drawn together, at most as many as ``COLORS``.
    log: use a logarithmic axis if the values span more than a factor of 20.
    rows: of metrics.jsonl.
  """
  # Collect the finite points of each metric, and the steps whose value is not finite.
  series = {}
  for key in keys:
    points = [(r["step"], float(r[key])) for r in rows if r.get(key) is not None and (not log or r[key] > 0)]
    if points:
      series[key] = points
  bad = sorted({r["step"] for r in rows for key in keys if key in r and r[key] is None})
  if not series and not bad:
    return ""
  # Choose the ranges of both axes and the axis labels.
  ys = [y for points in series.values() for _, y in points] or [0.0]
  steps = [x for points in series.values() for x, _ in points] + bad
  first, last = min(steps), max(steps)
  log = log and bool(series) and max(ys) / min(ys) > 20
  ticks = log_ticks(min(ys), max(ys)) if log else linear_ticks(min(ys), max(ys))
  low, high = min(*ys, ticks[0]), max(*ys, ticks[-1])

  # Places in the picture. The vertical axis of SVG points down.
  def x_at(x: float) -> float:
    return LEFT + (x - first) / max(last - first, 1) * (WIDTH - LEFT - RIGHT)

  def y_at(y: float) -> float:
    f = (math.log(y / low) / math.log(high / low)) if log else (y - low) / (high - low)
    return HEIGHT - BOTTOM - f * (HEIGHT - BOTTOM - TOP)

  # Grid lines and labels.
  marks = [
    f"<line x1={LEFT} x2={WIDTH - RIGHT} y1={y_at(t):.1f} y2={y_at(t):.1f} stroke=#e0e0e0 />"
    f"<text x={LEFT - 6} y={y_at(t) + 4:.1f} text-anchor=end>{label}</text>"
    for t, label in zip(ticks, log_labels(ticks) if log else labels(ticks), strict=True)
    if series
  ]
  for x in step_ticks(first, last):
    anchor = "start" if x == first and x != last else "end" if x == last and x != first else "middle"
    marks.append(f"<text x={x_at(x):.1f} y={HEIGHT - BOTTOM + 14} text-anchor={anchor}>{x}</text>")
  marks.append(f"<text x={(LEFT + WIDTH) / 2} y={HEIGHT - 2} text-anchor=middle>step</text>")
  # Curves: a thinned line each, with dots if it is short or the second one.
  for i, (key, points) in enumerate(series.items()):
    # At most POINTS points keep the file small. The last one is always shown, because readers compare it with the log.
    shown = points[:: -(-len(points) // POINTS)]
    shown += [] if shown[-1] == points[-1] else points[-1:]
    line = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in shown)
    dash = " stroke-dasharray=5,3" if i else ""
    marks.append(f"<polyline points='{line}' fill=none stroke={COLORS[i]} stroke-width=1.8{dash} />")
    if len(shown) <= 2 or i:
      marks += [f"<circle cx={x_at(x):.1f} cy={y_at(y):.1f} r=2.5 fill={COLORS[i]} />" for x, y in shown[:200]]
    if len(series) > 1:
      at = f"x={WIDTH - RIGHT - 4} y={TOP + 14 + 14 * i} text-anchor=end"
      marks.append(f"<text {at} style='fill:{COLORS[i]}'>{escape(key)}</text>")
  # Steps that are not finite: a vertical line and a cross.
  for x in bad[:MARKED]:
    line = f"x1={x_at(x):.1f} x2={x_at(x):.1f} y1={TOP} y2={HEIGHT - BOTTOM} stroke={BAD} stroke-dasharray=2,3"
    cross = f"x={x_at(x):.1f} y={TOP + 5} text-anchor=middle style='fill:{BAD};font-weight:700'"
    marks.append(f"<g><title>step {x}: not finite</title><line {line} /><text {cross}>✕</text></g>")
  # The label describes the figure to readers who cannot see it.
  about = f"{title}, steps {first} to {last}, " + (f"{min(ys):.4g} to {max(ys):.4g}" if series else "no finite number")
  if bad:
    about += f", not finite at step {', '.join(map(str, bad[:MARKED]))}"
  svg = f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img aria-label=\"{escape(about, quote=True)}\">{''.join(marks)}</svg>"
  note = f" <span class=bad>✕ not finite at step {', '.join(map(str, bad[:5]))}{', ...' * (len(bad) > 5)}</span>" if bad else ""
  return f"<figure><figcaption>{escape(title)}{note}</figcaption>{svg}</figure>"


def linear_ticks(low: float, high: float) -> list[float]:
  """Return three to seven round numbers that cover a range."""
  if low == high:
    low, high = low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05
  step = 10.0 ** math.floor(math.log10((high - low) / 3))
  step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 5)
  return [i * step for i in range(math.floor(low / step), math.ceil(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
  """Return at most eight powers of ten that cover a range."""
  ends = math.floor(math.log10(low)), math.ceil(math.log10(high))
  every = -(-(ends[1] - ends[0]) // 7)
  return [10.0**e for e in range(ends[0], ends[1] + every, every)]


def labels(ticks: list[float]) -> list[str]:
  """Format evenly spaced ticks with as many digits as needed to distinguish them."""
  step, largest = ticks[1] - ticks[0], max(abs(t) for t in ticks)
  place = math.floor(math.log10(step) + 1e-9)  # position of the last digit that changes
  if 1e-3 <= largest < 1e6:
    return [f"{t:.{max(0, -place)}f}".replace("-0", "0") if abs(t) < step / 2 else f"{t:.{max(0, -place)}f}" for t in ticks]
  digits = max(0, math.floor(math.log10(largest)) - place)
  return ["0" if abs(t) < step / 2 else f"{t:.{digits}e}" for t in ticks]


def log_labels(ticks: list[float]) -> list[str]:
  """Format powers of ten."""
  return [f"{t:g}" if 1e-3 <= t < 1e5 else f"{t:.0e}" for t in ticks]


def step_ticks(first: int, last: int) -> list[int]:
  """Return the first step, the last step, and round numbers between them that are not too close to either."""
  if last - first < 5:
    return list(range(first, last + 1))
  every = max(1, round(linear_ticks(first, last)[1] - linear_ticks(first, last)[0]))
  between = [x for x in range(-(-first // every) * every, last, every) if x - first > every / 2 and last - x > every / 2]
  return [first, *between, last]
