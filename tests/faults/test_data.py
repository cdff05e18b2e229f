"""Faults in the training and evaluation data, tested with ``train.py``: missing, malformed and truncated files."""

import gzip
import json
import os
import re

import pytest

from tests.tiers import slow

ENDLESS = {"steps": 100_000, "checkpoint_interval": 100_000}


@pytest.fixture
def records(tmp_path):
  """A jsonl file of 400 short records."""
  path = tmp_path / "data" / "records.jsonl"
  path.parent.mkdir()
  path.write_text("".join(json.dumps({"text": f"record {i} " + "and more of it " * (i % 7)}) + "\n" for i in range(400)))
  return path


@pytest.mark.slow
def test_a_file_that_goes_under_the_run_costs_no_step(train, records):
  """If a data file disappears, the run saves the finished steps and exits with 2. With the file back, it resumes.

  The losses equal those of an uninterrupted run.
  """
  keys = {"dataset": "jsonl", "dataset_path": records}
  process = train.start("a", **keys, **ENDLESS)
  train.wait_for(r"step +3 of", process)
  away = records.rename(records.with_suffix(".away"))
  assert process.wait() == 2, train.log.read_text()
  text = train.log.read_text()
  assert f"error: {records}: No such file or directory (the file existed when the run started)" in text
  assert "Traceback" not in text
  (step,) = train.complete("a")
  assert f"saved   step {step} in {train.checkpoints('a')}/{step}" in text
  assert train.losses("a").keys() == set(range(1, step + 1))
  away.rename(records)
  code, text = train.run("a", **keys, steps=step + 4)
  assert code == 0, text
  assert re.search(rf"from step {step} in ", text)
  code, text = train.run("b", **keys, steps=step + 4)
  assert code == 0, text
  assert train.losses("a") == train.losses("b")


@pytest.mark.parametrize(
  "fault",
  ["bad records", "bomb", slow("image"), slow("fifo"), slow("tokenizer"), slow("cut off")],
)
def test_faults_that_end_a_run_before_it_begins(train, records, tmp_path, fault):
  """Bad records, FIFOs, gzip bombs and truncated archives end with exit code 2 before the run directory is created."""
  lines = records.read_text().splitlines(keepends=True)
  records.write_text("".join([*lines[:350], '{"text": 3}\n', *lines[351:], '{"text": "cut']))
  pictures = tmp_path / "data" / "pictures.jsonl"
  pictures.write_text('{"text": "a <image>", "images": ["fifo"]}\n')
  bomb, cut = tmp_path / "data" / "bomb.jsonl.gz", tmp_path / "data" / "cut.jsonl.gz"
  bomb.write_bytes(gzip.compress(bytes(10**7)) * 50)
  cut.write_bytes(gzip.compress(b"{}\n" * 10_000)[:-5])
  os.mkfifo(tmp_path / "data" / "fifo")
  tokenizer = tmp_path / "data" / "tokenizer"
  tokenizer.mkdir()
  (tokenizer / "tokenizer.json").write_text("{}")
  os.mkfifo(tokenizer / "tokenizer_config.json")
  keys, expected = {
    "bad records": (
      {"dataset_path": records},
      f"2 bad records among the 401 of data.dataset_path:\n  {records}:351: field 'text' is int",
    ),
    "image": (
      {"dataset_path": pictures, "use_multimodal": "true"},
      f"{pictures}:1: image {tmp_path}/data/fifo: a FIFO, not a regular",
    ),
    "fifo": ({"dataset_path": tmp_path / "data" / "fifo"}, "fifo is a FIFO, not a regular file"),
    "tokenizer": ({"dataset_path": records, "tokenizer": tokenizer / "tokenizer_config.json"}, "is not a regular file"),
    "bomb": ({"dataset_path": bomb}, f"{bomb}: {bomb.stat().st_size:,} bytes expand to "),
    "cut off": ({"dataset_path": cut}, f"{cut}: cut off: the file ends at byte {cut.stat().st_size}"),
  }[fault]
  code, text = train.run("a", dataset="jsonl", **keys)
  assert code == 2, text
  assert expected in text
  assert "Traceback" not in text
  assert not (train.output_dir / "a").exists()


@pytest.mark.slow
def test_files_to_evaluate_on_that_go_cost_no_step(train, records):
  """If the evaluation file disappears, the next evaluation fails. Its training step is in the metrics and in a checkpoint."""
  other = records.with_name("other.jsonl")
  other.write_bytes(records.read_bytes())
  keys = {"dataset": "jsonl", "dataset_path": records, "eval_path": other, "eval_interval": 20, "eval_steps": 2}
  process = train.start("a", **keys, **ENDLESS)
  train.wait_for(r"data    400 training documents, 400 evaluation documents .*eval_path", process)
  train.wait_for(r"step +20 of", process)
  other.unlink()
  assert process.wait() == 2, train.log.read_text()
  (step,) = train.complete("a")
  assert step % 20 == 0
  assert train.losses("a").keys() == set(range(1, step + 1))
  assert f"error: {other}: No such file or directory" in train.log.read_text()
