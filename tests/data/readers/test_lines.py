"""Files that change during the run: appended lines are ignored, any other change is refused."""

import json
import logging

import pytest

from maxtext_like.data.readers import lines as line_files
from maxtext_like.data.readers.jsonl import JsonLines
from maxtext_like.errors import UserError

LINES = [json.dumps({"text": f"number {i}"}) + "\n" for i in range(50)]


@pytest.fixture
def path(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text("".join(LINES))
  return path


def test_what_is_appended_is_not_read_and_told_once(path, caplog):
  documents = JsonLines([str(path)], "text")
  for _ in range(3):
    with path.open("a") as file:
      file.write('{"text": "more"}\n')
    with caplog.at_level(logging.WARNING):
      assert [documents.read(i).text for i in (49, 0)] == ["number 49", "number 0"]
  assert len(documents) == 50
  assert len(list(documents.scan())) == 50
  assert caplog.text.count("a.jsonl: the file was written to during the run; its first") == 1


@pytest.mark.parametrize("change", ["same size", "shorter", "other lines"])
def test_another_file_is_refused(path, change, monkeypatch):
  monkeypatch.setattr(line_files, "TRUST_SECONDS", 0.0)
  documents = JsonLines([str(path)], "text")
  assert documents.read(3).text == "number 3"
  with path.open("a") as file:
    file.write("\n")
  assert documents.read(3).text == "number 3"
  if change == "same size":
    path.write_text("".join(LINES).replace("number 40", "number 04") + "\n")
  elif change == "shorter":
    path.write_text("".join(LINES[:45]))
  else:
    path.write_text("".join(reversed(LINES)))
  with pytest.raises(UserError, match=r"a\.jsonl: the file changed during the run: its first \d+ bytes differ"):
    documents.read(3)
