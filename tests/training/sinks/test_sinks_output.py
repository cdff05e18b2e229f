"""Outputs that neither wait nor raise, although the pipe, device or disk that they write to blocks or fails."""

import io
import os
import threading
import time

import pytest

from maxtext_like.training.sinks import output
from maxtext_like.training.sinks.output import Guarded, Output, guarded_output


@pytest.fixture
def told(monkeypatch):
  """The lines written to standard error."""
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
  os.write(stream.fileno(), b"a library writes by itself")  # goes to /dev/null


def test_a_reader_that_sleeps_holds_up_nobody_and_gets_all_when_it_wakes(pipe, monkeypatch):
  read, stream = pipe
  monkeypatch.setattr(output, "WAITING", 10_000)
  out = Output(stream)
  lines = [f"{i:0100}\n" for i in range(2000)]  # 200 KB; the pipe holds 64 KB
  for line in lines:  # nothing is read until all are written
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


def wait_until(condition, seconds=60.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "it never happened"
    time.sleep(0.002)


class Disk:
  """Stores items. ``free.clear()`` makes writes block, and ``error`` makes them fail."""

  def __init__(self):
    self.items, self.error = [], None
    self.free = threading.Event()
    self.free.set()

  def write(self, item):
    self.free.wait()
    if self.error is not None:
      raise self.error
    self.items.append(item)


@pytest.fixture
def place(monkeypatch):
  """(disk, guarded writer to it, reported lines). Failed writes are retried after 10 ms."""
  monkeypatch.setattr(output, "_FIRST_RETRY_SECONDS", 0.01)
  disk, told = Disk(), []
  return disk, Guarded("m.jsonl", disk.write, "row", told.append), told


def test_what_failed_is_written_later_in_order_and_told_once(place):
  disk, writer, told = place
  disk.error = OSError(28, "No space left on device")
  for i in range(5):
    writer.put(i)
  wait_until(lambda: told)
  time.sleep(0.05)  # more retries, which all fail
  assert disk.items == []
  disk.error = None
  wait_until(lambda: disk.items == [0, 1, 2, 3, 4])
  writer.close(10)
  (line,) = told
  assert line.startswith("m.jsonl: No space left on device; training ")
  assert writer.unwritten is None


def test_a_disk_that_never_comes_back_costs_items_and_says_how_many(place):
  disk, writer, _ = place
  disk.error = OSError(5, "Input/output error")
  for i in range(output.WAITING + 3):
    writer.put(i)
  writer.close(10)
  assert writer.unwritten == f"m.jsonl: {output.WAITING + 3} rows not written: Input/output error"
  writer.put(-1)
  assert f"{output.WAITING + 4} rows not written" in writer.unwritten


def test_a_write_that_never_returns_holds_up_nobody(place, monkeypatch):
  disk, writer, told = place
  monkeypatch.setattr(output, "_SLOW_SECONDS", 0.02)
  disk.free.clear()
  writer.put(0)
  writer.flush(0.05)
  begin = time.monotonic()
  writer.flush(60)  # returns at once, because an earlier flush timed out
  assert time.monotonic() - begin < 30
  writer.put(1)
  (line,) = told
  assert line.startswith("m.jsonl: a write has not returned for 0 s; training ")
  writer.close(0.05)
  assert writer.unwritten.startswith("m.jsonl: 2 rows not written: ")
  disk.free.set()


def test_the_oldest_go_when_too_many_wait_and_a_key_takes_the_place_of_its_own(place):
  disk, writer, _ = place
  disk.free.clear()
  for i in range(output.WAITING + 2):
    writer.put(i)
  disk.free.set()
  writer.flush(10)
  assert disk.items == [0, *range(3, output.WAITING + 2)]
  assert writer.unwritten == "m.jsonl: 2 rows not written: too many at once"
  disk.free.clear()
  disk.items.clear()
  for i in range(4):
    writer.put(i, key="a")
  disk.free.set()
  writer.close(10)
  assert disk.items[-1] == 3
  assert len(disk.items) <= 2  # the one being written, and the newest


def test_a_fault_of_ours_costs_its_item_alone(place):
  disk, writer, told = place
  disk.error = TypeError("no JSON")
  writer.put(0)
  wait_until(lambda: told)
  disk.error = None
  writer.put(1)
  writer.close(10)
  assert disk.items == [1]
  assert writer.unwritten == "m.jsonl: 1 row not written: TypeError: no JSON"
