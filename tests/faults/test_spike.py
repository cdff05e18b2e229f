"""Poisoned documents cause a loss spike: the run rolls back and skips them, also after a kill or a stop."""

import json
import random
import signal

import pytest
from conftest import TrainRuns, assert_bitwise_equal

POISONED = range(30, 33)
KEYS = {
  "shuffle": "false", "eval_fraction": 0, "learning_rate": 1e-2, "steps": 70, "checkpoint_interval": 10,
  "lr_schedule_steps": 70, "spike_factor": 1.25, "spike_window": 3, "max_to_keep": 9,
}  # fmt: skip


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory, environment, server, shared):
  """An uninterrupted run over the poisoned documents, and its log."""
  words, folder = random.Random(0), tmp_path_factory.mktemp("documents")
  for number in range(130):
    text = " ".join(words.choice(("kill", "save", "step", "byte", "hash", "lock")) for _ in range(60))
    if number in POISONED:
      text = "".join(chr(words.randint(0x4E00, 0x9FFF)) for _ in range(100))
    (folder / f"{number:03}.txt").write_text(text, "utf-8")
  runs = TrainRuns(tmp_path_factory.mktemp("spike"), environment, server, *shared)
  runs.keys |= {**KEYS, "dataset_path": f"{folder}/*.txt"}
  code, text = runs.run("whole")
  assert code == 0, text
  return runs, text


def rows(runs, name, file="metrics.jsonl"):
  return [json.loads(line) for line in (runs.output_dir / name / file).read_text().splitlines()]


def test_the_run_goes_back_past_the_documents(poisoned):
  runs, text = poisoned
  found = json.loads((runs.output_dir / "whole" / "spikes.json").read_text())
  assert found
  assert all(spike["back_to"] == found[0]["back_to"] for spike in found)
  assert text.count("Rolled back to step ") == len(found)
  first, last = found[0]["documents"][0], found[-1]["documents"][1]
  assert first <= POISONED[0]
  assert last >= POISONED[-1]
  assert [row["step"] for row in rows(runs, "whole")] == list(range(1, 71))
  assert [row["spike_rollbacks"] for row in rows(runs, "whole")][-1] == len(found)
  dropped = rows(runs, "whole", "metrics.dropped.jsonl")
  assert [row["loss"] for row in dropped if row["loss"] > 1.25 * found[0]["median"]]
  kept = [row["loss"] for row in rows(runs, "whole") if row["step"] > found[0]["back_to"]]
  assert max(kept) < 1.25 * found[0]["median"]


@pytest.mark.slow
def test_killed_after_going_back_it_ends_as_the_one_that_was_not(poisoned):
  runs, _ = poisoned
  process = runs.start("killed")
  runs.wait_for(r"Rolled back to step \d+.*\n(.*\n)*step +\d+ of 70", process)
  process.kill()
  assert process.wait() == -signal.SIGKILL
  code, text = runs.run("killed")
  assert code == 0, text
  assert_bitwise_equal(runs.state("killed", 70), runs.state("whole", 70))
  one, other = (json.loads((runs.output_dir / name / "spikes.json").read_text()) for name in ("killed", "whole"))
  assert one == other
  assert [row["loss"] for row in rows(runs, "killed")] == [row["loss"] for row in rows(runs, "whole")]


@pytest.mark.slow
def test_a_checkpoint_that_a_stop_left_before_the_spike_counts_no_more(poisoned):
  """A rollback to an earlier step abandons the checkpoint that a stop left after that step.

  The run ends bitwise equal to the one that was not stopped.
  """
  runs, _ = poisoned
  spike = json.loads((runs.output_dir / "whole" / "spikes.json").read_text())[0]
  last = spike["step"] - 1
  assert last > spike["back_to"]
  assert last % 10
  code, text = runs.run("stopped", steps=last)
  assert code == 0, text
  assert runs.complete("stopped")[-1] == last
  code, text = runs.run("stopped")
  assert code == 0, text
  assert f"/{last}: the run went back to step {spike['back_to']}" in text
  assert f"{last}.abandoned" in text
  assert last not in runs.complete("stopped")
  assert_bitwise_equal(runs.state("stopped", 70), runs.state("whole", 70))


@pytest.mark.slow
def test_what_does_not_help_ends_with_exit_code_3_and_the_checkpoint(poisoned):
  runs, _ = poisoned
  code, text = runs.run("endless", max_spike_rollbacks=1, spike_factor=1.02)
  assert code == 3, text
  assert "was already rolled back to step" in text
  assert "max_spike_rollbacks=1" in text
  assert runs.complete("endless")
