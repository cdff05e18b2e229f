"""report.html: a run in one self-contained file with curves, finiteness table, configuration and environment."""

import json
from html import escape
from typing import Any

from maxtext_like.training.loop.evaluation import perplexity
from maxtext_like.training.loop.finiteness import CHECKS, Report
from maxtext_like.training.loop.goodput import PHASES, shares
from maxtext_like.training.loop.progress import duration
from maxtext_like.training.loop.task_evaluation import NAME as TASKS
from maxtext_like.training.run.report_curves import BAD, figure
from maxtext_like.training.sinks.metrics import Row

# title, metrics drawn together, logarithmic axis
CURVES = (
  ("Loss", ("loss", "eval_loss"), False),
  ("Gradient norm", ("grad_norm",), True),
  ("Parameter norm", ("param_norm",), False),
  ("Fraction of the update that the stored weights received", ("update_survival", "update_survival/lowest"), False),
  ("Learning rate", ("learning_rate",), False),
  ("Tokens per second", ("tokens_per_second",), False),
  ("Step seconds", ("step_seconds",), True),
  ("MFU", ("mfu",), False),
  ("Device memory, GB", ("memory_peak_gb", "memory_gb"), False),
  ("Loss scale", ("loss_scale",), True),
  ("Expert load, 1 is balanced", ("moe_load_max", "moe_load_min"), False),
  ("Indexer loss", ("indexer_loss",), False),
)
SAMPLES = 100  # the newest ones, which are shown
TASK_CURVES = 12  # most metrics of tasks that are drawn; the table has all
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:980px;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.5rem;margin-bottom:0}h2{font-size:1.15rem;margin-top:2rem}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:1rem}figure{margin:0}
figcaption{font-weight:600;font-size:.9rem}svg{width:100%;height:auto}svg text{font-size:11px;fill:#444}
table{border-collapse:collapse}
td,th{border-bottom:1px solid #ddd;padding:.25rem .8rem .25rem 0;text-align:left;vertical-align:top}
pre{background:#f5f5f5;padding:.8rem;overflow:auto;font-size:12.5px}.bad{color:BAD;font-weight:600}.good{color:#00695c}
.facts{color:#444}.text{white-space:pre-wrap;overflow-wrap:anywhere}
.bar{display:flex;height:22px;margin:.5rem 0}.bar div{min-width:1px}
"""

# Colors of Okabe and Ito, and grays.
_PHASE_COLORS = {
  "steps": "#009e73", "lost": "#d55e00", "data": "#e69f00", "compile": "#0072b2", "start": "#999999", "restore": "#56b4e9",
  "save": "#cc79a7", "evaluate": "#f0e442", "sample": "#444444", "end": "#bbbbbb",
}  # fmt: skip


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
  """Return the page.

  Args:
    name: name of the run.
    outcome: how the run ended.
    rows: of metrics.jsonl.
    finiteness: of finiteness.json; empty if the check is off.
    config_yaml: the resolved configuration.
    environment: of env.json.
    samples: of samples.jsonl.
    unwritten: lines about data that could not be written.
    goodput: of goodput.json.
  """
  # Curves of training, and of the tasks of lm-evaluation-harness.
  figures = "".join(figure(title, keys, log, rows) for title, keys, log in CURVES)
  figures += "".join(figure(name.partition("/")[2], (name,), False, rows) for name in _task_metrics(rows)[:TASK_CURVES])
  # The sections of the page. A section without content is an empty text.
  parts = [
    f"<h1>{escape(name)}</h1><p class=text>{escape(outcome)}</p>",
    f"<p class=facts>{escape(_facts(rows))}</p>",
    *(f"<p class=bad>{escape(line)}</p>" for line in unwritten or []),
    f"<h2>Curves</h2><div class=grid>{figures or '<p>No step finished.</p>'}</div>",
    _evaluation(rows),
    _tasks(rows),
    _time(goodput),
    _samples(samples or []),
    f"<h2>Finiteness</h2>{_finiteness(finiteness)}",
    f"<h2>Configuration</h2><pre>{escape(config_yaml)}</pre>",
    f"<h2>Environment</h2><pre>{escape(json.dumps(environment, indent=2))}</pre>",
  ]
  # The page is one file without scripts or links, so that it can be copied and read offline.
  meta = "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
  head = f"{meta}<title>{escape(name)}</title><style>{STYLE.replace('BAD', BAD)}</style>"
  return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _facts(rows: list[Row]) -> str:
  """Return one line about the complete run."""
  if not rows:
    return "0 steps"
  # Speed and loss may be missing. A loss that is not finite is written as null.
  rates = sorted(r["tokens_per_second"] for r in rows if r.get("tokens_per_second") is not None)
  facts = [f"{len(rows)} steps", f"{sum(r.get('tokens') or 0 for r in rows):,.0f} tokens"]
  losses = [r["loss"] for r in rows if r.get("loss") is not None]
  if losses:
    facts.append(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
  if rates:
    facts.append(f"median {rates[len(rates) // 2]:,.0f} tokens/s")
  bad = [r["step"] for r in rows if "loss" in r and r["loss"] is None]
  if bad:
    facts.append(f"loss not finite at step {', '.join(map(str, bad[:5]))}{', ...' if len(bad) > 5 else ''}")
  # Counts over all steps, of events that a reader should notice.
  words = {"skipped": "updates skipped", "clipped": "gradients clipped", "clamped": "values clamped"}
  former = {"clamped": "rescued"}  # the name in metrics.jsonl of earlier versions
  totals = {word: sum(r.get(key, r.get(former.get(key, key))) or 0 for r in rows) for key, word in words.items()}
  facts += [f"{total:,.0f} {word}" for word, total in totals.items() if total]
  return ", ".join(facts)


def _evaluation(rows: list[Row]) -> str:
  """Return a table of the evaluation losses of each source, the lowest and the last; "" if there was no evaluation."""
  names = dict.fromkeys(name for row in rows for name in row if name.startswith("eval_loss"))
  lines = []
  for name in names:
    found = [(row[name], row["step"]) for row in rows if row.get(name) is not None]
    if not found:
      continue
    # A last loss clearly above the lowest one indicates overfitting.
    (lowest, at), (last, _) = min(found), found[-1]
    source = name.partition("/")[2] or "all"
    lines.append(f"<tr><td>{escape(source)}<td>{lowest:.4f}<td>{at}<td>{last:.4f}<td>{perplexity(last):.4g}<td>{len(found)}")
  if not lines:
    return ""
  head = "<tr><th>source<th>lowest loss<th>after step<th>last loss<th>its perplexity<th>evaluations"
  return f"<h2>Evaluation</h2><table>{head}{''.join(lines)}</table>"


def _task_metrics(rows: list[Row]) -> list[str]:
  """Return the names of the metrics of tasks."""
  return list(dict.fromkeys(name for row in rows for name in row if name.startswith(f"{TASKS}/")))


def _tasks(rows: list[Row]) -> str:
  """Return a table of the metrics of tasks, from the first to the last evaluation; "" if no task was evaluated."""
  lines = []
  # A task may have been skipped in some evaluations, so only rows with its value count.
  for name in _task_metrics(rows):
    found = [(row[name], row["step"]) for row in rows if row.get(name) is not None]
    if found:
      values, (first, begin), (last, end) = [value for value, _ in found], found[0], found[-1]
      lines.append(
        f"<tr><td>{escape(name.partition('/')[2])}<td>{first:.4f} (step {begin})<td>{last:.4f} (step {end})"
        f"<td>{min(values):.4f}<td>{max(values):.4f}<td>{len(found)}"
      )
  if not lines:
    return ""
  head = "<tr><th>task/metric<th>first<th>last<th>lowest<th>highest<th>evaluations"
  return f"<h2>Tasks</h2><table>{head}{''.join(lines)}</table>"


def _time(goodput: dict[str, Any] | None) -> str:
  """Return how the wall time of the run, over all its starts, was spent."""
  if goodput is None:
    return ""
  # A bar with one part per phase, and the same numbers as a table for readers who cannot see colors.
  parts, lives, between = shares(goodput), goodput["lives"], goodput["between_lives_seconds"]
  bar = "".join(
    f"<div style='flex:{share:.4f};background:{_PHASE_COLORS[name]}' title='{PHASES[name]}: {share:.1%}'></div>"
    for name, share in parts
  )
  rows = "".join(
    f"<tr><td><span style='color:{_PHASE_COLORS[name]}'>■</span> {PHASES[name]}<td>{share:.1%}"
    f"<td>{duration(goodput['seconds'][name])}"
    for name, share in parts
  )
  # The time between starts is shown separately, because the total is that of running processes.
  restarts = f"; {lives} starts, with {duration(between)} between them in which the run was stopped" if lives > 1 else ""
  total = duration(sum(goodput["seconds"].values()))
  return (
    f"<h2>Time</h2><p class=facts>goodput {goodput['goodput']:.1%} of {total}{restarts}</p>"
    f"<div class=bar role=img aria-label='fractions of the wall time, as in the table'>{bar}</div><table>{rows}</table>"
  )


def _samples(samples: list[Row]) -> str:
  """Return the model's samples, the newest first; "" if the run has none."""
  if not samples:
    return ""
  rows = []
  for sample in samples[: -SAMPLES - 1 : -1]:
    text = f"<span class=bad>{escape(sample['error'])}</span>" if "error" in sample else _text(sample["text"])
    rows.append(f"<tr><td>{sample['step']}<td class=text><b>{_text(sample['prompt'])}</b>{text}")
  older = f"<p>{len(samples) - SAMPLES} older samples are in samples.jsonl.</p>" if len(samples) > SAMPLES else ""
  return f"<h2>Samples</h2><table><tr><th>step<th>prompt and completion{''.join(rows)}</table>{older}"


def _text(text: str) -> str:
  """Escape text for the page. Control characters, which HTML cannot contain, are written as escapes."""
  return escape("".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text))


def _finiteness(report: Report) -> str:
  if not report:
    return "<p>Not reported: finite_check_steps is 0.</p>"
  rows = []
  for check in CHECKS:
    entry = report[check]
    # A check that did not run gets no color.
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
