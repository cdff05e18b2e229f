"""Standard output that neither waits nor raises, on pipes and devices that do."""

import io
import os

import pytest

from maxtext_like.training.sinks import guarded, output
from maxtext_like.training.sinks.output import Output, guarded_output


@pytest.fixture
def told(monkeypatch):
  """What goes to standard error."""
  lines = []
  monkeypatch.setattr(output, "say_on_stderr", lines.append)
  return lines


@pytest.fixture
def pipe():
  """(reading end, stream over the writing end)."""
  read, write = os.pipe()
  with os.fdopen(write, "w") as stream:
    yield read, stream


def test_lines_come_whole_and_in_order(pipe):
  read, stream = pipe
  out = Output(stream)
  print("a", 1, file=out)
  out.write("be")
  out.write("gun\nand not")
  out.flush()
  out.write(" ended")
  out.close()
  assert os.read(read, 100) == b"a 1\nbegun\nand not ended"
  assert out.unwritten is None
  os.close(read)


def test_a_reader_that_left_costs_lines_and_nothing_else(pipe, told):
  read, stream = pipe
  os.close(read)
  out = Output(stream)
  for i in range(5):
    print(i, file=out)
  out.close()
  first, last = told
  assert first.startswith("standard output: Broken pipe; training ")
  assert last == "standard output: 5 lines not written: Broken pipe"
  os.write(stream.fileno(), b"a library writes by itself")  # into /dev/null


def test_a_reader_that_sleeps_holds_up_nobody_and_gets_all_when_it_wakes(pipe, monkeypatch):
  read, stream = pipe
  monkeypatch.setattr(guarded, "WAITING", 10_000)
  out = Output(stream)
  lines = [f"{i:0100}\n" for i in range(2000)]  # 200 KB; the pipe takes 64
  for line in lines:  # nobody reads until all were taken
    out.write(line)
  got = b""
  while len(got) < 2000 * 101:
    got += os.read(read, 65536)
  assert got.decode() == "".join(lines)
  out.close()
  os.close(read)


def test_a_full_disk_is_tried_again_and_told_at_the_end(told):
  with open("/dev/full", "w") as stream:
    out = Output(stream)
    for i in range(3):
      print(i, file=out)
    out.close()
  assert told[-1] == "standard output: 3 lines not written: No space left on device"


def test_a_stream_without_a_file_and_letters_that_an_encoding_lacks(tmp_path):
  stream = io.StringIO()
  out = Output(stream)
  print("ä", file=out)
  out.close()
  assert stream.getvalue() == "ä\n"
  with open(tmp_path / "a", "w", encoding="ascii") as file:
    out = Output(file)
    print("ä", file=out)
    out.close()
  assert (tmp_path / "a").read_text() == "\\xe4\n"


def test_sys_stdout_is_back_and_whole_after_it(capsys):
  with guarded_output():
    print("inside")
  print("after")
  assert capsys.readouterr().out == "inside\nafter\n"
