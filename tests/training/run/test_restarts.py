"""Tests maxtext_like/training/run/restarts.py: starts without progress are counted, unless a user has to act."""

import contextlib
import json

import pytest

from maxtext_like.errors import InterruptedRunError, NoProgressError, RetryableError, UserError
from maxtext_like.training.run.restarts import Restarts
from maxtext_like.training.run.run_directory import RunDirectory


def start(run, newest, ending=None, limit=3):
  with contextlib.suppress(RetryableError, UserError, InterruptedRunError, ZeroDivisionError), Restarts(run, newest, limit):
    if ending is not None:
      raise ending


def test_a_run_that_only_restarts_ends(tmp_path):
  with RunDirectory(tmp_path, "run") as run:
    for _ in range(4):  # the first start and three restarts
      start(run, 40, RetryableError("again"))
    with pytest.raises(NoProgressError, match=r"started 4 times in a row .* still step 40") as caught:
      start(run, 40)
    assert caught.value.exit_code == 3
    with pytest.raises(NoProgressError):  # and every later start fails too
      start(run, 40)
    start(run, 40, RetryableError("again"), limit=0)
    start(run, 50, RetryableError("again"))
    assert json.loads((run.path / "restarts.json").read_text()) == {"newest_step": 50, "starts": 1}


def test_what_counts(tmp_path):
  with RunDirectory(tmp_path, "run") as run:
    for ending in (None, UserError("a typo"), InterruptedRunError("Ctrl-C")):
      start(run, None, ending)
      assert not (run.path / "restarts.json").exists()
    for ending in (RetryableError("a full disk"), ZeroDivisionError("of the program itself")):
      start(run, None, ending)
    assert json.loads((run.path / "restarts.json").read_text())["starts"] == 2


@pytest.mark.parametrize(
  "text", ["", "[]", "{}", *(f'{{"newest_step": null, "starts": {n}}}' for n in ('"x"', "1e999", "-3", "1e9", "NaN", 10**12))]
)
def test_a_damaged_count_starts_anew(tmp_path, caplog, text):
  with RunDirectory(tmp_path, "run") as run:
    (run.path / "restarts.json").write_text(text)
    start(run, None, RetryableError("again"))
    assert json.loads((run.path / "restarts.json").read_text())["starts"] == 1
  assert "cannot be read" in caplog.text


def test_a_count_that_cannot_be_written_is_told(tmp_path, caplog):
  with RunDirectory(tmp_path, "run") as run:
    (run.path / "restarts.json").mkdir()
    start(run, None)
  assert "so this start is not counted" in caplog.text
