"""Faults of the data that a run reads, against ``train.py`` itself."""

import json
import re

import pytest

FLAT = {"lr_schedule_type": "constant", "warmup_steps_fraction": 0.0}  # the same at every number of steps
ENDLESS = {**FLAT, "steps": 100_000, "checkpoint_interval": 100_000}


@pytest.fixture
def records(tmp_path):
  """A jsonl file of 400 short records."""
  path = tmp_path / "data" / "records.jsonl"
  path.parent.mkdir()
  path.write_text("".join(json.dumps({"text": f"record {i} " + "and more of it " * (i % 7)}) + "\n" for i in range(400)))
  return path


def test_a_file_that_goes_under_the_run_costs_no_step(train, records):
  """Exit 2 with the finished steps saved; with the file back the run goes on after them, to the same losses."""
  keys = {"dataset": "jsonl", "dataset_path": records}
  process = train.start("a", **keys, **ENDLESS)
  train.wait_for(r"step +3 of", process)
  away = records.rename(records.with_suffix(".away"))
  assert process.wait() == 2, train.log.read_text()
  text = train.log.read_text()
  assert f"error: {records}: No such file or directory (it was there when the run started)" in text
  assert "Traceback" not in text
  (step,) = train.complete("a")
  assert f"saved   step {step} in {train.checkpoints('a')}/{step}" in text
  assert train.losses("a").keys() == set(range(1, step + 1))
  away.rename(records)
  code, text = train.run("a", **keys, **FLAT, steps=step + 4)
  assert code == 0, text
  assert re.search(rf"from step {step} in ", text)
  code, text = train.run("b", **keys, **FLAT, steps=step + 4)
  assert code == 0, text
  assert train.losses("a") == train.losses("b")
