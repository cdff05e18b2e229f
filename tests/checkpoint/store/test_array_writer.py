"""A save is divided into data files of a size that uses all cores. A failed save does not print TensorStore's calls into the
event loop that orbax has closed."""

import asyncio
import gc
import logging
import sys
import threading

import jax
import numpy as np
import pytest
import tensorstore

from maxtext_like.checkpoint.store import array_writer, stored_state
from maxtext_like.checkpoint.store.array_writer import ArrayWriter, drop_unread, without_calls_into_closed_loops


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


@pytest.mark.parametrize(("file", "printed"), [("orbax/checkpoint/x.py", 0), ("other/x.py", 1)])
def test_failed_writes_that_orbax_does_not_read_are_not_printed(file, printed, caplog):
  source = compile("async def write():\n  raise ValueError('NOT_FOUND')", f"/site-packages/{file}", "exec")
  names = {}
  exec(source, names)  # the message contains the coroutine's file

  async def save():
    task = asyncio.ensure_future(names["write"]())
    del task
    await asyncio.sleep(0)

  logging.getLogger("asyncio").addFilter(drop_unread)
  try:
    asyncio.run(save())
    gc.collect()
  finally:
    logging.getLogger("asyncio").removeFilter(drop_unread)
  assert sum("never retrieved" in entry.getMessage() for entry in caplog.records) == printed


class Fails:
  def __init__(self, error):
    self.error = error

  def __del__(self):
    raise self.error


def test_other_exceptions_that_cannot_be_raised_are_passed_on(monkeypatch):
  """The same message is passed on too if it does not come from TensorStore."""
  passed = []
  monkeypatch.setattr(sys, "unraisablehook", without_calls_into_closed_loops(lambda u: passed.append(str(u.exc_value))))
  for error in (ValueError("broken"), RuntimeError("Event loop is closed")):
    failing = Fails(error)
    del failing
  assert passed == ["broken", "Event loop is closed"]


def test_a_state_is_divided_into_data_files_which_split_large_arrays(tmp_path, monkeypatch):
  rng = np.random.default_rng(0)
  flat = {
    name: jax.device_put(rng.integers(0, 99, shape).astype(np.int32))
    for name, shape in {"a": (3, 40, 1 << 10), "b": (60 << 10,), "c": (130, 1 << 10)}.items()
  }
  whole = sum(x.nbytes for x in flat.values())
  counts = {}
  for files in (1, 8):
    monkeypatch.setattr(array_writer, "_FILES", files)
    monkeypatch.setattr(array_writer, "_LEAST_BYTES", 1 << 12)
    assert array_writer.file_bytes(flat) == whole // files
    writer = ArrayWriter(60.0)
    writer.save(tmp_path / str(files), flat, files)
    writer.wait_until_finished()
    writer.close()
    sizes = [path.stat().st_size for path in (tmp_path / str(files)).rglob("d/*")]
    counts[files] = sum(size > whole // 20 for size in sizes)
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in flat.items()}
    read = stored_state._read_orbax(tmp_path / str(files), like, whole=True)
    for name, array in flat.items():
      np.testing.assert_array_equal(read[name], array)
  assert counts[8] > counts[1]
