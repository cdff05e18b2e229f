"""``train.py`` with lost, moved or discarded checkpoints and with changed settings: it resumes, or says why it cannot."""

import json
import shutil
import signal
import time

import pytest
from conftest import TrainRuns

from tests.tiers import slow

SHORT = {"steps": 20, "checkpoint_interval": 10}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, environment, server, shared):
  """A run with checkpoints at steps 10 and 20."""
  runs = TrainRuns(tmp_path_factory.mktemp("saved"), environment, server, *shared)
  code, text = runs.run("a", **SHORT)
  assert code == 0, text
  return runs


@pytest.fixture
def a(train, saved):
  """The directory of a copy of the run with checkpoints at steps 10 and 20."""
  shutil.copytree(saved.output_dir / "a", train.output_dir / "a")
  return train.output_dir / "a"


def files(directory):
  """Returns the content of every file by its relative path."""
  return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def steps_in(path):
  return [json.loads(line)["step"] for line in path.read_text().splitlines()]


LOSSES = {
  "manifests deleted": lambda run: [path.unlink() for path in run.glob("checkpoints/*/COMPLETE.json")],
  "not mounted": lambda run: shutil.rmtree(run / "checkpoints"),
  "empty": lambda run: [shutil.rmtree(path) for path in (run / "checkpoints").iterdir()],
  "a dead link": lambda run: (shutil.rmtree(run / "checkpoints"), (run / "checkpoints").symlink_to("/nowhere/checkpoints")),
  "an earlier version's": lambda run: ((run / "newest_checkpoint.json").unlink(), shutil.rmtree(run / "checkpoints")),
}


RARE = ("empty", "an earlier version's")


@pytest.mark.parametrize(
  "lose", [pytest.param(lose, id=name, marks=[pytest.mark.slow] * (name in RARE)) for name, lose in LOSSES.items()]
)
def test_lost_checkpoints_are_no_fresh_start(train, a, lose):
  lose(a)
  before = files(a)
  code, text = train.run("a", **SHORT)
  assert code == 2, text
  assert "the checkpoints of this run are missing" in text
  assert "metrics.jsonl: contains step 20" in text
  assert "resume=false" in text
  assert files(a) == before


@pytest.mark.slow
def test_who_says_so_starts_afresh_and_keeps_what_was(train, a):
  [path.unlink() for path in a.glob("checkpoints/*/COMPLETE.json")]
  arrays = sum(len(content) for content in files(a / "checkpoints").values())
  code, text = train.run("a", **{**SHORT, "steps": 4}, resume="false")
  assert code == 0, text
  assert train.complete("a") == [4]
  assert steps_in(a / "metrics.jsonl") == [1, 2, 3, 4]
  assert steps_in(a / "metrics.dropped.jsonl") == list(range(1, 21))
  assert "metrics.jsonl: steps 1 to 20 will be trained again" in text
  kept = sum(len(c) for path, c in files(a / "checkpoints").items() if path.parts[0].startswith(("10.", "20.")))
  assert kept == arrays
  assert "steps: 20  #" in (a / "config.1.yml").read_text()
  assert "steps: 4  #" in (a / "config.yml").read_text()


@pytest.mark.slow  # test_lost_directory.py also kills a run before its first checkpoint
def test_a_run_that_dies_before_its_first_checkpoint_starts_again(train, saved):
  process = train.start("b", **{**SHORT, "steps": 100_000, "checkpoint_interval": 100_000})
  metrics = train.output_dir / "b/metrics.jsonl"
  while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
    assert process.poll() is None, train.log.read_text()
    time.sleep(0.02)
  process.kill()
  assert process.wait() == -signal.SIGKILL
  code, text = train.run("b", **SHORT)
  assert code == 0, text
  assert "from step 0" in text
  assert train.losses("b") == saved.losses("a")
  dropped = (train.output_dir / "b/metrics.dropped.jsonl").read_text().splitlines()
  assert [json.loads(row)["step"] for row in dropped[:3]] == [1, 2, 3]


@pytest.mark.slow
def test_going_on_with_other_values_from_steps_behind_links(train, a):
  """A run with other settings resumes from checkpoints behind symbolic links. Each changed setting is logged.

  Rows of later steps and the previous configuration are kept in separate files.
  """
  elsewhere = train.output_dir / "other disk"
  elsewhere.mkdir()
  for step in (10, 20):
    (a / f"checkpoints/{step}").rename(elsewhere / str(step))
    (a / f"checkpoints/{step}").symlink_to(elsewhere / str(step))
  with (a / "metrics.jsonl").open("a") as file:
    file.write('{"step": 21, "loss": 1.0}\n{"step": 22, "lo')
  other = {"steps": 21, "learning_rate": 1e-4, "adam_b1": 0.8, "per_device_batch_size": 4, "gradient_accumulation_steps": 3}
  code, text = train.run("a", **{**SHORT, **other}, init_from=elsewhere / "10")
  assert code == 0, text
  for line in (
    "changed steps: was 20, is 21",
    "changed learning_rate: was 0.003, is 0.0001",
    "changed adam_b1: was 0.9, is 0.8",
    "changed per_device_batch_size: was 8, is 4",
    "changed gradient_accumulation_steps: was 1, is 3",
    "changed global batch size: was 8 rows, is 12 rows",
    "note    the learning rate of step 21 is ",
    f"note    init_from={elsewhere}/10 is ignored",
    f"start   from step 20 in {a}/checkpoints",
    "metrics.jsonl: 1 damaged line moved to metrics.dropped.jsonl",
  ):
    assert line in text, text
  assert steps_in(a / "metrics.jsonl") == list(range(1, 22))
  assert (a / "metrics.dropped.jsonl").read_text() == '{"step": 21, "loss": 1.0}\n{"step": 22, "lo\n'
  assert "learning_rate: 0.003" in (a / "config.1.yml").read_text()
  assert not (a / "config.2.yml").exists()


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({"enable_checkpointing": "false"}, "enable_checkpointing=false would start again at step 0"),
    ({"resume": "false"}, "resume=false would mix its checkpoints"),
    ({"init_from": "/nowhere"}, "init_from: /nowhere does not exist"),
    ({"data_shuffle_seed": 5}, "data_shuffle_seed: was 0, is 5"),
    slow({"opt_type": "lion"}, 'training.opt_type: checkpoint "adamw", this run "lion"'),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_go_on_is_refused(train, saved, keys, said):
  train.output_dir = saved.output_dir
  train.log = None
  before = (saved.output_dir / "a/metrics.jsonl").read_bytes()
  code, text = train.run("a", **{**SHORT, "steps": 30, **keys})
  assert code == 2, text
  assert said in text
  assert "Traceback" not in text
  assert (saved.output_dir / "a/metrics.jsonl").read_bytes() == before
  assert not (saved.output_dir / "a/config.1.yml").exists()
