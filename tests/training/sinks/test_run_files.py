"""metrics.jsonl, samples.jsonl, events and other files of a run."""

import json
import threading
import time

import pytest

from maxtext_like.errors import UserError
from maxtext_like.training.sinks import output
from maxtext_like.training.sinks.appended import AppendedFile
from maxtext_like.training.sinks.metrics import keep_until, read
from maxtext_like.training.sinks.run_files import RunFiles


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_is_on_the_disk_and_json_has_no_nan(tmp_path):
  path = tmp_path / "metrics.jsonl"
  with RunFiles(tmp_path, tensorboard=False, step=0) as files:
    files.row({"step": 1, "loss": 2.0})
    files.flush()
    assert rows(path) == [{"step": 1, "loss": 2.0}]
    files.row({"step": 2, "loss": float("nan"), "grad_norm": float("inf"), "by_layer": [1.0, float("nan")]})
  assert rows(path)[1] == {"step": 2, "loss": None, "grad_norm": None, "by_layer": [1.0, None]}
  assert not (tmp_path / "tensorboard").exists()


def test_going_on_drops_the_lines_of_steps_that_are_done_again(tmp_path, caplog):
  path = tmp_path / "metrics.jsonl"
  lines = [json.dumps({"step": s, "loss": 1.0}) for s in range(1, 6)]
  path.write_text("\n".join([*lines, "\0\0\xff", '{"step": 6, "lo']))
  with RunFiles(tmp_path, tensorboard=False, step=3) as files:
    assert [row["step"] for row in files.again] == [4, 5]
    files.row({"step": 4, "loss": 0.5})
  assert [(r["step"], r["loss"]) for r in read(path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 0.5)]
  again, damaged = (record.getMessage() for record in caplog.records)
  assert again.startswith(f"{path}: steps 4 to 5 ")
  assert again.endswith("metrics.dropped.jsonl")
  assert damaged == f"{path}: 2 damaged lines moved to metrics.dropped.jsonl"
  dropped = tmp_path / "metrics.dropped.jsonl"
  assert dropped.read_bytes().splitlines() == [lines[3].encode(), lines[4].encode(), "\0\0\xff".encode(), b'{"step": 6, "lo']
  assert keep_until(tmp_path / "absent.jsonl", 3) == []
  assert not (tmp_path / "absent.jsonl").exists()
  before = path.stat().st_ino
  assert keep_until(path, 4) == []
  assert path.stat().st_ino == before  # not rewritten if no line is removed
  keep_until(path, 3)
  assert dropped.read_text().endswith('{"step": 6, "lo\n{"step": 4, "loss": 0.5}\n')  # appended to the earlier lines


@pytest.mark.parametrize(
  ("there", "said"),
  [
    ([], "the rows of 5 of the 5 finished steps (from 1 to 5) are missing"),
    ([1, 2, 5], "the rows of 2 of the 5 finished steps (from 3 to 4) are missing"),
    ([1, 2, 3, 5, 6], "the rows of step 4 are missing"),
    ([1, 2, 3, 4, 5], None),
  ],
)
def test_rows_of_finished_steps_that_are_missing_are_reported_when_a_run_resumes(tmp_path, caplog, there, said):
  path = tmp_path / "metrics.jsonl"
  path.write_text("".join(f'{{"step": {step}}}\n' for step in there))
  (tmp_path / "samples.jsonl").write_text('{"step": 2}\n')  # samples need not have a row per step
  with RunFiles(tmp_path, tensorboard=False, step=5):
    pass
  missing = [record.getMessage() for record in caplog.records if "missing" in record.getMessage()]
  assert len(missing) == (said is not None)
  assert all(line.startswith(f"{path}: {said}, ") and "report.html" in line for line in missing)


@pytest.mark.parametrize("damage", ["5", "[1]", '{"loss": 1}', '{"step": null}', "[" * 100000, "{}"])
def test_a_damaged_line_is_left_out_and_told(tmp_path, caplog, damage):
  path = tmp_path / "metrics.jsonl"
  path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 2}}\n')
  assert read(path) == [{"step": 1}, {"step": 2}]
  assert [record.getMessage() for record in caplog.records] == [f"{path}: 1 damaged line left out"]


def test_a_file_that_cannot_be_read_at_the_start_is_refused(tmp_path):
  (tmp_path / "metrics.jsonl").mkdir()
  with pytest.raises(UserError, match=r"metrics.jsonl: Is a directory\n  fix: .*run_name"):
    RunFiles(tmp_path, tensorboard=False, step=0)


def test_the_last_file_knows_what_was_lost(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(output, "_FIRST_RETRY_SECONDS", 0.01)
  with RunFiles(tmp_path, tensorboard=True, step=0) as files:
    (tmp_path / "tensorboard").write_text("in the way")
    for step in (1, 2):
      files.row({"step": step, "loss": 1.0})
    files.text("env.json", "old")
    files.text("env.json", "new")
    files.text("x/none.txt", "no such directory")
    deadline = time.monotonic() + 30
    while len(caplog.records) < 2 and time.monotonic() < deadline:
      time.sleep(0.01)
    lost = files.end("report.html", "\n".join)
  assert (tmp_path / "env.json").read_text() == "new"
  assert (tmp_path / "report.html").read_text().splitlines() == lost
  assert lost == [
    "tensorboard: 2 rows not written: File exists",
    "x/none.txt: 1 version not written: No such file or directory",
  ]
  assert len(rows(tmp_path / "metrics.jsonl")) == 2
  (line,) = [r.getMessage() for r in caplog.records if "tensorboard" in r.getMessage()]
  assert line.startswith("tensorboard: File exists; training ")


def test_a_run_that_goes_back_drops_the_rows_of_the_steps_since(tmp_path):
  with RunFiles(tmp_path, tensorboard=False, step=0) as files:
    for step, loss in [(1, 1.0), (2, 2.0), (3, 9.0)]:
      files.row({"step": step, "loss": loss})
    files.sample({"step": 3, "text": "x"})
    files.rewind(1)
    files.row({"step": 2, "loss": 0.5})
    files.row({"step": 3, "loss": 0.25})
  assert rows(tmp_path / "metrics.jsonl") == [{"step": s, "loss": x} for s, x in ((1, 1.0), (2, 0.5), (3, 0.25))]
  assert [row["loss"] for row in rows(tmp_path / "metrics.dropped.jsonl")] == [2.0, 9.0]
  assert rows(tmp_path / "samples.jsonl") == []


def test_too_many_rows_behind_a_dead_disk_never_cost_the_way_back(tmp_path, monkeypatch, caplog):
  """If too many rows wait for a failing disk, rows are lost, but not the rewind to an earlier step. So no step is in the file
  twice."""
  monkeypatch.setattr(output, "_FIRST_RETRY_SECONDS", 0.01)
  dead, append = threading.Event(), AppendedFile.append

  def to_a_disk(file, piece):
    if dead.is_set():
      raise OSError(5, "Input/output error")
    append(file, piece)

  monkeypatch.setattr(AppendedFile, "append", to_a_disk)
  with RunFiles(tmp_path, tensorboard=False, step=0) as files:
    for step in (1, 2, 3):
      files.row({"step": step, "loss": 9.0})
    files.flush()
    assert len(rows(tmp_path / "metrics.jsonl")) == 3
    dead.set()
    files.row({"step": 4, "loss": 9.0})  # the write of this row fails
    deadline = time.monotonic() + 30
    while not caplog.records and time.monotonic() < deadline:
      time.sleep(0.01)
    files.rewind(1)
    for step in range(2, output.WAITING + 10):
      files.row({"step": step, "loss": 0.5})
    dead.clear()
    lost = files.end("report.html", "\n".join)
  written = rows(tmp_path / "metrics.jsonl")
  assert [row["step"] for row in written] == [1, *range(12, output.WAITING + 10)]
  assert lost == ["metrics.jsonl: 10 rows not written: Input/output error"]
  assert [row["step"] for row in rows(tmp_path / "metrics.dropped.jsonl")] == [2, 3, 4]
