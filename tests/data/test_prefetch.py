"""The prefetch thread: order, errors at their place, reported stalls, clean ends."""

import itertools
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from maxtext_like.data.prefetch import DEPTH, Prefetch
from maxtext_like.errors import RetryableError

ROOT = Path(__file__).parents[2]


def test_items_come_in_order_and_not_far_ahead():
  made = itertools.count()
  prefetch = Prefetch(lambda: (next(made), None), warn_seconds=5, limit_seconds=10)
  assert [prefetch.get()[0] for _ in range(20)] == list(range(20))
  assert prefetch.stop()
  assert next(made) <= 20 + DEPTH + 2


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt(), SystemExit(7)])
def test_an_error_comes_in_its_place_and_again(error):
  made = iter([1, 2])

  def produce():
    for item in made:
      return item, None
    raise error

  prefetch = Prefetch(produce, warn_seconds=5, limit_seconds=10)
  assert [prefetch.get()[0], prefetch.get()[0]] == [1, 2]
  for _ in range(2):
    with pytest.raises(type(error)):
      prefetch.get()
  assert prefetch.stop()


def test_a_stalled_source_warns_and_then_fails(caplog):
  release = threading.Event()

  def read_from_a_dead_disk():
    release.wait(20)
    return 1, None

  prefetch = Prefetch(read_from_a_dead_disk, warn_seconds=0.3, limit_seconds=1.2)
  with caplog.at_level(logging.WARNING), pytest.raises(RetryableError, match="read_from_a_dead_disk"):
    prefetch.get()
  assert "no batch for" in caplog.text
  assert "read_from_a_dead_disk" in caplog.text
  assert not prefetch.stop(0.1), "the thread hangs, and stop says so"
  assert threading.current_thread() is threading.main_thread()
  release.set()
  assert prefetch.stop()


def test_what_is_raised_in_the_wait_ends_it_and_the_item_comes_next_time():
  asked, release = [TimeoutError()], threading.Event()
  items = iter("ab")

  def produce():
    release.wait(20)
    return next(items), None

  def waiting():
    if asked:
      raise asked.pop()
    release.set()

  prefetch = Prefetch(produce, warn_seconds=20, limit_seconds=20, waiting=waiting)
  with pytest.raises(TimeoutError):
    prefetch.get()
  assert [prefetch.get()[0], prefetch.get()[0]] == ["a", "b"]
  assert prefetch.stop()


@pytest.mark.parametrize("seconds", ["0", "60"])
def test_the_process_ends_with_the_thread_at_work_or_hanging(seconds):
  """stop() is never called: a trainer that ends with an exception must neither hang nor crash."""
  program = (
    "import sys, time; from maxtext_like.data.prefetch import Prefetch\n"
    f"prefetch = Prefetch(lambda: (time.sleep({seconds}), 1), warn_seconds=9, limit_seconds=9); sys.exit(42)"
  )
  done = subprocess.run([sys.executable, "-c", program], timeout=50, capture_output=True, text=True, cwd=ROOT)
  assert (done.returncode, done.stdout, done.stderr) == (42, "", "")
