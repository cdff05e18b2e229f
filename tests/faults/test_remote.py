"""Runs of ``train.py`` in an emulated gs:// or s3:// store: killed during a save, and with requests that fail."""

import json
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.faults.conftest import MODEL, ROOT, TINY
from tests.s3_emulator import store_of

pytestmark = pytest.mark.slow


@pytest.fixture
def protocol(request):
  """The protocol of the store, "gs" or "s3", which each test sets."""
  return request.param


@pytest.fixture
def store(protocol):
  """The emulated store."""
  return store_of(protocol)


def command(**keys):
  """Returns the command that trains a tiny model on the README."""
  words = {**TINY, "dataset_path": ROOT / "README.md"} | keys
  return [sys.executable, str(ROOT / "train.py"), str(ROOT / MODEL), *(f"{key}={value}" for key, value in words.items())]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """(step, loss) of an undisturbed run of 40 steps in a local directory."""
  place = tmp_path_factory.mktemp("whole")
  line = command(output_dir=place, run_name="run", steps=40, compilation_cache_dir=place / "compiled")
  subprocess.run(line, cwd=ROOT, check=True, timeout=300)
  return of_rows((place / "run" / "metrics.jsonl").read_text())


@pytest.fixture
def train(tmp_path, tmp_path_factory, protocol, store):
  """Starts ``train.py`` with a run in PROTOCOL://bucket/faults. Each start has empty local copies, as on a new machine."""
  started, compiled = [], tmp_path_factory.getbasetemp() / "compiled"

  def start(name, variables=None, fault=None, **keys):
    place = tmp_path / str(len(started))
    line = command(output_dir=f"{protocol}://bucket/faults", run_name=name, compilation_cache_dir=compiled, **keys)
    environment = {**os.environ, **store.environment, "MAXTEXT_LIKE_COPIES": str(place / "copies"), "PYTHONPATH": str(ROOT)}
    environment |= variables or {}
    if fault is not None:
      line[1:1] = ["-c", fault]
    started.append(subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return started[-1]

  yield start
  store.fault = None
  for process in started:
    process.kill()
    process.communicate()


def of_rows(text):
  return [(row["step"], row["loss"]) for row in map(json.loads, text.splitlines())]


def losses(store, name):
  return of_rows(store.read(f"faults/{name}/metrics.jsonl"))


def ends(process, code):
  output = process.communicate(timeout=300)[0]
  assert process.returncode == code, output
  return output


@pytest.mark.parametrize("protocol", ["gs"], indirect=True)  # s3: below; single requests to both: tests/checkpoint/store
def test_killed_in_the_middle_of_a_save_it_goes_on_as_if_nothing_was(train, whole, protocol, store):
  killed = train("killed", steps=40)
  kill_at = []

  def kill(method, path, query):
    name = re.search(r"killed/checkpoints/(\d+)/.*/[dc]/", query.get("name", ""))
    # The run needs the checkpoint of step 10 to resume from, so the kill comes during a later one. On a busy machine step 10
    # is still being saved at step 20, which then has no checkpoint; the next one is that of step 30 or the final one.
    if not kill_at and name is not None and name[1] != "10":
      kill_at.append(name[1])
      killed.kill()  # while an array is being uploaded

  with store.failing(kill):
    said = killed.communicate(timeout=300)[0]
  assert kill_at, said
  assert not [name for name in store.names(f"faults/killed/checkpoints/{kill_at[0]}/") if name.endswith("COMPLETE.json")]
  output = ends(train("killed", steps=40), 0)
  assert f"from step 10 in {protocol}://bucket/faults/killed/checkpoints" in output
  assert f"{kill_at[0]}: leftovers of an interrupted save" in output
  assert losses(store, "killed") == whole


@pytest.mark.parametrize("protocol", ["s3"], indirect=True)  # failing requests to both stores: tests/checkpoint/store
def test_a_store_that_fails_while_it_trains_costs_no_step(train, whole, store):
  """For 8 s every request fails or gets no answer. Training continues, later saves succeed and no row is lost."""
  count, until = [], []

  def storm(method, path, query):
    if not until and "checkpoints/10/COMPLETE.json" in query.get("name", ""):
      until.append(time.monotonic() + 8)
    if until and time.monotonic() < until[0]:
      count.append(path)
      return "503" if len(count) % 2 else "lost"
    return None

  with store.failing(storm):
    ends(train("storm", steps=40), 0)
  assert len(count) > 1  # both kinds of failure; the waits between retries decide how many more
  assert losses(store, "storm") == whole
  assert [n for n in store.names("faults/storm/checkpoints/40/") if n.endswith("COMPLETE.json")]


@pytest.mark.parametrize("protocol", ["s3"], indirect=True)  # other answers and gs://: tests/checkpoint/store
def test_expired_credentials_end_a_run_with_42_and_its_next_start_with_2(train, protocol, store):
  expired = []

  def refuse(method, path, query):
    if "checkpoints/10/COMPLETE.json" in query.get("name", ""):
      expired.append(path)
      return None
    return (400, "ExpiredToken", "The provided token has expired.") if expired else None

  with store.failing(refuse):
    lines = ends(train("expired", steps=40), 42).splitlines()
    again = ends(train("expired", steps=40), 2)
  said = [line for line in lines if "ExpiredToken" in line]
  assert len([line for line in said if line.startswith("error: ")]) == 1
  assert len(said) <= 2, said  # a warning of the first request that was refused, before the error
  assert re.fullmatch(
    r"error: s3://bucket/faults/expired/checkpoints/\d+: the checkpoint cannot be saved: .*; step 10 is kept", said[-1]
  )
  assert lines[-1].startswith("  fix: renew the credentials (aws sso login, ")
  assert not [line for line in lines if "tensorstore" in line or "cannot be removed" in line]
  assert "credentials refused or expired: ExpiredToken" in again
  assert "that may read and write this place" in again


# One of two processes runs this: its save of step 10 fails.
ONE_SAVE_FAILS = """
from maxtext_like.checkpoint.store.zarr_arrays import Writer
write, times = Writer._write, iter(range(100))
def fails(self, *part):
  if "/10/" in str(self._place) and next(times) == 2:
    raise OSError(28, "No space left on device")
  return write(self, *part)
Writer._write = fails
import sys, runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("protocol", ["s3"], indirect=True)  # a save that fails in orbax: test_processes.py
def test_two_processes_have_one_run_and_one_goes_on(train, whole, protocol, store):
  """Two processes share only the store, as on two machines. If the save of one fails, both give it up.

  One process then resumes the run from the next checkpoint.
  """
  with socket.create_server(("", 0)) as free:
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}", "JAX_NUM_PROCESSES": "2"}
  keys = {"steps": 20, "per_device_batch_size": 4}
  both = [train("pair", place | {"JAX_PROCESS_ID": str(n)}, ONE_SAVE_FAILS if n else None, **keys) for n in range(2)]
  said = [ends(process, 0) for process in both]
  assert all(f"process 1 (host {socket.gethostname()})" in text and "No space left on device" in text for text in said)
  published = {name.split("/")[3] for name in store.names("faults/pair/checkpoints/") if name.endswith("COMPLETE.json")}
  assert published == {"20"}
  output = ends(train("pair", steps=40), 0)
  assert f"from step 20 in {protocol}://bucket/faults/pair/checkpoints" in output
  assert [step for step, _ in losses(store, "pair")] == [*range(1, 41)]
  assert np.asarray(losses(store, "pair")) == pytest.approx(np.asarray(whole), abs=1e-5)
