"""The report of a run, report.html: tables, curves and axes."""

import re

import numpy as np
import pytest

from maxtext_like.training.loop.goodput import PHASES
from maxtext_like.training.run.report import render
from maxtext_like.training.run.report_curves import labels, linear_ticks, log_labels, log_ticks, step_ticks

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
  assert "<title>step 21: not finite</title>" in html
  assert "loss not finite at step 21" in html
  assert "40 gradients clipped" in html
  assert "<td class='bad'>not finite" in html
  points = re.findall(r"([\d.]+),([\d.]+)", html.split("<polyline points='")[1].split("'")[0])
  assert len(points) == 39
  heights = [float(y) for _, y in points]
  assert heights == sorted(heights)  # the loss falls, y grows downwards


def test_metrics_of_tasks_have_a_table_and_curves():
  name = "eval_tasks/<t>/acc"
  html = page([{"step": s, **ROW} | ({name: s / 8} if s % 2 == 0 else {}) for s in range(1, 7)])
  assert "<tr><td>&lt;t&gt;/acc<td>0.2500 (step 2)<td>0.7500 (step 6)<td>0.2500<td>0.7500<td>3" in html
  assert "<figcaption>&lt;t&gt;/acc" in html
  assert "<h2>Tasks" not in page([{"step": 1, **ROW}])


@pytest.mark.parametrize("name", ["clamped", "rescued"])  # "rescued" in files of earlier versions
def test_clamped_values_are_counted(name):
  assert "3 values clamped" in page([{"step": 1, **ROW, name: 3}])


def test_a_report_of_nothing_and_of_a_constant():
  assert "No step finished" in page([])
  html = page([{"step": 1, **ROW}])
  assert np.isfinite([float(y) for y in re.findall(r"cy=([\d.]+)", html)]).all()


@pytest.mark.parametrize(
  "ends",
  [(3.0001, 3.0004), (1e-9, 1.3e-9), (123456, 123459), (2.0, 2.0), (0.0, 0.0), (-1e-7, 5e-8), (1e30, 9e30), (0.1, 7.5)],
)
def test_no_tick_of_an_axis_is_there_twice(ends):
  found = labels(linear_ticks(*ends))
  assert len(set(found)) == len(found) >= 2, found
  slack = 1e-9 * max(map(abs, ends))
  assert float(found[0]) <= ends[0] + slack
  assert float(found[-1]) >= ends[1] - slack
  if ends[0] > 0:
    found = log_labels(log_ticks(ends[0], ends[1] * 100))
    assert len(set(found)) == len(found) >= 2, found


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 2), (1, 5), (1, 80), (61, 80), (1, 100_000), (99, 101)])
def test_the_axis_of_the_steps_names_steps_that_are_there_once(first, last):
  found = step_ticks(first, last)
  assert found[0] == first
  assert found[-1] == last
  assert found == sorted(set(found))
  assert len(found) <= 8


def test_a_failure_keeps_its_lines_and_its_step_is_marked_in_a_figure_without_one_finite_number():
  table = [{"step": s, "loss": 1.0 if s < 3 else None, "grad_norm": None} for s in (1, 2, 3)]
  html = render(name="n", outcome="stopped: NaN\nwhat to try: <x>", rows=table, finiteness={}, config_yaml="", environment={})
  assert "<p class=text>stopped: NaN\nwhat to try: &lt;x&gt;</p>" in html
  assert "white-space:pre-wrap" in html
  loss, norm = html.split("<figure>")[1:3]
  assert re.findall(r"step (\d+): not finite", loss) == ["3"]
  assert re.findall(r"step (\d+): not finite", norm) == ["1", "2", "3"]
  assert "no finite number" in norm


def test_where_the_time_went_and_what_was_not_written():
  seconds = dict.fromkeys(PHASES, 0.0) | {"steps": 60.0, "compile": 30.0, "lost": 10.0}
  goodput = {"goodput": 0.6, "lives": 3, "seconds": seconds, "between_lives_seconds": 75.0, "until": 0.0}
  html = render(
    name="n",
    outcome="",
    rows=[],
    finiteness={},
    config_yaml="",
    environment={},
    goodput=goodput,
    unwritten=["m: 3 rows <lost>"],
  )
  assert re.search(r"goodput 60\.0% of 1:40; 3 starts, [^<]*\b1:15\b", html)
  assert "steps trained again after a restart<td>10.0%<td>10.0 s" in html
  assert "<p class=bad>m: 3 rows &lt;lost&gt;</p>" in html
