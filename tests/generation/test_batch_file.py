"""Files of answers: a killed job continues, and answers of another job are refused."""

import json
import os
from pathlib import Path

import pytest

from maxtext_like.errors import RetryableError, UserError
from maxtext_like.generation.batch_file import BatchFile, key_of

KEYS = [key_of(prompt, {"seed": 1}, "model") for prompt in ("a", "b", "c")]


def test_an_unfinished_line_is_written_again(tmp_path: Path):
  path = tmp_path / "answers.jsonl"
  with BatchFile(path, KEYS) as file:
    assert file.done == set()
    file.add(1, {"text": "ä\ud800"})
    with pytest.raises(UserError, match="another job writes it"):
      BatchFile(path, KEYS)
  with open(path, "ab") as file:
    file.write(b'{"index": 0, "te')
  with BatchFile(path, KEYS) as file:
    assert file.done == {1}
    file.add(0, {"text": "x"})
  records = [json.loads(line) for line in path.read_text().splitlines()]
  assert [(record["index"], record["key"]) for record in records] == [(1, KEYS[1]), (0, KEYS[0])]


@pytest.mark.parametrize("line", ['{"index": 1, "key": "0"}', '{"index": 3, "key": "0"}', "[1]", "{"])
def test_lines_of_another_job_are_refused(line: str, tmp_path: Path):
  path = tmp_path / "answers.jsonl"
  path.write_text(line + "\n")
  with pytest.raises(UserError, match=r"answers.jsonl:1: .*(\n.*)*another --output"):
    BatchFile(path, KEYS)
  assert path.read_text() == line + "\n"
  assert key_of("a", {"seed": 2}, "model") != KEYS[0]
  # A set has another order in each process.
  assert key_of("a", {"stop": {"x", "y", "z"}}, "model") == key_of("a", {"stop": ["x", "y", "z"]}, "model")
  assert key_of("a", {"seed": 1}, "other") != KEYS[0]


def test_a_full_disk_can_be_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  path = tmp_path / "answers.jsonl"

  def full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")

  with BatchFile(path, KEYS) as file:
    file.add(0, {})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RetryableError, match=r"No space left on device\n.*1 of 3 prompts are done"):
      file.add(1, {})
  with pytest.raises(UserError, match="cannot be written"):
    BatchFile(tmp_path / "none" / "answers.jsonl", KEYS)
