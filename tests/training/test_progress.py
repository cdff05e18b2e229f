"""The lines on the screen."""

import io
import re

from maxtext_like.training import progress as progress_module
from maxtext_like.training.progress import Progress, duration

ROW = {"loss": 2.5, "grad_norm": 1.0, "tokens": 10, "tokens_per_second": 1234.5, "step_seconds": 0.25}


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


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_a_terminal_has_a_line_now_and_then_above_the_bar(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "200")
  stream = Terminal()
  with Progress(300, 1, stream) as progress:
    for step in range(1, 301):
      clock[0] += 1.0
      progress.step({"step": step, **ROW} | ({"eval_loss": 2.0} if step == 100 else {}))
  lines = re.findall(r"step +(\d+) of 300  loss", stream.getvalue())
  assert lines == ["1", "61", "100", "160", "220", "280", "300"]
