"""report.html."""

import re

import numpy as np

from maxtext_like.training.sinks.report import render

ROW = {"loss": 2.5, "grad_norm": 1.0, "tokens": 10, "tokens_per_second": 1234.5, "step_seconds": 0.25}


def page(table, finiteness=None):
  return render(
    name="a <run>",
    outcome="finished",
    rows=table,
    finiteness=finiteness or {},
    config_yaml="x: <y>",
    environment={"python": "3"},
  )


def test_the_report_is_one_file_without_network_and_escapes_what_it_shows():
  table = [{"step": s, **ROW, "loss": 5.0 / s, "learning_rate": 1e-3, "clipped": 1} for s in range(1, 41)]
  table[20]["loss"] = None
  table[9]["eval_loss"] = table[19]["eval_loss"] = 1.0
  checks = {"loss0": {"result": "not finite", "finite": False, "value": "nan"}}
  checks |= {name: {"result": "not run", "finite": None} for name in ("gradients", "parameters", "loss1")}
  html = page(table, checks)
  assert not re.search(r"(src|href)=|https?://|@import|url\(", html)
  assert "a &lt;run&gt;" in html
  assert "x: &lt;y&gt;" in html
  assert html.count("<svg") == 5
  assert "NaN" not in html
  assert "40 gradients clipped" in html
  assert "<td class='bad'>not finite" in html
  points = re.findall(r"([\d.]+),([\d.]+)", html.split("<polyline points='")[1].split("'")[0])
  assert len(points) == 40  # 39 finite losses, the last of them as the end
  heights = [float(y) for _, y in points]
  assert heights == sorted(heights)  # the loss falls, y grows downwards


def test_a_report_of_nothing_and_of_a_constant():
  assert "No step was finished" in page([])
  html = page([{"step": 1, **ROW}])
  assert np.isfinite([float(y) for y in re.findall(r"cy=([\d.]+)", html)]).all()
