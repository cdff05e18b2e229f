"""metrics.jsonl, the report and the lines on the screen."""

import io
import json
import re

import numpy as np

from maxtext_like.training.metrics import MetricsWriter, keep_until, read
from maxtext_like.training.progress import Progress, duration
from maxtext_like.training.report import render

ROW = {"loss": 2.5, "grad_norm": 1.0, "tokens": 10, "tokens_per_second": 1234.5, "step_seconds": 0.25}


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_step_is_on_the_disk_at_once_and_json_has_no_nan(tmp_path):
  path = tmp_path / "metrics.jsonl"
  with MetricsWriter(tmp_path, tensorboard=False, step=0) as writer:
    writer.write({"step": 1, "loss": 2.0})
    assert rows(path) == [{"step": 1, "loss": 2.0}]
    writer.write({"step": 2, "loss": float("nan"), "grad_norm": float("inf")})
    assert rows(path)[1] == {"step": 2, "loss": None, "grad_norm": None}
  assert not (tmp_path / "tensorboard").exists()


def test_going_on_drops_the_lines_of_steps_that_are_done_again(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text("".join(json.dumps({"step": s, "loss": 1.0}) + "\n" for s in range(1, 6)) + '{"step": 6, "lo')
  with MetricsWriter(tmp_path, tensorboard=False, step=3) as writer:
    writer.write({"step": 4, "loss": 0.5})
  assert [(r["step"], r["loss"]) for r in read(path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 0.5)]
  keep_until(tmp_path / "absent.jsonl", 3)
  assert not (tmp_path / "absent.jsonl").exists()


def test_tensorboard_events(tmp_path):
  with MetricsWriter(tmp_path, tensorboard=True, step=0) as writer:
    writer.write({"step": 1, "loss": 2.0})
  (events,) = (tmp_path / "tensorboard").iterdir()
  assert b"loss" in events.read_bytes()


def test_plain_lines_in_a_pipe():
  stream = io.StringIO()
  with Progress(20, 5, stream) as progress:
    for step in range(1, 21):
      progress.step({"step": step, **ROW})
  lines = stream.getvalue().splitlines()
  assert [line.split()[1] for line in lines] == ["5", "10", "15", "20"]
  assert lines[0].startswith("step  5 of 20  loss 2.5000  grad norm 1  1,234 tokens/s  0.25 s")
  assert "left" in lines[0]
  assert "left" not in lines[-1]


def test_duration():
  assert [duration(s) for s in (3.24, 59.9, 245, 3723)] == ["3.2 s", "59.9 s", "4:05", "1:02:03"]


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
