"""The progress output of a run in a pipe, on a terminal and in a notebook."""

import io
import os
import pty
import re
import subprocess
import sys
import time
import types

import pytest

from maxtext_like.training.loop import progress as progress_module
from maxtext_like.training.loop.progress import Progress, duration

ROW = {"loss": 2.5, "grad_norm": 1.0, "tokens": 10, "tokens_per_second": 1234.5, "step_seconds": 0.25}


def test_plain_lines_in_a_pipe():
  stream = io.StringIO()
  with Progress(20, 5, stream) as progress:
    progress.begin(0)
    for step in range(1, 21):
      progress.step({"step": step, **ROW})
  lines = stream.getvalue().splitlines()
  assert [line.split()[1] for line in lines] == ["5", "10", "15", "20"]
  assert lines[0].startswith("step  5 of 20  loss 2.5000  grad norm 1  1,234 tokens/s  0.25 s")
  assert "left" in lines[0]
  assert "left" not in lines[-1]


def test_every_step_has_a_line_where_lines_are_all_that_there_is():
  shown = []
  with Progress(40, None, shown.append) as progress:
    for step in range(1, 41):
      progress.step({"step": step, **ROW})
    progress.say("two\nlines")
  assert [line.split()[1] for line in shown[:-2]] == [str(step) for step in range(1, 41)]
  assert shown[-2:] == ["two", "lines"]


def test_a_pipe_has_a_line_at_once_and_more_while_it_waits(monkeypatch):
  monkeypatch.setattr(progress_module, "NOTICE_SECONDS", 0.05)
  monkeypatch.setattr(progress_module, "_UPDATE_SECONDS", 0.05)
  shown = []
  said = "compile the train step is being compiled"
  with Progress(1, None, shown.append) as run, run.waiting("preparing"), run.waiting("compiling the train step", said):
    assert shown == [said]
    while len(shown) < 3:
      time.sleep(0.01)
  assert all(re.fullmatch(r"still compiling the train step, 0\.[0-9] s", line) for line in shown[1:3])


def test_duration():
  assert [duration(s) for s in (3.24, 59.9, 245, 3723)] == ["3.2 s", "59.9 s", "4:05", "1:02:03"]


class Terminal(io.StringIO):
  def isatty(self):
    return True


def lines_of_a_terminal(monkeypatch, last: int, seconds: float, interval: int | None = None) -> list[int]:
  """Return the steps whose lines stay on a terminal, for a run with this many steps of this many seconds. An evaluation follows
  step 100."""
  clock = [0.0]
  monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "200")
  stream = Terminal()
  with Progress(last, interval, stream) as progress:
    for step in range(1, last + 1):
      clock[0] += seconds
      progress.step({"step": step, **ROW} | ({"eval_loss": 2.0} if step == 100 else {}))
  return [int(step) for step in re.findall(rf"step +(\d+) of {last}  loss", stream.getvalue())]


@pytest.mark.parametrize(
  ("last", "seconds", "interval", "steps"),
  [
    (60, 0.1, None, [1, 2, *range(5, 61, 5)]),  # a run of a few seconds keeps lines too
    (150, 0.1, None, [1, 2, 5, *range(10, 151, 10)]),
    (2000, 0.01, None, [1, 2, 5, 10, 20, 50, *range(100, 2001, 100)]),
    (300, 1.0, None, [1, 2, 5, 10, *range(20, 301, 20)]),
    (30, 100.0, None, [*range(1, 31)]),  # a line at least every minute
    (150, 0.1, 40, [40, 80, 100, 120, 150]),
    (150, 100.0, 40, [40, 80, 100, 120, 150]),
  ],
)
def test_a_terminal_keeps_some_lines_above_the_bar(monkeypatch, last, seconds, interval, steps):
  assert lines_of_a_terminal(monkeypatch, last, seconds, interval) == steps


PROGRAM = """
import sys, time
from maxtext_like.training.loop.progress import Progress
row = dict(loss=2.5, grad_norm=1.0, tokens=10, tokens_per_second=1234.5, step_seconds=0.25)
with Progress(50, None, sys.stdout) as progress:
  with progress.waiting("opening the data"):
    time.sleep(0.5)
  with progress.waiting("compiling the train step", "compile the train step is being compiled"):
    time.sleep(1.5)
  progress.say("start   from step 0")
  progress.begin(0)
  for step in range(1, 51):
    progress.step({"step": step, **row})
  progress.say("finished " + "x" * 200)
"""


def shown_by_a_terminal(raw: str) -> list[str]:
  """Return the lines that a terminal shows at the end. Handles text, line breaks and the few control sequences that rich
  uses."""
  rows, row = [""], 0
  for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", raw):
    if part == "\n":
      row += 1
      rows += [""] * (row + 1 - len(rows))
    elif part.endswith("A") and part.startswith("\x1b["):
      row -= int(part[2:-1] or 1)
    elif part == "\x1b[2K":
      rows[row] = ""
    elif not part.startswith("\x1b") and part != "\r":
      rows[row] += part
  return [line.rstrip() for line in rows if line.strip()]


def test_a_real_terminal_shows_a_spinner_then_a_bar_and_keeps_the_lines():
  descriptor, terminal = pty.openpty()
  environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120"}
  process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
  os.close(terminal)
  raw = b""
  try:
    while piece := os.read(descriptor, 65536):
      raw += piece
  except OSError:  # Linux raises it when the other end of the terminal is closed
    pass
  os.close(descriptor)
  assert process.wait() == 0, raw
  text = raw.decode()
  plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
  assert re.search(r"[⠀-⣿] opening the data 0:00:00", plain)
  assert re.search(r"[⠀-⣿] compiling the train step 0:00:01", plain)
  assert plain.index("compile the train step is being compiled") < plain.index(" compiling the train step 0:00:00")
  assert "\x1b[?25l" not in text  # the cursor is never hidden, so it is visible after the process is killed
  *lines, bar = shown_by_a_terminal(text)
  assert lines[:2] == ["compile the train step is being compiled", "start   from step 0"]
  assert [line.split()[1] for line in lines[2:-1]] == ["1", *map(str, range(2, 51, 2))]
  assert lines[-1] == "finished " + "x" * 200  # a long line is not wrapped
  assert bar.startswith("step 50/50")


def test_a_terminal_that_cannot_move_its_cursor_gets_lines():
  code = PROGRAM.replace("sys.stdout) as", "Terminal()) as").replace("import sys, time", "import sys, time, io")
  code = code.replace("row = ", "class Terminal(io.TextIOWrapper):\n  def __init__(self): super().__init__(sys.stdout.buffer)\n"
                      "  def isatty(self): return True\nrow = ")  # fmt: skip
  environment = os.environ | {"TERM": "dumb"}
  out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
  assert "\x1b" not in out
  assert out.count("\nstep ") == 50


def test_a_notebook_has_one_line_that_changes_and_keeps_some(monkeypatch):
  stream = io.StringIO()
  shell = types.SimpleNamespace(kernel=object())
  monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
  monkeypatch.setattr(sys, "stdout", stream)
  with Progress(150, None, sys.stdout) as progress:
    progress.begin(0)
    for step in range(1, 151):
      progress.step({"step": step, **ROW})
    progress.say("finished")
  shown = []
  for line in stream.getvalue().split("\n"):  # a browser continues at the start of the line after a carriage return
    text = ""
    for part in line.split("\r"):
      text = part + text[len(part) :]
    shown.append(text.rstrip())
  steps = [int(line.split()[1]) for line in shown if " of 150  loss" in line]
  assert steps == [1, 2, 5, *range(10, 151, 10)]
  assert shown[-2:] == ["finished", ""]
  assert len(stream.getvalue().split("\r")) < 60
  # Only the standard output of an IPython kernel is a notebook: IPython in a terminal has no kernel, and the other case is a
  # file.
  shell.kernel = None
  file = io.StringIO()
  for kernel, target in ((None, stream), (object(), file)):
    shell.kernel = kernel
    with Progress(3, None, target) as progress:
      progress.step({"step": 1, **ROW})
  assert "\r" not in file.getvalue()
