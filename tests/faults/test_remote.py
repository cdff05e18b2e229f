"""Real runs whose directory is in an emulated gs://: killed in the middle of a save, and with a store that fails meanwhile."""

import json
import os
import subprocess
import sys
import time

import pytest

from tests.faults.conftest import MODEL, ROOT, TINY
from tests.gcs_emulator import emulator

pytestmark = pytest.mark.slow


@pytest.fixture
def train(tmp_path):
  """Starts ``train.py`` on a run of a name in gs://bucket/faults; on another machine each time, as far as it knows."""
  store, started = emulator(), []

  def start(name, **keys):
    place = tmp_path / str(len(started))
    words = {**TINY, "dataset_path": ROOT / "README.md", "output_dir": "gs://bucket/faults", "run_name": name} | keys
    words["compilation_cache_dir"] = tmp_path / "compiled"
    command = [sys.executable, str(ROOT / "train.py"), str(ROOT / MODEL), *(f"{key}={value}" for key, value in words.items())]
    environment = {**os.environ, **store.environment, "MAXTEXT_LIKE_COPIES": str(place / "copies"), "PYTHONPATH": str(ROOT)}
    started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return started[-1]

  yield start
  store.fault = None
  for process in started:
    process.kill()
    process.communicate()


def losses(name):
  rows = map(json.loads, emulator().read(f"faults/{name}/metrics.jsonl").splitlines())
  return [(row["step"], row["loss"]) for row in rows]


def ends(process, code):
  output = process.communicate(timeout=300)[0]
  assert process.returncode == code, output
  return output


def test_killed_in_the_middle_of_a_save_it_goes_on_as_if_nothing_was(train):
  store = emulator()
  ends(train("whole", steps=40), 0)
  killed = train("killed", steps=40)
  kill_at = []

  def kill(method, path, query):
    if not kill_at and method == "POST" and "killed/checkpoints/20/" in query.get("name", "") and "/d/" in query["name"]:
      kill_at.append(query["name"])
      killed.kill()  # while an array of step 20 is under way

  with store.failing(kill):
    killed.communicate(timeout=300)
  assert kill_at
  assert not [name for name in store.names("faults/killed/checkpoints/20/") if name.endswith("COMPLETE.json")]
  output = ends(train("killed", steps=40), 0)
  assert "from step 10 in gs://bucket/faults/killed/checkpoints" in output
  assert "20: what an interrupted save or removal left is removed" in output
  assert losses("killed") == losses("whole")


def test_a_store_that_fails_while_it_trains_costs_no_step(train):
  """For a while every request fails, or is not answered; the run trains on, saves again, and has lost nothing."""
  store = emulator()
  ends(train("calm", steps=40), 0)
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
  assert len(count) > 3
  assert losses("storm") == losses("calm")
  assert [n for n in store.names("faults/storm/checkpoints/40/") if n.endswith("COMPLETE.json")]
