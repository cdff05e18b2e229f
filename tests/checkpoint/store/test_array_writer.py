"""A failed save prints one line, and not the calls of TensorStore into the event loop that orbax has closed."""

import asyncio
import sys
import threading

import tensorstore

from maxtext_like.checkpoint.store.array_writer import without_calls_into_closed_loops


def test_calls_of_tensorstore_into_a_closed_loop_are_not_printed(monkeypatch):
  seen, passed = [], []
  hook = without_calls_into_closed_loops(lambda unraisable: passed.append(unraisable.exc_value))

  def recording(unraisable):
    seen.append(str(unraisable.exc_value))
    hook(unraisable)

  monkeypatch.setattr(sys, "unraisablehook", recording)
  promise, future = tensorstore.Promise.new()
  waiting = []

  async def write():
    await future

  async def save():
    waiting.append(asyncio.ensure_future(write()))
    await asyncio.sleep(0)

  loop = asyncio.new_event_loop()
  loop.run_until_complete(save())
  loop.close()
  thread = threading.Thread(target=promise.set_result, args=(1,))
  thread.start()
  thread.join()
  assert seen == ["Event loop is closed"]
  assert passed == []


class Fails:
  def __init__(self, error):
    self.error = error

  def __del__(self):
    raise self.error


def test_other_exceptions_that_cannot_be_raised_are_passed_on(monkeypatch):
  """The same words from Python's own code too."""
  passed = []
  monkeypatch.setattr(sys, "unraisablehook", without_calls_into_closed_loops(lambda u: passed.append(str(u.exc_value))))
  for error in (ValueError("broken"), RuntimeError("Event loop is closed")):
    failing = Fails(error)
    del failing
  assert passed == ["broken", "Event loop is closed"]
