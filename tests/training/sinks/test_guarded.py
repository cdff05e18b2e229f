"""A place that is written to on a thread: faults cost items at most, never a wait or an exception."""

import threading
import time

import pytest

from maxtext_like.training.sinks import guarded
from maxtext_like.training.sinks.guarded import Guarded


def wait_until(condition, seconds=60.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "it never happened"
    time.sleep(0.002)


class Disk:
  """Takes items, while it is told to."""

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
  """(disk, guarded place, told lines), tried again every 10 ms."""
  monkeypatch.setattr(guarded, "_FIRST_RETRY_SECONDS", 0.01)
  disk, told = Disk(), []
  return disk, Guarded("m.jsonl", disk.write, "row", told.append), told


def test_what_failed_is_written_later_in_order_and_told_once(place):
  disk, writer, told = place
  disk.error = OSError(28, "No space left on device")
  for i in range(5):
    writer.put(i)
  wait_until(lambda: told)
  time.sleep(0.05)  # more tries, all in vain
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
  for i in range(guarded.WAITING + 3):
    writer.put(i)
  writer.close(10)
  assert writer.unwritten == f"m.jsonl: {guarded.WAITING + 3} rows not written: Input/output error"
  writer.put(-1)
  assert f"{guarded.WAITING + 4} rows not written" in writer.unwritten


def test_a_write_that_never_returns_holds_up_nobody(place, monkeypatch):
  disk, writer, told = place
  monkeypatch.setattr(guarded, "_SLOW_SECONDS", 0.02)
  disk.free.clear()
  writer.put(0)
  writer.flush(0.05)
  begin = time.monotonic()
  writer.flush(60)  # it was waited for once
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
  for i in range(guarded.WAITING + 2):
    writer.put(i)
  disk.free.set()
  writer.flush(10)
  assert disk.items == [0, *range(3, guarded.WAITING + 2)]
  assert writer.unwritten == "m.jsonl: 2 rows not written: too many at once"
  disk.free.clear()
  disk.items.clear()
  for i in range(4):
    writer.put(i, key="a")
  disk.free.set()
  writer.close(10)
  assert disk.items[-1] == 3
  assert len(disk.items) <= 2  # the one under way, and the newest


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
